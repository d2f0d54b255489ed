"""Fixtures of the fake driver's own tests: processes that use it, and C programs built against NVIDIA's cuda.h."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.built import REPOSITORY, fake_build
from tests.fake import FakeDriver, fake_driver
from tests.line_process import LineProcess

__all__ = ["fake_driver"]

HERE = Path(__file__).parent
CUDA_INCLUDE = next((REPOSITORY / ".venv" / "lib").glob("python3*/site-packages/nvidia/cu13/include"))
MIB = 1 << 20


class Worker(LineProcess):
    """A child process that calls the fake libcuda on its parent's requests (worker.py)."""

    def __init__(self, driver: FakeDriver, **env: str) -> None:
        super().__init__([str(HERE / "worker.py")], driver.env(**env))

    def request(self, function: str, *arguments: Any) -> list[Any]:
        """Start a call and wait for its answer: [CUresult, values...]."""
        self.send(json.dumps([function, *arguments]))
        answer: list[Any] = self.answer(f"in {function}")
        return answer

    def must(self, function: str, *arguments: Any) -> Any:
        """The call's first value; the call has to succeed."""
        rc, *values = self.request(function, *arguments)
        assert rc == 0, f"{function}{arguments}: CUresult {rc}"
        return values[0] if values else None


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Factory: a process with CUDA initialised and a context on device 0 (device=None: neither)."""
    started: list[Worker] = []

    def start(driver: FakeDriver, device: int | None = 0, **env: str) -> Worker:
        made = Worker(driver, **env)
        started.append(made)
        if device is not None:
            made.must("cuInit")
            made.must("context", device)
        return made

    yield start
    for one in started:
        one.end()


class Owner(LineProcess):
    """A child process whose kernels compute (owner.py), with the kernel driver's double: its channels can be suspended.

    The first one of a driver has slot 0, from which its channels' names follow.
    """

    COMPUTE: ClassVar = [0x5C001001 + at for at in range(8)]
    COPIES: ClassVar = [0x5C000101 + group * 0x10 + at for group in range(3) for at in range(4)]

    def __init__(self, driver: FakeDriver, **env: str) -> None:
        preload = str(fake_build() / "libfake-kernel.so")
        super().__init__([str(HERE / "owner.py")], driver.env(LD_PRELOAD=preload, PYTHONPATH=str(REPOSITORY), **env))
        assert self.answer() == "ready"
        self.client = 0xC1D00000 | self.process.pid << 10 & 0xFFC00

    def do(self, expression: str) -> Any:
        """The value of a Python expression there; each line of several is one."""
        value = None
        for line in filter(None, map(str.strip, expression.splitlines())):
            self.send(line)
            value = self.answer(f"in {line}")
        return value

    def suspend(self, channels: list[int], by: Owner | None = None) -> None:
        assert (by or self).do(f"switch({self.client}, {channels}, True)") == 0

    def resume(self, channels: list[int], by: Owner | None = None) -> None:
        assert (by or self).do(f"switch({self.client}, {channels}, False)") == 0


@pytest.fixture
def owner() -> Iterator[Callable[..., Owner]]:
    """Factory: a process whose kernels compute, on device 0."""
    started: list[Owner] = []

    def start(driver: FakeDriver, **env: str) -> Owner:
        started.append(Owner(driver, **env))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Factory: builds programs/NAME.c against NVIDIA's cuda.h and the fake libcuda, for this test alone."""

    def build(name: str) -> Path:
        target = tmp_path / name
        flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-isystem", str(CUDA_INCLUDE)]
        link = [f"-L{fake_build()}", "-lcuda", "-ldl", "-lpthread"]
        source = HERE / "programs" / f"{name}.c"
        built = subprocess.run(
            ["gcc", *flags, "-o", target, source, *link], capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, built.stderr
        return target

    return build


@pytest.fixture
def nvml_python() -> Callable[..., Any]:
    """Runs Python code with pynvml in a process of its own; returns the JSON that it prints."""

    def run(driver: FakeDriver, code: str) -> Any:
        text = f"import json, pynvml as n\nn.nvmlInit()\n{code}"
        done = subprocess.run(
            [sys.executable, "-c", text], env=driver.env(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
