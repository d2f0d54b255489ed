"""Certificates and kubeconfigs: the identities in them, and that the pieces fit."""

import base64
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from hack.cluster import pki
from hack.cluster.layout import Layout


def test_a_nodes_certificate_has_what_the_node_authorizer_reads(tmp_path: Path) -> None:
    pki.make_authority(tmp_path)
    pki.make_certificate(tmp_path, pki.node_identity("node1", "10.201.0.1"))
    subject = x509.load_pem_x509_certificate((tmp_path / "node1.crt").read_bytes()).subject
    assert subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "system:node:node1"
    assert subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "system:nodes"


def test_clients_accept_the_api_server_by_its_names(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    pki.make_pki(layout)
    authority = x509.load_pem_x509_certificate((layout.pki / "ca.crt").read_bytes())
    served = x509.load_pem_x509_certificate((layout.pki / "apiserver.crt").read_bytes())
    policy = PolicyBuilder().store(Store([authority]))
    policy.build_server_verifier(x509.DNSName("kubernetes.default.svc")).verify(served, [])


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    pki.make_pki(layout)
    secret = [*layout.pki.glob("*.key"), *layout.settings.glob("*.kubeconfig"), layout.kubeconfig]
    assert len(secret) >= 10
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}


def test_making_it_again_changes_nothing(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    pki.make_pki(layout)
    before = {path: path.read_bytes() for path in layout.pki.iterdir()}
    pki.make_pki(layout)
    assert {path: path.read_bytes() for path in layout.pki.iterdir()} == before


def test_a_kubeconfig_stands_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    pki.make_pki(layout)
    user = json.loads(layout.kubeconfig.read_text())["users"][0]["user"]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(user["client-certificate-data"]))
    public = certificate.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert public.public_numbers()
    assert certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "system:masters"
