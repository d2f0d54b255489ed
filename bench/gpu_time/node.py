"""A GPU whose time is shared: an arbiter, containers with a class and a core limit, and the arbiter's status of them.

Memory and processes are tests/gpu/kit's; this adds classes, core limits and GPU time.
"""

from __future__ import annotations

import csv
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.kit.machine import ROOT, Lines, Machine, machine
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol.status import GpuTimeStatus, decode_status

HERE = Path(__file__).parent
DRIVER_ROOT = Path("/usr/local/nvidia")
PYTHON = os.environ.get("TANGRAM_TEST_PYTHON", sys.executable)
"""That has PyTorch."""
MIB = 20480
"""Of memory for each container: the frameworks' own needs, far from the GPU's."""

RIGHTS = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all,+kill")
"""In front of the arbiter's words, as root: the rights that its container has in the chart, whatever this program's are."""


class Switch(NamedTuple):
    """A call of the arbiter to the driver."""

    what: str
    """suspend, resume, enabled"""
    us: float
    began_us: float
    """By CLOCK_MONOTONIC."""
    awake_us: float
    """Since the GPU's thread woke up for it."""


class Node:
    """One GPU. At most one arbiter at a time."""

    def __init__(self, here: Machine) -> None:
        self.machine = here
        self._arbiter: subprocess.Popen[bytes] | None = None
        self._timings = here.folder / "switches.csv"
        self._load = here.folder / "load"
        words = ["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", "-o", str(self._load), str(HERE / "load.c")]
        subprocess.run([*words, "-ldl"], check=True)

    def start_arbiter(self, *words: str, **settings: str) -> None:
        """TANGRAM_ARBITER_<NAME> settings; `words` as in watched.py."""
        self.stop_arbiter()
        root = os.environ.get("TANGRAM_ARBITER_DRIVER_ROOT") or (str(DRIVER_ROOT) if DRIVER_ROOT.is_dir() else "/")
        root = str(self.machine.build / "fake") if self.machine.fake else root
        given = {
            "grants_dir": str(self.machine.folder / "grants"),
            "metrics_host": "127.0.0.1",
            "metrics_port": "0",
            "grace_ms": "0",
            "driver_root": root,
            **settings,
        }
        env = self.machine.base | {f"TANGRAM_ARBITER_{name.upper()}": value for name, value in given.items()}
        log = self.machine.folder / "arbiter.log"
        with log.open("ab") as file:
            began = log.stat().st_size
            rights = RIGHTS if os.geteuid() == 0 else ()
            command = [*rights, sys.executable, str(HERE / "watched.py"), str(self._timings), *words]
            self._arbiter = subprocess.Popen(command, cwd=ROOT, env=env, stderr=file)
        self.wait(lambda: self._serves(log, began), "the arbiter to serve", 20)

    def _serves(self, log: Path, began: int) -> bool:
        assert self._arbiter is not None
        if self._arbiter.poll() is not None:
            raise RuntimeError(f"the arbiter ended with {self._arbiter.returncode}: {self.machine.arbiter_log()}")
        return b'"serving"' in log.read_bytes()[began:]

    @property
    def arbiter(self) -> subprocess.Popen[bytes]:
        assert self._arbiter is not None
        return self._arbiter

    @property
    def arbiters_capabilities(self) -> int:
        """The effective ones, as a mask: capabilities(7) numbers the bits."""
        status = Path(f"/proc/{self.arbiter.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)

    def arbiter_lives(self) -> bool:
        return self._arbiter is not None and self._arbiter.poll() is None

    def stop_arbiter(self) -> list[Switch]:
        """Its calls, in their order."""
        if self._arbiter is None:
            return []
        self._arbiter.terminate()
        try:
            self._arbiter.wait(10)
        except subprocess.TimeoutExpired:
            self._arbiter.kill()
            self._arbiter.wait()
        self._arbiter = None
        if not self._timings.exists():
            return []
        with self._timings.open(newline="") as file:
            seen = [Switch(what, *map(float, numbers)) for what, *numbers in csv.reader(file)]
        self._timings.unlink()
        return seen

    def grant(self, key: str, service_class: str = "standard", core: int = 0) -> None:
        """Writes a container's grant, or writes it anew; waits until the arbiter has read it where it is in use."""
        folder = self.machine.folder / "grants" / key
        folder.mkdir(exist_ok=True)
        grant = Grant("bench", key, f"uid-{key}", "main", (GrantGpu(self.machine.uuid, MIB, core),), service_class)
        (folder / ".new").write_text(grant_to_text(grant))
        (folder / ".new").chmod(0o444)
        (folder / ".new").rename(folder / "grant")
        self.wait((folder / "arbiter.sock").exists, f"the socket of container {key}")
        gpu_time = self.gpu_times().get(key)
        if gpu_time is not None:
            self.wait(
                lambda: self.gpu_times()[key].requested_percent == core, f"the core limit {core} of container {key}"
            )

    def grant_pair(self) -> None:
        """A latency-critical container `lc` and a best-effort one `be`."""
        self.grant("lc", "latency-critical")
        self.grant("be", "best-effort")

    def load(self, key: str = "", **env: str) -> Lines:
        """load.c in a container, or outside all."""
        return self._ready(self.machine.lines([str(self._load)], key, **env), key, 30)

    def loads(self, keys: list[str]) -> list[Lines]:
        """load.c in many containers, started together."""
        started = [(self.machine.lines([str(self._load)], key), key) for key in keys]
        return [self._ready(lines, key, 90) for lines, key in started]

    def torch(self, key: str) -> Lines:
        return self._ready(self.machine.lines([PYTHON, str(HERE / "torch_load.py")], key), key, 90)

    def model(self, kind: str, key: str = "", **env: str) -> Lines:
        """torch_models.py in a container, or outside all."""
        return self._ready(self.machine.lines([PYTHON, str(HERE / "torch_models.py"), kind], key, **env), key, 90)

    def _ready(self, lines: Lines, key: str, seconds: float) -> Lines:
        lines.receive(seconds)
        if key:
            self.wait_for_turns(key)
        return lines

    def wait_for_turns(self, *keys: str) -> None:
        """Until the arbiter knows the channels of these containers."""
        for key in keys:
            self.wait(lambda key=key: key in self.gpu_times(), f"the channels of container {key}")  # type: ignore[misc]

    def gpu_times(self) -> dict[str, GpuTimeStatus]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.machine.status_socket))
            document = b"".join(iter(lambda: sock.recv(65536), b""))
        return {one.key: one.gpu_time for one in decode_status(document).containers if one.gpu_time is not None}

    def smi(self, *fields: str) -> list[str] | None:
        """nvidia-smi's values for the GPU; None where it has none."""
        if self.machine.fake:
            return None
        words = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
        lines = done.stdout.splitlines()
        return [word.strip() for word in lines[0].split(",")] if done.returncode == 0 and lines else None

    @staticmethod
    def wait(what: Callable[[], bool], name: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                raise TimeoutError(f"{name}: not within {seconds} s")
            time.sleep(0.003)


@contextmanager
def node(fake: bool | None) -> Iterator[Node]:
    """Ends everything that it started, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with machine(fake) as here:
        made = Node(here)
        try:
            yield made
        finally:
            here.end_containers()
            made.stop_arbiter()


def request(lines: Lines, *words: object) -> dict[str, Any]:
    """A program's answer to one line."""
    lines.send(*words)
    return lines.receive()


def by_kind(switches: list[Switch]) -> dict[str, list[float]]:
    """Microseconds of the calls, by what they were."""
    found: dict[str, list[float]] = {}
    for one in switches:
        found.setdefault(one.what, []).append(one.us)
    return found


def quantile(values: list[float], part: float) -> float:
    """The value that `part` of them do not pass. Of nothing: nan."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def rate(before: dict[str, float], after: dict[str, float]) -> float:
    """Steps in a second between two answers to `count`: from the end of one step to the end of another, so that none is cut in two."""
    done = after["done"] - before["done"]
    return done / (after["ended_at_s"] - before["ended_at_s"]) if done else 0.0


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")
