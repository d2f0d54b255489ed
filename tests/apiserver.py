"""A real kube-apiserver over a real etcd, for what only it can say: does it take the chart's objects, what do policies deny.

There is no controller, scheduler or kubelet, so nothing that is created ever runs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from hack.cluster.pki import Identity, kubeconfig_text, make_authority, make_certificate
from tests.ports import free_port

START_TIMEOUT_S: Final = 60.0
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
    admin: ssl.SSLContext
    """Knows the server and carries the administrator's certificate."""
    program: Program
    etcd_program: Program
    etcd: str

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

    def pids(self) -> list[int]:
        """Of the API server and of etcd."""
        return [one.process.pid for one in (self.program, self.etcd_program) if one.process]

    def stop(self) -> None:
        """Kill it. etcd stays, and with it everything that was written."""
        self.program.kill()

    def start(self) -> None:
        """After `stop`: again at the same address."""
        self.program.start()
        _await_ready(self.http, self.program)

    def compact(self) -> None:
        """Have etcd forget all versions but the newest, as it does by itself every five minutes."""
        requested = {"key": base64.b64encode(b"none").decode()}
        revision = httpx.post(f"{self.etcd}/v3/kv/range", json=requested).json()["header"]["revision"]
        httpx.post(f"{self.etcd}/v3/kv/compaction", json={"revision": revision}).raise_for_status()

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
def running(programs: Mapping[str, Path], folder: Path, *flags: str) -> Iterator[ApiServer]:
    """From start to end; both processes are gone afterwards. `flags`: more of kube-apiserver's."""
    client_port, peer_port, port = free_port(), free_port(), free_port()
    pki = folder / "pki"
    make_authority(pki)
    make_certificate(pki, Identity("apiserver", "kube-apiserver", dns_names=("localhost",), addresses=("127.0.0.1",)))
    make_certificate(pki, Identity("admin", "kubernetes-admin", ("system:masters",)))
    etcd = f"http://127.0.0.1:{client_port}"
    apiserver = Program([*_apiserver(pki, etcd, port), *flags], folder / "apiserver.log", programs["kube-apiserver"])
    storage = Program(_etcd(programs["etcd"], folder, etcd, f"http://127.0.0.1:{peer_port}"), folder / "etcd.log")
    with storage, apiserver:
        server = f"https://127.0.0.1:{port}"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(kubeconfig_text(pki, "admin", server))
        kubeconfig.chmod(0o600)
        trust, admin = (ssl.create_default_context(cafile=str(pki / "ca.crt")) for _ in range(2))
        admin.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        with httpx.Client(base_url=server, verify=admin, timeout=30, trust_env=False) as http:
            _await_ready(http, apiserver)
            yield ApiServer(http, kubeconfig, trust, admin, apiserver, storage, etcd)


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
        # no controller makes default service accounts here, or takes its first taint from a node
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition", "--profiling=false", "--endpoint-reconciler-type=none",
    ]  # fmt: skip


class Program:
    """A process that may be killed and started again; gone at the end of its block."""

    def __init__(self, command: list[str], log: Path, executable: Path | None = None) -> None:
        self.command, self.log, self.executable = command, log, executable
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, executable=self.executable, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def __enter__(self) -> Program:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _await_ready(http: httpx.Client, program: Program) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and program.running:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/readyz").status_code == 200 and http.get("/api/v1/namespaces/default").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"kube-apiserver is not ready:\n{program.log.read_text(errors='replace')[-3000:]}")
