"""What a flood of each listener does to those who need the program: latency, refusals and memory beside a control.

    sudo uv run python -m bench.floods [--seconds 60] [--only webhook] [--attack body]

50 clients (bench/floods/flooder, in Go) in a cgroup of half a processor attack one listener while an honest client goes on: an API server
that opens a connection for every second admission, or a scheduler that calls the filter. The control burns the same processor time and
connects to nobody. Written to floods.csv: p50 and p99 in ms of the honest client, its calls that failed, and the resident memory of all the
program's processes beyond that under the control. Needs root for the cgroup.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import os
import platform
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bench.extender.filter import NAME, bodies, start_extender
from bench.extender.filter import ready as extender_ready
from bench.process import memory_mib
from bench.webhook.admission import MUTATE, request, wait_for
from hack.cluster.build import SHARED_FLAGS
from hack.cluster.layout import cache_folder
from hack.cluster.toolchain import find_go
from tests.builders import node
from tests.fake_api import FakeApi
from tests.ports import free_port
from webhook.certs import CA_CERT, CERT, KEY, renewed

HERE: Final = Path(__file__).parent
CONTROL: Final = "burn"
ATTACKS: Final = (
    "connect",
    "silent",
    "headers",
    "line",
    "body",
    "chunks",
    "large",
    "slow",
    "served",
    "requests",
    "unread",
)
CGROUP: Final = Path("/sys/fs/cgroup/tangram-floods")
EACH_S: Final = 0.02
"""Between two calls of the honest client."""
WARM_S: Final = 2.0
NODES: Final = 1000


@dataclass(frozen=True)
class Listener:
    """Something to attack. `pid` is the program's; its children count as its memory."""

    name: str
    port: int
    pid: int
    tls: bool
    path: str
    call: Callable[[], None]


@dataclass
class Honest:
    """What the honest client saw."""

    ms: list[float] = field(default_factory=list)
    failed: int = 0


def cgroup_of_half_a_processor() -> Path:
    CGROUP.mkdir(exist_ok=True)
    if (CGROUP / "cpu.max").exists():
        (CGROUP / "cpu.max").write_text("50000 100000")
        return CGROUP
    v1 = Path("/sys/fs/cgroup/cpu/tangram-floods")
    v1.mkdir(exist_ok=True)
    (v1 / "cpu.cfs_quota_us").write_text("50000")
    return v1


def build_flooder() -> Path:
    program = cache_folder() / "bench" / "flooder"
    subprocess.run(
        [find_go(cache_folder()), "build", *SHARED_FLAGS, "-o", program, "."], cwd=HERE / "flooder", check=True
    )
    return program


