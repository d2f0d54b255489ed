"""The API server from the tests' own process: reads, writes and watches in milliseconds.

A kubectl costs a tenth of a second of a processor, and the tests of a cluster look thousands of times. What a user would type stays kubectl. What a
test looks at comes from here. `kubectl proxy` authenticates, so any kubeconfig will do.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import httpx
import websocket

from hack.kubectl import CommandFailed, Kubectl
from hack.waiting import NotSoon, eventually

T = TypeVar("T")
Object = dict[str, Any]

CALL_S: Final = 35.0
"""For one call. A webhook of Kubernetes' own has 30 s."""
ANYWHERE: Final = "(all)"
"""In the place of a namespace: objects of all of them."""

EXEC: Final = "v4.channel.k8s.io"
STDOUT, STDERR, ENDED = 1, 2, 3
"""The first byte of each frame. Specified: k8s.io/kubelet, remotecommand."""

_CORE: Final = "/api/v1"
_APPS: Final = "/apis/apps/v1"
_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
KINDS: Final[Mapping[str, tuple[str, str, bool]]] = {
    "clusterrolebinding": (_RBAC, "clusterrolebindings", False),
    "configmap": (_CORE, "configmaps", True),
    "deployment": (_APPS, "deployments", True),
    "event": ("/apis/events.k8s.io/v1", "events", True),
    "lease": ("/apis/coordination.k8s.io/v1", "leases", True),
    "limitrange": (_CORE, "limitranges", True),
    "mutatingwebhookconfiguration": (_ADMISSION, "mutatingwebhookconfigurations", False),
    "namespace": (_CORE, "namespaces", False),
    "node": (_CORE, "nodes", False),
    "pod": (_CORE, "pods", True),
    "replicaset": (_APPS, "replicasets", True),
    "resourceslice": ("/apis/resource.k8s.io/v1", "resourceslices", False),
    "resourcequota": (_CORE, "resourcequotas", True),
    "secret": (_CORE, "secrets", True),
    "serviceaccount": (_CORE, "serviceaccounts", True),
}
"""Kind in small letters -> prefix of its paths, plural, whether namespaces have it."""


def path_of(kind: str, namespace: str | None = None, name: str = "") -> str:
    """Of one object, or of all of a kind in a namespace."""
    prefix, plural, namespaced = KINDS[kind.lower()]
    within = f"/namespaces/{namespace}" if namespaced and namespace != ANYWHERE else ""
    return f"{prefix}{within}/{plural}" + (f"/{name}" if name else "")


class NotThere(CommandFailed):
    """There is no such object."""


