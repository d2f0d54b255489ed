"""The arbiter's sockets: one container floods its own, and a process of another container allocates memory beside it, by the library and the fake driver.

An allocation of the honest process is a LEASE each time: 320 MiB are more than the library leases ahead. Once a second another process of that
container starts, and is timed from its start to its first allocation.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.floods.flood import PROBE_EACH_S, Attack, Listener, Second, beside, half_a_second
from bench.floods.servers import METRICS_OF_NODE, Kubelet, at_port, listener
from tests.built import shim_build
from tests.integration.shim.conftest import Worker
from tests.ports import free_port
from tests.probe import Probe
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol import wire

ROOT: Final = Path(__file__).resolve().parents[2]
"""The arbiter's server of metrics does not look for modules in the working directory: without that it would be the one of the environment."""
GPU: Final = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
GPU_MIB: Final = 65_536
PIECE_MIB: Final = 320
PIECES: Final = 24
RETURNED_S: Final = 1.3
"""What was freed is leased for a second more."""


def _hex(message: wire.Message, seq: int = 1) -> str:
    return wire.encode(seq, message).hex()


HELLO: Final = ("-first", _hex(wire.Hello(1, 0, "flood")))
FOR_GPU_TIME: Final = ("-first", _hex(wire.Hello(1, wire.FOR_GPU_TIME, "flood")))
MIB: Final = 2**20
ATTACKS: Final = (
    Attack("crowd", "crowd", HELLO),
    Attack("connect", "connect"),
    Attack("greet", "greet", HELLO),
    Attack("greet-turns", "greet", FOR_GPU_TIME),
    Attack("silent", "silent"),
    Attack("garbage", "greet", ("-first", "00" * 64)),
    Attack("usage", "packets", (*HELLO, "-packet", _hex(wire.Usage(0, 0, 0)))),
    Attack("lease", "packets", (*HELLO, "-packet", _hex(wire.Lease(0, MIB, MIB)))),
    Attack("context", "packets", (*HELLO, "-packet", _hex(wire.Context(0, wire.Step.DONE, 0)))),
    Attack("list", "packets", (*HELLO, "-packet", _hex(wire.Processes(0)))),
    Attack("work", "packets", (*FOR_GPU_TIME, "-packet", _hex(wire.Activity(wire.ActivityKind.WORK, 0)))),
    Attack("questions", "questions", (*HELLO, "-packet", _hex(wire.Processes(0)))),
)


class Node:
    """A GPU, an arbiter, and two containers: `a` floods, `b` works."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.build = folder, shim_build().absolute()
        self.metrics_port = free_port()
        (folder / "root").mkdir()
        (folder / "root/lib").symlink_to(self.build / "fake")
        (folder / "driver").write_text(f"driver 580\ngpu h200 memory_mib={GPU_MIB} context_mib=300 uuid={GPU}\n")
        for key in ("a", "b"):
            grant = Grant("default", key, f"uid-{key}", "main", (GrantGpu(GPU, GPU_MIB // 2),))
            (folder / "grants" / key).mkdir(parents=True)
            (folder / "grants" / key / "grant").write_text(grant_to_text(grant))
        self._socket = folder / "driver.sock"
        self._driver = subprocess.Popen(
            [self.build / "fake/nvidia-fake-driverd", "--config", folder / "driver", "--socket", self._socket]
        )
        _wait(self._socket)
        self.arbiter = subprocess.Popen(
            [
                sys.executable, "-m", "arbiter", "--grants-dir", folder / "grants", "--driver-root", folder / "root",
                "--metrics-host", "127.0.0.1", "--metrics-port", str(self.metrics_port), "--log-level", "error",
            ],
            env=self._env() | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        _wait(self.socket("a"))
        _wait(self.socket("b"))

    def socket(self, key: str) -> Path:
        return self.folder / "grants" / key / "arbiter.sock"

    def _env(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "TANGRAM_FAKE_DRIVER": str(self._socket)}

    def env_of_b(self) -> dict[str, str]:
        return self._env() | {
            "LD_LIBRARY_PATH": str(self.build / "fake"),
            "LD_PRELOAD": str(self.build / "libtangram.so"),
            "TANGRAM_GRANT": str(self.folder / "grants/b/grant"),
        }

    def close(self) -> None:
        for process in (self.arbiter, self._driver):
            process.terminate()
            process.wait()


class Neighbour:
    """A process of `b` that allocates."""

    def __init__(self, node: Node) -> None:
        self._worker = Worker(node.env_of_b())
        self._worker.must("use(0)")
        self._held: list[int] = []

    def __call__(self) -> float:
        if len(self._held) >= PIECES:
            for at in self._held:
                self._worker.must(f"free({at})")
            self._held = []
            time.sleep(RETURNED_S)
        began = time.perf_counter()
        code, at = self._worker.request(f"alloc({PIECE_MIB})")
        took_ms = (time.perf_counter() - began) * 1000
        assert code == 0, code
        self._held.append(at)
        return took_ms

    def close(self) -> None:
        self._worker.close()


def start_another(node: Node) -> float:
    """Milliseconds from the start of a process of `b` to its first allocation."""
    pipe, began = subprocess.PIPE, time.perf_counter()
    process = subprocess.Popen(
        [node.build / "tests/probe-direct"], env=node.env_of_b(), text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )
    probe = Probe(process)
    try:
        assert probe.request("use", 0) == [0]
        assert probe.alloc(1) == 0
        return (time.perf_counter() - began) * 1000
    finally:
        probe.close()


@contextlib.contextmanager
def arbiter() -> Iterator[list[Listener]]:
    folder = Path(tempfile.mkdtemp(prefix="af-"))  # a socket's path has at most 107 characters
    node = Node(folder)
    try:
        neighbour = Neighbour(node)
        try:
            where = ("-network", "unixpacket", "-address", str(node.socket("a")))
            pid, another = node.arbiter.pid, Second("start", 1.0, lambda: start_another(node))
            yield [
                Listener("arbiter.sock", pid, where, ATTACKS, neighbour, another, beside),
                listener(
                    "arbiter 9403", pid, at_port(node.metrics_port, "/metrics"), METRICS_OF_NODE, neighbour, goal_ms=beside
                ),
                listener(
                    "arbiter 9403 probes", pid, at_port(node.metrics_port, "/metrics"), METRICS_OF_NODE,
                    Kubelet(node.metrics_port, "/healthz"), goal_ms=half_a_second, each_s=PROBE_EACH_S,
                ),
            ]  # fmt: skip
            assert node.arbiter.poll() is None, "the arbiter ended"
        finally:
            neighbour.close()
    finally:
        node.close()
        shutil.rmtree(folder)


def _wait(path: Path) -> None:
    until_s = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} does not appear"
        time.sleep(0.01)
