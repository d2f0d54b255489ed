"""The HTTP listeners and their clients: an API server that calls the webhook, kube-scheduler that calls the extender, the kubelet that probes the programs of a node."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.calls import Kept, connect, posted, read_answer, wait_for
from bench.extender.filter import NAME, bodies, start_extender
from bench.extender.filter import ready as extender_ready
from bench.floods.flood import EACH_S, PROBE_EACH_S, Attack, Listener, Second, half_a_second, twice
from bench.webhook.admission import MUTATE, request
from observe.bounds import ADMISSION as ADMISSION_BOUNDS
from observe.bounds import OPERATIONS, Bounds
from observe.bounds import VERBS as VERBS_BOUNDS
from tests.builders import node, pod
from tests.fake import start_fake_driver
from tests.fake_api import FakeApi
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.harness import node as plugin_node
from tests.integration.hostpool.stand import FIRST, SECOND, Stand
from tests.ports import free_port
from vgpu.api.names import DEFAULT_POLICY
from webhook.certs import CA_CERT, CERT, KEY, renewed

EVERY: Final = (
    "connect", "silent", "headers", "line", "body", "chunks", "large", "slow", "served", "requests", "unread"
)  # fmt: skip
ADMISSION: Final = EVERY
VERBS: Final = ("silent", "headers", "large", "requests", "unread")
METRICS: Final = ("connect", "silent", "headers", "body", "served", "requests", "unread")
"""Of the server in a process of its own that all programs have. The extender's and the webhook's are attacked so, as they have the tightest goals."""
METRICS_OF_NODE: Final = ("connect", "silent", "headers", "requests")
"""The same server. The client differs, and for `SCRAPES` the token."""
SCRAPES: Final = ("connect", "silent", "requests", "unread", "tokens")


def listener(
    name: str,
    pid: int,
    flags: tuple[str, ...],
    attacks: Sequence[str],
    call: Callable[[], float | None],
    second: Second | None = None,
    goal_ms: Callable[[float], float] = twice,
    each_s: float = EACH_S,
) -> Listener:
    """Of HTTP."""
    others = [one for one in EVERY if one not in attacks]
    return Listener(
        name,
        pid,
        flags,
        tuple(Attack(one, one) for one in attacks),
        call,
        second,
        goal_ms,
        each_s,
        others=tuple(Attack(one, one) for one in others),
    )


NODES: Final = 1000
WAIT_S: Final = 10.0
"""For an answer: what takes longer has failed."""


def at_port(port: int, path: str, *, tls: bool = False, bounds: Bounds = OPERATIONS) -> tuple[str, ...]:
    """Flags of the flooder. Its large bodies are the largest within these bounds."""
    size = ("-size", str(bounds.body_bytes)) if bounds.body_bytes else ()
    return ("-address", f"127.0.0.1:{port}", "-path", path, *(["-tls"] if tls else []), *size)


class ApiServer:
    """Calls the webhook, over a new connection each second time."""

    def __init__(self, port: int, authority: bytes) -> None:
        self._port, self._tls = port, ssl.create_default_context(cadata=authority.decode())
        self._kept: ssl.SSLSocket | None = None
        self._uid = 0

    def __call__(self) -> None:
        self._uid += 1
        sock, self._kept = self._kept, None
        keep = sock is None
        if sock is None:
            sock = self._tls.wrap_socket(connect(self._port, WAIT_S), server_hostname="localhost")
        try:
            sock.sendall(request(self._uid, MUTATE))
            head, body = read_answer(sock.recv)
            assert head.startswith(b"HTTP/1.1 200")
            assert b'"patch"' in body
        except BaseException:
            sock.close()
            raise
        if keep:
            self._kept = sock
        else:
            sock.close()


@contextlib.contextmanager
def webhook() -> Iterator[list[Listener]]:
    port, metrics_port, files = free_port(), free_port(), renewed({}, ("localhost",), datetime.now(UTC))
    with tempfile.TemporaryDirectory() as folder:
        for name in (CERT, KEY):
            (Path(folder) / name).write_bytes(files[name])
        flags = [
            "--cert-mode", "files", "--cert-folder", folder, "--port", str(port), "--metrics-port", str(metrics_port), "--drain-s", "0"
        ]  # fmt: skip
        process = subprocess.Popen([sys.executable, "-m", "webhook", *flags], stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            call = ApiServer(port, files[CA_CERT])
            yield [
                listener(
                    "webhook 8443",
                    process.pid,
                    at_port(port, MUTATE, tls=True, bounds=ADMISSION_BOUNDS),
                    ADMISSION,
                    call,
                ),
                listener("webhook 8080", process.pid, at_port(metrics_port, "/metrics"), METRICS, call),
            ]
            assert process.poll() is None, "the webhook ended"
        finally:
            process.terminate()
            process.wait()


class Scheduler:
    """Calls the filter, over a kept connection as kube-scheduler does."""

    def __init__(self, port: int) -> None:
        self._kept = Kept(port, WAIT_S)
        self._bodies = bodies(
            [NAME.format(at // 250, at % 250) for at in range(NODES)], 10**9, "same", "share", DEFAULT_POLICY
        )

    def __call__(self) -> None:
        head, _ = self._kept.send(next(self._bodies))
        assert head.startswith(b"HTTP/1.1 200")


class Binding:
    """Binds pods as kube-scheduler does, each over the connection that it keeps for that: what is timed is the call to /bind, with its write to
    the API server. The pod is filtered before and deleted after, so that the cluster stays as it is."""

    def __init__(self, port: int, api: FakeApi, loop: asyncio.AbstractEventLoop) -> None:
        self._kept, self._api, self._loop = Kept(port, WAIT_S), api, loop
        self._names = [NAME.format(at // 250, at % 250) for at in range(NODES)]
        self._number = 0

    def __call__(self) -> float:
        self._number += 1
        one = pod(f"bound-{self._number}").asking(mib=4096).plain()
        self._change(self._api.put, one)
        try:
            answer = self._post("/filter", {"Pod": one, "Nodes": None, "NodeNames": self._names})
            meta = one["metadata"]
            args = {
                "PodName": meta["name"],
                "PodNamespace": meta["namespace"],
                "PodUID": meta["uid"],
                "Node": answer["NodeNames"][0],
            }
            began = time.perf_counter()
            assert not self._post("/bind", args)["Error"]
            return (time.perf_counter() - began) * 1000
        finally:
            self._change(self._api.remove, one)

    def _change(self, change: Callable[[dict[str, Any]], object], one: dict[str, Any]) -> None:
        async def changed() -> None:
            change(one)

        asyncio.run_coroutine_threadsafe(changed(), self._loop).result(10)

    def _post(self, path: str, body: object) -> dict[str, Any]:
        head, answer = self._kept.send(posted(path, json.dumps(body, separators=(",", ":")).encode()))
        assert head.startswith(b"HTTP/1.1 200")
        result: dict[str, Any] = json.loads(answer)
        return result


@contextlib.contextmanager
def extender() -> Iterator[list[Listener]]:
    loop, apis = asyncio.new_event_loop(), list[FakeApi]()
    stop, up = asyncio.Event(), threading.Event()

    async def api() -> None:
        async with FakeApi() as one:
            for at in range(NODES):
                one.put(node(NAME.format(at // 250, at % 250)).with_gpus(8).plain())
            apis.append(one)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(api()))
    thread.start()
    up.wait(60)
    process, port, metrics_port = start_extender(apis[0].port)
    try:
        asyncio.run(extender_ready(metrics_port))
        call, bind = Scheduler(port), Second("bind", 0.1, Binding(port, apis[0], loop))
        yield [
            listener("extender 8889", process.pid, at_port(metrics_port, "/metrics"), METRICS, call, bind),
            listener("extender 8888", process.pid, at_port(port, "/filter", bounds=VERBS_BOUNDS), VERBS, call, bind),
        ]
        assert process.poll() is None, "the extender ended"
    finally:
        process.terminate()
        process.wait()
        loop.call_soon_threadsafe(stop.set)
        thread.join()


class Kubelet:
    """Probes a program's page, over a new connection each time. It waits a second, as by default."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path

    def __call__(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", self._path)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status in (200, 503), answer.status
            assert b"does not answer" not in body
        finally:
            connection.close()


class Prometheus:
    """Reads the metrics with a token that is accepted."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", "/metrics", headers={"Authorization": "Bearer prometheus"})
            answer = connection.getresponse()
            assert b"tangram_deviceplugin" in answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def plugin() -> Iterator[list[Listener]]:
    folder = Path(tempfile.mkdtemp(prefix="pf-"))  # a socket's path has at most 107 characters
    driver, loop = start_fake_driver("gpu h200\n" * 8, folder), asyncio.new_event_loop()
    stop, made = asyncio.Event(), list[Node]()
    up = threading.Event()

    async def run() -> None:
        async with plugin_node(driver, folder / "node", access="nvidia") as one:
            one.api.tokens, one.api.may = {"prometheus": "prometheus"}, {"prometheus": {"/metrics"}}
            await one.start_plugin("--metrics-access", "review", "--log-level", "error", "--health-s", "5")
            await one.ready()
            made.append(one)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert up.wait(60), "the plugin is not ready"
        process, port = made[0].process, made[0].port
        assert process is not None
        where = at_port(port, "/metrics")
        yield [
            listener(
                "plugin 9402 probes",
                process.pid,
                where,
                (*METRICS_OF_NODE, "tokens"),
                Kubelet(port, "/readyz"),
                goal_ms=half_a_second,
                each_s=PROBE_EACH_S,
            ),
            listener(
                "plugin 9402 scrapes",
                process.pid,
                where,
                SCRAPES,
                Prometheus(port),
                goal_ms=half_a_second,
                each_s=PROBE_EACH_S,
            ),
        ]
        assert process.returncode is None, "the plugin ended"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        driver.stop()
        shutil.rmtree(folder)


@contextlib.contextmanager
def hostpool() -> Iterator[list[Listener]]:
    stand = Stand()
    try:
        stand.share(FIRST, SECOND)
        process = stand.start()
        stand.until_ready(FIRST, SECOND)
        where, call = at_port(stand.port, "/metrics"), Kubelet(stand.port, "/readyz")
        yield [
            listener("hostpool 9404", process.pid, where, METRICS_OF_NODE, call, goal_ms=half_a_second, each_s=PROBE_EACH_S)
        ]  # fmt: skip
        assert process.poll() is None, "the host pool's program ended"
    finally:
        stand.end()
