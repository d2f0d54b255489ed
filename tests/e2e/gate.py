"""Stand between the API server and a write that binds a pod, and delay it for as long as a test wants.

A validating webhook on this machine: the binding is checked last, then written. So while it is held the scheduler has decided and
the extender waits for an answer; what happens to either now is what a test wants to see. Local cluster only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hack.cluster.pki import Identity, make_authority, make_certificate
from hack.kubectl import Kubectl

NAME = "e2e-gate"
TIMEOUT_S = 60


class Gate:
    """Delays the first binding of one pod; every other passes."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self._arrived, self._open = threading.Event(), threading.Event()
        self._let_in = True

    def wait(self) -> None:
        """Until the binding is here: the extender waits for its answer."""
        assert self._arrived.wait(TIMEOUT_S), f"no binding of pod {self._pod} within {TIMEOUT_S} s"

    def allow(self) -> None:
        """It is written now."""
        self._open.set()

    def deny(self) -> None:
        """It is not written."""
        self._let_in = False
        self._open.set()

    def check(self, review: dict[str, Any]) -> dict[str, Any]:
        """Answer one admission review."""
        request = review["request"]
        allowed = True
        if request["name"] == self._pod and not self._arrived.is_set():
            self._arrived.set()
            self._open.wait(TIMEOUT_S)
            allowed = self._let_in
        return {**review, "response": {"uid": request["uid"], "allowed": allowed}}


@contextlib.contextmanager
def gate(kubectl: Kubectl, namespace: str, pod: str, folder: Path) -> Iterator[Gate]:
    """A gate for one pod of one namespace; `folder` takes its certificate."""
    held = Gate(pod)
    make_authority(folder)
    make_certificate(folder, Identity("gate", "gate", addresses=("127.0.0.1",)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(held))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "gate.crt", folder / "gate.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    authority = base64.b64encode((folder / "ca.crt").read_bytes()).decode()
    try:
        kubectl.create(_configuration(namespace, f"https://127.0.0.1:{server.server_port}/", authority))
        yield held
    finally:
        held.allow()
        kubectl("delete", "validatingwebhookconfiguration", NAME, "--ignore-not-found")
        server.shutdown()
        thread.join()
        server.server_close()


def _configuration(namespace: str, url: str, authority: str) -> dict[str, Any]:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            {
                "name": "gate.e2e.example.com",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 30,
                "clientConfig": {"url": url, "caBundle": authority},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "rules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}
                ],
            }
        ],
    }


def _handler(held: Gate) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(held.check(review)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may be gone by now
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """No log."""

    return Handler