def memory_of_all(pid: int) -> float:
    """MiB of the process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = memory_mib(pid)
    for child in children:
        with contextlib.suppress(OSError, LookupError):
            total += memory_of_all(int(child))
    return total


def attack(flooder: Path, cgroup: Path, listener: Listener, what: str, seconds: int) -> tuple[Honest, float, str]:
    """(what the honest client saw, highest memory, what the flooder did)."""
    flags = [
        "-address",
        f"127.0.0.1:{listener.port}",
        "-path",
        listener.path,
        "-attack",
        what,
        "-seconds",
        str(seconds),
    ]
    process = subprocess.Popen(
        [flooder, *flags, *(["-tls"] if listener.tls else [])], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    seen, memory, until_s = Honest(), 0.0, time.monotonic() + seconds
    time.sleep(WARM_S)
    while time.monotonic() < until_s:
        started = time.perf_counter()
        try:
            listener.call()
            seen.ms.append((time.perf_counter() - started) * 1000)
        except (OSError, AssertionError, ValueError):
            seen.failed += 1
        if len(seen.ms) % 20 == 0:
            memory = max(memory, memory_of_all(listener.pid))
        time.sleep(max(0.0, EACH_S - (time.perf_counter() - started)))
    did, _ = process.communicate(timeout=60)
    return seen, memory, did.strip()


class ApiServer:
    """Calls the webhook, over a new connection each second time."""

    def __init__(self, port: int, authority: bytes) -> None:
        self._port, self._tls = port, ssl.create_default_context(cadata=authority.decode())
        self._kept: ssl.SSLSocket | None = None
        self._uid = 0

    def __call__(self) -> None:
        import socket

        self._uid += 1
        sock, self._kept = self._kept, None
        if sock is None:
            sock = self._tls.wrap_socket(
                socket.create_connection(("127.0.0.1", self._port), 10), server_hostname="localhost"
            )
            keep = True
        else:
            keep = False
        try:
            sock.sendall(request(self._uid, MUTATE))
            answer = read_answer(sock.recv)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b'"patch"' in answer
        except BaseException:
            sock.close()
            raise
        if keep:
            self._kept = sock
        else:
            sock.close()


def read_answer(recv: Callable[[int], bytes]) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = recv(1 << 16)
        assert more
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < size:
        more = recv(1 << 16)
        assert more
        body += more
    return head + body


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
                Listener("webhook 8443", port, process.pid, True, MUTATE, call),
                Listener("webhook 8080", metrics_port, process.pid, False, "/metrics", call),
            ]
            assert process.poll() is None, "the webhook ended"
        finally:
            process.terminate()
            process.wait()


class Scheduler:
    """Calls the filter over one connection."""

    def __init__(self, port: int) -> None:
        import socket

        self._sock = socket.create_connection(("127.0.0.1", port), 10)
        self._bodies = bodies([NAME.format(at // 250, at % 250) for at in range(NODES)], 10**9, "same", "share")

    def __call__(self) -> None:
        self._sock.sendall(next(self._bodies))
        assert read_answer(self._sock.recv).startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def extender() -> Iterator[list[Listener]]:
    loop, ports = asyncio.new_event_loop(), []
    stop, up = asyncio.Event(), threading.Event()

    async def api() -> None:
        async with FakeApi() as one:
            for at in range(NODES):
                one.put(node(NAME.format(at // 250, at % 250)).with_gpus(8).plain())
            ports.append(one.port)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(api()))
    thread.start()
    up.wait(60)
    process, port, metrics_port = start_extender(ports[0])
    try:
        asyncio.run(extender_ready(metrics_port))
        yield [Listener("extender 8889", metrics_port, process.pid, False, "/metrics", Scheduler(port))]
        assert process.poll() is None, "the extender ended"
    finally:
        process.terminate()
        process.wait()
        loop.call_soon_threadsafe(stop.set)
        thread.join()


PROGRAMS: Final = {"webhook": webhook, "extender": extender}


def main() -> None:
    """Attack, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--csv", type=Path, default=HERE / "floods.csv")
    options = parser.parse_args()
    flooder, cgroup, rows = build_flooder(), cgroup_of_half_a_processor(), []
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    for name, program in PROGRAMS.items():
        if options.only not in (None, name):
            continue
        with program() as listeners:
            for listener in listeners:
                control_mib = control_p99 = 0.0
                for what in (CONTROL, *([options.attack] if options.attack else ATTACKS)):
                    seen, mib, did = attack(flooder, cgroup, listener, what, options.seconds)
                    ms = sorted(seen.ms) or [float("nan")]
                    p99 = ms[len(ms) * 99 // 100]
                    if what == CONTROL:
                        control_mib, control_p99 = mib, p99
                    row = {
                        "listener": listener.name, "attack": what, "seconds": options.seconds, "calls": len(seen.ms), "failed": seen.failed,
                        "p50_ms": round(ms[len(ms) // 2], 2), "p99_ms": round(p99, 2), "p99_to_control": round(p99 / control_p99, 2),
                        "more_mib": round(mib - control_mib, 1), "connections_failures_bytes": did, "machine": machine,
                        "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    }  # fmt: skip
                    rows.append(row)
                    print(row, flush=True)
    with options.csv.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
