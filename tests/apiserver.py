"""A real kube-apiserver over a real etcd, for what only it can say: does it take the chart's objects, what do policies deny.

There is no controller, scheduler or kubelet, so nothing that is created ever runs.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from hack.cluster.pki import Identity, kubeconfig_text, make_authority, make_certificate

START_PATIENCE_S: Final = 60.0
"""It takes 6 s on 2 cores; the rest is for busy ones."""

MERGE: Final = "application/merge-patch+json"


class Denied(Exception):
    """The API server refused a request. The text is its message."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Calls as the administrator, or as anybody by impersonation."""

    http: httpx.Client
    kubeconfig: Path
    trust: ssl.SSLContext
    """Knows the server, and carries no certificate of a client."""

    def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        user: str = "",
        node: str = "",
        token: str = "",
        content_type: str = "application/json",
    ) -> Any:
        """Decoded answer; raises Denied. `node` is the node that a service account token is bound to; `token` is such a one."""
        if token:
            return self._with_token(token, method, path, body)
        headers = {"Content-Type": content_type}
        if user:
            headers |= {"Impersonate-User": user, "Impersonate-Group": "system:masters"}
        if node:
            headers["Impersonate-Extra-authentication.kubernetes.io%2Fnode-name"] = node
        answer = self.http.request(method, path, content=json.dumps(body) if body else None, headers=headers)
        decoded = answer.json()
        if answer.status_code >= 400:
            raise Denied(decoded["message"])
        return decoded

    def _with_token(self, token: str, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The administrator's certificate would win over a token, so this is a connection without one."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with httpx.Client(base_url=self.http.base_url, verify=self.trust, timeout=30, trust_env=False) as http:
            answer = http.request(method, path, content=json.dumps(body) if body else None, headers=headers)
        if answer.status_code >= 400:
            raise Denied(answer.json()["message"])
        return answer.json()

    def patch(self, path: str, body: Mapping[str, Any], *, user: str = "", node: str = "") -> Any:
        """Merge patch."""
        return self("PATCH", path, body, user=user, node=node, content_type=MERGE)

    def apply(self, thing: Mapping[str, Any], path: str) -> Any:
        """Server-side apply, which also says when a field is unknown."""
        name = thing["metadata"]["name"]
        return self(
            "PATCH",
            f"{path}/{name}?fieldManager=test&force=true&fieldValidation=Strict",
            thing,
            content_type="application/apply-patch+yaml",
        )


@contextlib.contextmanager
def running(programs: Mapping[str, Path], folder: Path) -> Iterator[ApiServer]:
    """From start to end; both processes are gone afterwards."""
    client_port, peer_port, port = _free_ports(3)
    pki = folder / "pki"
    make_authority(pki)
    make_certificate(pki, Identity("apiserver", "kube-apiserver", dns_names=("localhost",), addresses=("127.0.0.1",)))
    make_certificate(pki, Identity("admin", "kubernetes-admin", ("system:masters",)))
    etcd = f"http://127.0.0.1:{client_port}"
    with (
        _process(folder / "etcd.log", _etcd(programs["etcd"], folder, etcd, f"http://127.0.0.1:{peer_port}")),
        _process(folder / "apiserver.log", _apiserver(pki, etcd, port), programs["kube-apiserver"]) as apiserver,
    ):
        server = f"https://127.0.0.1:{port}"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(kubeconfig_text(pki, "admin", server))
        kubeconfig.chmod(0o600)
        trust, admin = (ssl.create_default_context(cafile=str(pki / "ca.crt")) for _ in range(2))
        admin.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        with httpx.Client(base_url=server, verify=admin, timeout=30, trust_env=False) as http:
            _await_ready(http, apiserver, folder / "apiserver.log")
            yield ApiServer(http, kubeconfig, trust)


def _etcd(program: Path, folder: Path, client: str, peer: str) -> list[str]:
    return [
        str(program), f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", "--log-level=error",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
    ]  # fmt: skip


def _apiserver(pki: Path, etcd: str, port: int) -> list[str]:
    # argv[0] chooses which of Kubernetes' programs the one binary is
    return [
        "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={port}",
        f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}", "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        "--service-cluster-ip-range=10.96.0.0/24", "--authorization-mode=Node,RBAC", "--allow-privileged",
        # no controller makes default service accounts here
        "--disable-admission-plugins=ServiceAccount", "--profiling=false", "--endpoint-reconciler-type=none",
    ]  # fmt: skip


@contextlib.contextmanager
def _process(log: Path, command: list[str], program: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, executable=program, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _await_ready(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/readyz").status_code == 200 and http.get("/api/v1/namespaces/default").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"kube-apiserver is not ready:\n{log.read_text(errors='replace')[-3000:]}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
