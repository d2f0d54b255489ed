"""A machine without a cluster, in small: a state folder, a description of GPUs, and tangramctl as a process.

Everything is the real thing but the driver. A state folder is its test's own, so each has its own keeper, arbiter and GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.built import shim_build
from tests.probe import Probe

ROOT = Path(__file__).parents[3]
MIB = 2**20
OUT_OF_MEMORY = 2
LARGE, SMALL = (f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in range(2))
LARGE_MIB, SMALL_MIB = 16384, 4096
GPUS = f"""\
gpu t4 uuid={LARGE} memory_mib={LARGE_MIB} context_mib=0
gpu t4 uuid={SMALL} memory_mib={SMALL_MIB} context_mib=0
"""


@pytest.fixture(scope="session")
def build() -> Path:
    """The library, the fake driver and the test programs. TANGRAM_SHIM_BUILD names a build made otherwise."""
    return shim_build()


@dataclass
class Ctl:
    """tangramctl with a state folder of its own."""

    build: Path
    folder: Path
    prefix: Sequence[str] = ()
    """Stands before each command line: another user."""
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def gpus(self) -> Path:
        return self.folder / "gpus"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "TANGRAMCTL_STATE": str(self.folder / "s"),
            "TANGRAMCTL_LIBRARY": str(self.build / "libtangram.so"),
            **self.env,
        }

    def line(self, *words: object) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "tangramctl", *map(str, words)]

    def call(self, *words: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """tangramctl, until it ends."""
        more = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | more
        return subprocess.run(self.line(*words), check=False, **more)

    def run(self, gpu_mem: object, *words: object, options: Sequence[object] = ()) -> subprocess.CompletedProcess[str]:
        """`tangramctl run` on the fake GPUs, until it ends."""
        return self.call("run", "--fake", self.gpus, "--gpu-mem", gpu_mem, *options, "--", *words)

    def start(self, gpu_mem: object, *words: object, options: Sequence[object] = ()) -> subprocess.Popen[str]:
        """`tangramctl run` on the fake GPUs, with pipes. A group of its own: no process in an orphaned one can be stopped."""
        line = self.line("run", "--fake", self.gpus, "--gpu-mem", gpu_mem, *options, "--", *words)
        pipe = subprocess.PIPE
        self.started.append(
            subprocess.Popen(
                line, env=self.environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0
            )
        )
        return self.started[-1]

    def probe(self, gpu_mem: object, options: Sequence[object] = ()) -> Probe:
        """A GPU program with a context, driven by lines (shim/tests/probe.c)."""
        probe = Probe(self.start(gpu_mem, self.build / "tests/probe-direct", options=options))
        used = probe.request("use", 0)
        assert used == [0], f"{probe.end()}\nkeeper and arbiter:\n{self.log()}"
        return probe

    def log(self) -> str:
        """What the keepers and arbiters of the fake GPUs wrote."""
        return "\n".join(path.read_text() for path in (self.folder / "s/fake").glob("*/arbiter.log"))

    def ps(self) -> list[dict[str, Any]]:
        """The entries of `ps --json`."""
        done = self.call("ps", "--json")
        assert done.returncode == 0, done.stderr
        entries: list[dict[str, Any]] = json.loads(done.stdout)["entries"]
        return entries

    def machine(self) -> Path:
        """The state root of the fake GPUs."""
        (found,) = (self.folder / "s/fake").glob("[0-9a-f]*[0-9a-f]/keeper.json")
        return found.parent

    def keeper(self) -> dict[str, int]:
        """The keeper's own record."""
        reported: dict[str, int] = json.loads((self.machine() / "keeper.json").read_text())
        return reported

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        stopped = self.call("arbiter", "stop", "--force")
        assert stopped.returncode == 0, stopped.stderr


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Polls what has no event to wait for."""
    pause = threading.Event()
    for _ in range(int(seconds * 50)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come about in time")


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid))


def arbiters(state: Path) -> list[int]:
    """Processes that run an arbiter for a state folder."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and alive(int(folder.name)):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"arbiter" in words and any(word.startswith(bytes(state)) for word in words):
                    found.append(int(folder.name))
    return found


def new_ctl(build: Path) -> Ctl:
    folder = Path(tempfile.mkdtemp(prefix="tc-"))  # a socket's path has at most 107 characters
    (folder / "gpus").write_text(GPUS)
    return Ctl(build, folder)


@pytest.fixture
def ctl(build: Path) -> Iterator[Ctl]:
    made = new_ctl(build)
    yield made
    made.close()
    shutil.rmtree(made.folder)
