"""The cluster's certificate authority, certificates and kubeconfigs.

One authority signs everything, valid for ten years and only ever in the state folder (mode 0600). Made once: a second call
finds what is there. Keys are P-256, which cost a thousandth of the time of RSA to make. Service account tokens are
signed with a key of their own.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hack.cluster.layout import API_PORT, API_SERVICE_ADDRESS, Layout

VALID_DAYS: Final = 3650


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate's subject: Kubernetes reads the user from `user` and the groups from `groups`."""

    name: str
    user: str
    groups: tuple[str, ...] = ()
    dns_names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()


def identities(control_plane_address: str) -> list[Identity]:
    """Everyone of the control plane. Nodes are made as they come."""
    served = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
    reached = ("127.0.0.1", API_SERVICE_ADDRESS, control_plane_address)
    return [
        Identity("apiserver", "kube-apiserver", dns_names=served, addresses=reached),
        Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", ("system:masters",)),
        Identity("admin", "kubernetes-admin", ("system:masters",)),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("proxy", "system:kube-proxy"),
    ]


def node_identity(name: str, address: str) -> Identity:
    """The name and group that the Node authorizer and NodeRestriction request."""
    return Identity(name, f"system:node:{name}", ("system:nodes",), (name,), (address, "127.0.0.1"))


def _write(path: Path, content: bytes, mode: int) -> None:
    path.touch(mode=mode)
    path.chmod(mode)
    path.write_bytes(content)


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.TraditionalOpenSSL
    text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    _write(path, text, 0o600)
    return key


def _subject(identity: Identity) -> x509.Name:
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in identity.groups]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, identity.user)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def make_authority(folder: Path) -> None:
    """ca.crt and ca.key, and the key of service account tokens."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / "ca.crt").exists():
        return
    public = _new_key(folder / "service-accounts.key").public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    _write(folder / "service-accounts.pub", public.public_bytes(serialization.Encoding.PEM, form), 0o644)
    key = _new_key(folder / "ca.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tangram-cluster")])
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def make_certificate(folder: Path, identity: Identity) -> None:
    """<name>.crt and <name>.key, good for serving and for calling, unless they are there."""
    certificate_path = folder / f"{identity.name}.crt"
    if certificate_path.exists():
        return
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    authority_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = _new_key(folder / f"{identity.name}.key")
    builder = _builder(_subject(identity), authority.subject, key.public_key())
    names: Sequence[x509.GeneralName] = [
        *(x509.DNSName(name) for name in identity.dns_names),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in identity.addresses),
    ]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        builder.add_extension(purposes, critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def kubeconfig_text(folder: Path, name: str, server: str) -> str:
    """A kubeconfig (JSON, which is YAML) that has all it needs."""

    def embedded(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "tangram", "cluster": {"server": server, "certificate-authority-data": embedded("ca.crt")}}
        ],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate-data": embedded(f"{name}.crt"),
                    "client-key-data": embedded(f"{name}.key"),
                },
            }
        ],
        "contexts": [{"name": "tangram", "context": {"cluster": "tangram", "user": name}}],
        "current-context": "tangram",
    }
    return json.dumps(content, indent=1) + "\n"


def write_kubeconfig(layout: Layout, name: str, path: Path) -> None:
    server = f"https://127.0.0.1:{API_PORT}"
    _write(path, kubeconfig_text(layout.pki, name, server).encode(), 0o600)


def make_pki(layout: Layout) -> None:
    """Everything of the control plane: certificates, and kubeconfigs in the settings folder."""
    make_authority(layout.pki)
    layout.settings.mkdir(parents=True, exist_ok=True)
    for identity in identities(layout.node(1).address):
        make_certificate(layout.pki, identity)
    for name in ("controller-manager", "scheduler", "proxy"):
        write_kubeconfig(layout, name, layout.settings / f"{name}.kubeconfig")
    write_kubeconfig(layout, "admin", layout.kubeconfig)