@dataclass(frozen=True, slots=True)
class Api:
    """Every failure is a CommandFailed with the server's words, as kubectl's are."""

    client: httpx.Client
    socket: Path
    """Of the proxy."""

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **params: str
    ) -> httpx.Response:
        """Raises CommandFailed also without an answer."""
        content = None if body is None else json.dumps(body)
        try:
            answer = self.client.request(
                method, path, content=content, params=params, headers={"Content-Type": content_type}
            )
        except httpx.HTTPError as error:
            raise CommandFailed(f"{method} {path}: {error!r}") from None
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise NotThere(f"{method} {path}: {_words(answer)}")
        if answer.is_error:
            raise CommandFailed(f"{method} {path}: {answer.status_code} {_words(answer)}")
        return answer

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None when there is none."""
        try:
            found: Object = self.call("GET", path_of(kind, namespace, name)).json()
        except NotThere:
            return None
        return found

    def listed(self, kind: str, namespace: str | None = None, labels: str = "", fields: str = "") -> list[Object]:
        """All of a kind; `labels` and `fields` are selectors."""
        found: list[Object] = self._list(kind, namespace, labels, fields)["items"]
        return found

    def _list(self, kind: str, namespace: str | None, labels: str = "", fields: str = "") -> Object:
        found: Object = self.call("GET", path_of(kind, namespace), labelSelector=labels, fieldSelector=fields).json()
        for one in found["items"]:  # in a list the server leaves it out
            one["kind"] = found["kind"].removesuffix("List")
        return found

    def create(self, thing: Mapping[str, Any], namespace: str | None = None, *, dry_run: bool = False) -> None:
        """`dry_run`: it is admitted or refused, and not kept."""
        more = {"dryRun": "All"} if dry_run else {}
        self.call("POST", path_of(thing["kind"], namespace), thing, fieldValidation="Strict", **more)

    def apply(self, thing: Mapping[str, Any], namespace: str | None = None) -> None:
        """Create it, or set the fields that are named."""
        path = path_of(thing["kind"], namespace, thing["metadata"]["name"])
        self.call("PATCH", path, thing, "application/apply-patch+yaml", fieldManager="e2e", force="true")

    def patch(self, kind: str, name: str, namespace: str | None, change: Mapping[str, Any]) -> None:
        """A merge patch."""
        self.call("PATCH", path_of(kind, namespace, name), change, "application/merge-patch+json")

    def delete(self, kind: str, name: str, namespace: str | None = None, *, by_force: bool = False) -> None:
        """Does not wait. `by_force`: a pod is forgotten at once, whatever its processes do."""
        self.call("DELETE", path_of(kind, namespace, name), {"gracePeriodSeconds": 0} if by_force else None)

    def delete_all(
        self, kind: str, namespace: str, labels: str = "", fields: str = "", *, by_force: bool = False
    ) -> None:
        """Of a kind in a namespace, as `delete` does."""
        body = {"gracePeriodSeconds": 0} if by_force else None
        self.call("DELETE", path_of(kind, namespace), body, labelSelector=labels, fieldSelector=fields)

    def log(self, namespace: str, name: str, container: str) -> str:
        """A container's log so far."""
        return self.call("GET", f"{path_of('pod', namespace, name)}/log", container=container).text

    def exec(
        self, namespace: str, name: str, *command: str, container: str | None = None, timeout_s: float = 300
    ) -> str:
        """Standard output of a command in a container. Raises CommandFailed with both outputs when it fails."""
        query = [("stdout", "1"), ("stderr", "1"), *(("command", word) for word in command)]
        query += [("container", container)] if container else []
        url = f"ws://localhost{path_of('pod', namespace, name)}/exec?{urlencode(query)}"
        printed = {STDOUT: b"", STDERR: b"", ENDED: b""}
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(str(self.socket))
            connected.settimeout(timeout_s)
            try:
                channel = websocket.create_connection(url, socket=connected, subprotocols=[EXEC], suppress_origin=True)
                while not printed[ENDED]:
                    opcode, frame = channel.recv_data()
                    if opcode == websocket.ABNF.OPCODE_CLOSE:
                        raise CommandFailed(f"{' '.join(command)} in {namespace}/{name}: the server hung up")
                    if frame:
                        printed[frame[0]] += frame[1:]
            except (websocket.WebSocketException, OSError) as error:
                raise CommandFailed(f"{' '.join(command)} in {namespace}/{name}: {error!r}") from None
            with contextlib.suppress(websocket.WebSocketException, OSError):  # the server may have hung up first
                channel.close()
        ended = json.loads(printed[ENDED])
        out, err = (printed[stream].decode() for stream in (STDOUT, STDERR))
        if ended["status"] != "Success":
            raise CommandFailed(f"{' '.join(command)} in {namespace}/{name}: {ended.get('message')}\n{out}{err}")
        return out

    def until(
        self,
        kind: str,
        namespace: str | None,
        judge: Callable[[dict[str, Object]], T | None],
        what: str,
        *,
        timeout_s: float = 60,
    ) -> T:
        """Judge all objects of a kind in a namespace, by name, and again at each change, until the answer is truthy. Return it."""
        deadline = time.monotonic() + timeout_s
        while True:
            listed = self._list(kind, namespace)
            seen = {one["metadata"]["name"]: one for one in listed["items"]}
            if found := judge(seen):
                return found
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotSoon(f"not within {timeout_s:.0f} s: {what}")
            for _ in self._changes(kind, namespace, seen, listed["metadata"]["resourceVersion"], left_s):
                if found := judge(seen):
                    return found

    def _changes(
        self, kind: str, namespace: str | None, seen: dict[str, Object], since: str, within_s: float
    ) -> Iterator[None]:
        """Keeps `seen` as the server has it, and yields after each change. Ends also when the server ends the watch, or went away."""
        params = {"watch": "1", "resourceVersion": since, "timeoutSeconds": str(max(1, round(within_s)))}
        try:
            with self.client.stream(
                "GET", path_of(kind, namespace), params=params, timeout=CALL_S + within_s
            ) as answer:
                for line in answer.iter_lines():
                    event = json.loads(line)
                    if event.get("type") not in {"ADDED", "MODIFIED", "DELETED"}:
                        return
                    name = event["object"]["metadata"]["name"]
                    seen[name] = event["object"]
                    if event["type"] == "DELETED":
                        del seen[name]
                    yield
        except httpx.HTTPError:
            return


def _words(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text


@contextlib.contextmanager
def served(kubectl: Kubectl) -> Iterator[Api]:
    """The API server of a kubeconfig."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "api.sock"
        proxy = subprocess.Popen(
            kubectl.words("kubectl", "proxy", f"--unix-socket={at}", "--reject-paths=^$"),
            env=kubectl.environment(),
            stdout=subprocess.DEVNULL,
        )
        try:
            eventually(at.exists, "kubectl proxy listens", timeout_s=30, every_s=0.02)
            transport = httpx.HTTPTransport(uds=str(at))
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=CALL_S) as client:
                yield Api(client, at)
        finally:
            proxy.terminate()
            proxy.wait()
