"""Start the fake NVIDIA driver for a test, and make things happen to its GPUs.

    from tests.fake import fake_driver, FakeDriver          # fake_driver is a pytest fixture: a factory

    def test_something(fake_driver):
        driver = fake_driver("gpu h200 memory_mib=1024 context_mib=0")
        subprocess.run([program], env=driver.env())          # LD_LIBRARY_PATH and TANGRAM_FAKE_DRIVER are set
        driver.xid(gpu=0, number=79)

The module knows the daemon's command line and its ready line; the description's format is the daemon's own affair
(docs/reference/fake-driver.md).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.built import fake_build


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """One line of `ctl status` about a GPU or a MIG instance. Memory in MiB."""

    gpu: int
    model: str
    uuid: str
    used_mib: int
    limit_mib: int
    busy_percent: int
    processes: Mapping[int, int]
    """pid -> MiB held, as the daemon sees PIDs"""
    gi: int | None
    """GPU instance ID; None for a whole GPU"""


@dataclass(frozen=True, slots=True)
class FakeDriver:
    """A running daemon."""

    folder: Path
    socket: Path
    process: subprocess.Popen[str]

    @property
    def libraries(self) -> Path:
        return fake_build()

    @property
    def libcuda(self) -> Path:
        return self.libraries / "libcuda.so.1"

    @property
    def libnvml(self) -> Path:
        return self.libraries / "libnvidia-ml.so.1"

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a program that is to load the fake libraries and see every GPU."""
        path = os.pathsep.join(p for p in (str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")) if p)
        return {**os.environ, "LD_LIBRARY_PATH": path, "TANGRAM_FAKE_DRIVER": str(self.socket), **more}

    def ctl(self, *words: str | int) -> str:
        """One control command; its text. A refusal is an AssertionError with the daemon's sentence."""
        command = [str(self.libraries / "nvidia-fake-driverd"), "ctl", "--socket", str(self.socket), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def xid(self, gpu: int, number: int) -> None:
        self.ctl("xid", gpu, number)

    def recover(self, gpu: int) -> None:
        self.ctl("recover", gpu)

    def status(self) -> list[GpuStatus]:
        """GPUs and MIG instances, each GPU before its instances."""
        found: list[GpuStatus] = []
        processes: dict[int, int] = {}
        line_of = re.compile(
            r"GPU (\d+) (?:instance (\d+) )?(\S+)(?: mig=\S+ xid=\d+)? (\S+) used_mib=(\d+) limit_mib=(\d+) busy_percent=(\d+)"
        )
        for line in self.ctl("status").splitlines():
            if match := line_of.fullmatch(line):
                gpu, gi, model, uuid, used, limit, busy = match.groups()
                processes = {}
                instance = None if gi is None else int(gi)
                found.append(GpuStatus(int(gpu), model, uuid, int(used), int(limit), int(busy), processes, instance))
            elif match := re.match(r"  pid=(\d+) used_mib=(\d+)", line):
                pid, mib = map(int, match.groups())
                processes[pid] = processes.get(pid, 0) + mib
        return found

    def used_mib(self, gpu: int = 0) -> int:
        """MiB that processes hold on a GPU, its MIG instances not included."""
        return next(s.used_mib for s in self.status() if s.gpu == gpu and s.gi is None)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def start_fake_driver(description: str, folder: Path) -> FakeDriver:
    """Start a daemon for a description (text). Returns when it answers. The folder must be short: socket paths are."""
    config, socket, bus = folder / "fake.conf", folder / "driver.sock", folder / "sys/bus/pci/drivers/nvidia"
    config.write_text(description)
    bus.mkdir(parents=True, exist_ok=True)
    command = [
        str(fake_build() / "nvidia-fake-driverd"), "--config", str(config), "--socket", str(socket), "--bus", str(bus),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline()
    process.stdout.close()
    if not ready:
        process.wait(10)
        raise AssertionError(f"the daemon refuses the description (its sentence is on stderr):\n{description}")
    return FakeDriver(folder, socket, process)


@pytest.fixture
def fake_driver() -> Iterator[Callable[[str], FakeDriver]]:
    """Factory: description -> FakeDriver. All daemons it started are stopped after the test."""
    started: list[FakeDriver] = []

    def start(description: str = "gpu h200 memory_mib=1024 context_mib=0\n") -> FakeDriver:
        driver = start_fake_driver(description, Path(tempfile.mkdtemp(prefix="fake-")))
        started.append(driver)
        return driver

    yield start
    for driver in started:
        driver.stop()
        shutil.rmtree(driver.folder)
