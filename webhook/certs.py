"""Certificates of our own, for clusters without cert-manager: what they are, and when they change.

Pure: `renewed` gets what is kept and the time, and returns what should be kept. It depends on neither Secrets nor files.

    ca.crt    every CA certificate that the API server should trust, newest first
    ca.key    key of the newest one
    ca-old.key    key of the one before it, while the newest is not yet used
    tls.crt, tls.key    the serving certificate

Rotation never breaks a call. A new CA is announced (in ca.crt, and so in caBundle) for a day before it signs anything, and
stays announced until it expires; a serving certificate is renewed after two thirds of its life, so that replicas have the
last third to notice. All replicas read one Secret; the first write wins, and the other replicas use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFE: Final = timedelta(days=3650)
LEAF_LIFE: Final = timedelta(days=90)
ANNOUNCED: Final = timedelta(days=1)
"""How long a new CA is trusted before it signs. Guessed: API servers see a new caBundle within seconds."""

BACKDATED: Final = timedelta(minutes=5)
"""For clocks that run behind ours. Guessed."""

CA_CERT, CA_KEY, OLD_CA_KEY, CERT, KEY = "ca.crt", "ca.key", "ca-old.key", "tls.crt", "tls.key"

Kept = Mapping[str, bytes]
"""File name -> PEM, as in a Secret."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA that can sign."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def renewed(kept: Kept, dns_names: tuple[str, ...], now: datetime) -> dict[str, bytes]:
    """What should be kept at `now`; equal to `kept` when nothing is due.

    What cannot be read is made anew.
    """
    trusted, authorities = _authorities(kept, now)
    if not authorities or _due(authorities[0].cert, now):
        fresh = _new_authority(now)
        trusted, authorities = [fresh.cert, *trusted], [fresh, *authorities[:1]]
    signer = _signer(authorities, now)
    still_needed = len(authorities) > 1 and signer is not authorities[0]
    files = {
        CA_CERT: b"".join(map(_pem, trusted)),
        CA_KEY: _key_pem(authorities[0].key),
        CERT: kept.get(CERT, b""),
        KEY: kept.get(KEY, b""),
    }
    if still_needed:
        files[OLD_CA_KEY] = _key_pem(authorities[1].key)
    if not _leaf_serves(kept, signer, dns_names, now):
        files[CERT], files[KEY] = _new_leaf(signer, dns_names, now)
    return files


def not_after(cert_pem: bytes) -> datetime:
    """When a certificate expires."""
    return x509.load_pem_x509_certificate(cert_pem).not_valid_after_utc


def _authorities(kept: Kept, now: datetime) -> tuple[list[x509.Certificate], list[Authority]]:
    """CAs that are still valid, newest first; and those of them that we can sign with."""
    trusted = [cert for cert in _certs(kept.get(CA_CERT, b"")) if cert.not_valid_after_utc > now]
    keys = [key for name in (CA_KEY, OLD_CA_KEY) if (key := _key(kept.get(name, b"")))]
    able = [Authority(cert, key) for cert in trusted for key in keys if key.public_key() == cert.public_key()]
    return trusted, able


def _signer(authorities: list[Authority], now: datetime) -> Authority:
    """The newest CA that was announced for long enough, else the oldest there is."""
    for authority in authorities:
        if now >= authority.cert.not_valid_before_utc + BACKDATED + ANNOUNCED:
            return authority
    return authorities[-1]


def _due(cert: x509.Certificate, now: datetime) -> bool:
    """Are two thirds of its life over?"""
    life = cert.not_valid_after_utc - cert.not_valid_before_utc
    return now >= cert.not_valid_before_utc + life * 2 / 3


def _leaf_serves(kept: Kept, signer: Authority, dns_names: tuple[str, ...], now: datetime) -> bool:
    """May the serving certificate stay as it is?"""
    certs, key = _certs(kept.get(CERT, b"")), _key(kept.get(KEY, b""))
    if not certs or key is None or key.public_key() != certs[0].public_key() or _due(certs[0], now):
        return False
    try:
        certs[0].verify_directly_issued_by(signer.cert)
        names = certs[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return set(names.get_values_for_type(x509.DNSName)) == set(dns_names)


def _new_authority(now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tangram-webhook-ca-{now:%Y-%m-%d}")])
    builder = _builder(name, name, key, now, CA_LIFE)
    for extension in (x509.BasicConstraints(ca=True, path_length=0), _usage(signs=True)):
        builder = builder.add_extension(extension, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def _new_leaf(signer: Authority, dns_names: tuple[str, ...], now: datetime) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tangram-webhook")])
    builder = _builder(name, signer.cert.subject, key, now, LEAF_LIFE)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
        .add_extension(issuer_key, critical=False)
    )
    return _pem(builder.sign(signer.key, hashes.SHA256())), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _certs(pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
