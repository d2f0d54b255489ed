"""One GPU that is short of memory: an arbiter with bursts, a copier with its pool, a ballast container, and containers that take turns.

What needs the arbiter's side of bursts calls `Node.need_swapping`, which raises NoSwapping where `tests.gpu.kit.burst.served` is false: that is the one switch.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.gpu.kit import burst
from tests.gpu.kit.machine import MIB, Container, Lines, Machine, machine

HERE: Final = Path(__file__).parent
PYTHON: Final = os.environ.get("TANGRAM_TEST_PYTHON", sys.executable)
"""That has PyTorch."""
GUARANTEE_MIB: Final = 1280
"""Of a container that takes turns: its context and what else cannot move. Guessed from 528 MiB of a context and 192 of room for its growth."""
FAKE_GUARANTEE_MIB: Final = 64
FAKE_GPU: Final = "context_mib=16"
SPARE_MIB: Final = 384
"""Beyond what one container of a pair needs: so far is the GPU from having room for both."""
LEFT_MIB: Final = 256
"""Of the GPU's free memory that the ballast leaves: the driver's own. Guessed; 45 MiB were seen."""
FAKE_LEFT_MIB: Final = 4
ANSWER_S: Final = 600.0


class NoSwapping(Exception):
    """The arbiter of this tree does not serve bursts yet."""


class Job:
    """A program of work.py in a container, or outside all."""

    def __init__(self, lines: Lines, stamps: Path) -> None:
        self.lines, self.stamps = lines, stamps
        lines.receive(ANSWER_S)

    def send(self, *words: object) -> None:
        self.lines.send(*words)

    def receive(self, seconds: float = ANSWER_S) -> dict[str, Any]:
        """Its answer. TimeoutError after that time, and the program is killed."""
        return self.lines.receive(seconds)

    def request(self, *words: object, seconds: float = ANSWER_S) -> dict[str, Any]:
        self.send(*words)
        return self.receive(seconds)

    def end(self) -> None:
        self.lines.end()


class Node:
    """See the module."""

    def __init__(self, here: Machine, python: str, settings: Mapping[str, str]) -> None:
        self.machine, self._python, self._settings = here, python, settings
        self._numbers = itertools.count(1)
        self._ballast: Container | None = None
        self.guarantee_mib = FAKE_GUARANTEE_MIB if here.fake else GUARANTEE_MIB

    def start(self) -> None:
        """The arbiter. It charges contexts only when NVML is open, so nothing begins before."""
        self.machine.start_arbiter(**self._settings)
        self.machine.wait_for_nvml()

    def need_swapping(self) -> None:
        """Raises NoSwapping."""
        if not burst.served():
            raise NoSwapping("the arbiter of this tree does not serve bursts: only what needs none was measured")

    def total_bytes(self) -> int:
        """Of the whole GPU."""
        outside = self.machine.container()
        total: int = outside.request("info")[1]
        outside.end()
        return total

    def free_mib(self) -> int:
        """Of the whole GPU, beside the context that asks."""
        outside = self.machine.container()
        free: int = outside.request("info")[0] // MIB
        outside.end()
        return free

    def limit_mib(self, total_bytes: int) -> int:
        """Of a container whose program has so much: a sixteenth more, for what its allocator rounds up, and its guarantee for the rest."""
        return total_bytes * 17 // 16 // MIB + 64 + self.guarantee_mib

    def swaps(self) -> int:
        """Orders to move memory to the pool until now."""
        return (self.machine.folder / "arbiter.log").read_bytes().count(b'"event": "swap out"')

    @contextmanager
    def ballast(self, room_mib: int) -> Iterator[int]:
        """A container within its guarantee that leaves so much of the GPU: MiB that it has. 0 where the GPU has no more than that."""
        free_mib = self.free_mib()
        mib = (free_mib - room_mib - (FAKE_LEFT_MIB if self.machine.fake else LEFT_MIB)) // 2 * 2
        if mib < 2 * self.guarantee_mib:
            yield 0
            return
        container = self.machine.container(self.machine.grant(mib))
        try:
            yield container.request("fill", "sync", [1024 * MIB, 32 * MIB, 2 * MIB])["taken"] // MIB
        finally:
            container.end()

    def room_for_one_mib(self, total_bytes: int) -> int:
        """So that one container of a pair has all of its memory on the GPU, the other its guarantee."""
        return self.limit_mib(total_bytes) + self.guarantee_mib + (16 if self.machine.fake else SPARE_MIB)

    def job(self, total_bytes: int, *, torch: str = "", service_class: str = "standard", guarantee_mib: int = 0) -> Job:
        """In a new container that may burst to what its program needs. `torch`: it is PyTorch's, with that allocator configuration, or `default`."""
        guarantee_mib = guarantee_mib or self.guarantee_mib
        limit_mib = max(self.limit_mib(total_bytes), guarantee_mib)
        key = self.machine.grant(guarantee_mib, service_class=service_class, burst_mib=limit_mib)
        return self._started(key, torch)

    def roomy(self, total_bytes: int) -> Job:
        """In a container that may burst on a GPU with room for all of it. Without bursts served, all is guaranteed, and elastic too."""
        limit_mib = self.limit_mib(total_bytes)
        guarantee_mib = self.guarantee_mib if burst.served() else limit_mib
        return self._started(self.machine.grant(guarantee_mib, burst_mib=limit_mib), "")

    def alone(self, total_bytes: int, torch: str = "") -> Job:
        """In a container that is guaranteed all: the baseline."""
        return self._started(self.machine.grant(self.limit_mib(total_bytes)), torch)

    def outside(self) -> Job:
        """Without the library: no product."""
        return self._started("", "")

    def _started(self, key: str, torch: str) -> Job:
        stamps = self.machine.folder / f"stamps-{next(self._numbers)}"
        program = HERE / ("torch_job.py" if torch else "job.py")
        env = {"PYTORCH_CUDA_ALLOC_CONF": torch} if torch not in ("", "default") else {}
        python = self._python if torch else sys.executable
        lines = self.machine.lines([python, str(program), str(stamps)], key, CUDA_VISIBLE_DEVICES="0", **env)
        return Job(lines, stamps)


@contextmanager
def node(fake: bool | None, pool_mib: int, settings: Mapping[str, str]) -> Iterator[Node]:
    """With an arbiter that serves, and a pool of that size where it serves bursts."""
    with machine(fake, pool_mib, fake_options=FAKE_GPU) as here:
        made = Node(here, PYTHON, settings)
        made.start()
        yield made
