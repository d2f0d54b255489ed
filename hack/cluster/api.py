"""The few calls to the API server that bringing a cluster up needs: plain HTTP with the administrator's certificate."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from typing import Any

from hack.cluster.layout import API_PORT, Layout


class Api:
    """One call, one connection."""

    def __init__(self, layout: Layout) -> None:
        self._tls = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        self._tls.load_cert_chain(layout.pki / "admin.crt", layout.pki / "admin.key")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body. Status 0: the server cannot be reached now."""
        connection = http.client.HTTPSConnection("127.0.0.1", API_PORT, context=self._tls, timeout=10)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error).encode()
        finally:
            connection.close()

    def get(self, path: str) -> dict[str, Any] | None:
        """The object, or None where there is none (yet)."""
        status, content = self.call("GET", path)
        if status != 200:
            return None
        found: dict[str, Any] = json.loads(content)
        return found

    def ensure(self, path: str, manifest: dict[str, Any]) -> None:
        """Create the object unless one of its name is there. `path` is that of its kind."""
        status, content = self.call("POST", path, manifest)
        if status not in {200, 201, 409}:
            raise RuntimeError(f"{path}/{manifest['metadata']['name']}: answered {status}: {content[:500]!r}")

    def is_ready(self) -> bool:
        return self.call("GET", "/readyz")[0] == 200

    def node_is_ready(self, name: str) -> bool:
        node = self.get(f"/api/v1/nodes/{name}")
        conditions = node["status"].get("conditions", []) if node else []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def wait(what: str, ready: Callable[[], bool], timeout_s: float, still_possible: Callable[[], str | None]) -> None:
    """Return when `ready`. Gives up past the patience, or at once when `still_possible` returns a reason why not."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        reason = still_possible()
        if reason is not None:
            raise RuntimeError(f"{what}: {reason}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not ready after {timeout_s:g} s")
        time.sleep(0.1)
