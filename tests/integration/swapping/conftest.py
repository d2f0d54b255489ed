"""The node of bench/memory_swap on the fake driver. Where the arbiter serves bursts, containers take turns on it; where it does not yet, it has room for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.memory_swap.figures import Figures
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import FAKE_GPU, Job, Node
from tests.built import shim_build
from tests.gpu.kit import burst
from tests.gpu.kit.machine import machine

POOL_MIB = 1024


class RoomForAll(Node):
    """What needs swapping runs without it: the programs are tested, not the arbiter."""

    def need_swapping(self) -> None:
        pass

    @contextmanager
    def ballast(self, room_mib: int) -> Iterator[int]:
        with super().ballast(2 * room_mib) as mib:
            yield mib

    def job(self, total_bytes: int, *, torch: str = "", service_class: str = "standard", guarantee_mib: int = 0) -> Job:  # noqa: ARG002
        return super().job(
            total_bytes, torch=torch, service_class=service_class, guarantee_mib=self.limit_mib(total_bytes)
        )


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One GPU, and an arbiter that serves. A measurement leaves no container behind."""
    kind = Node if burst.served() else RoomForAll
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGRAM_SHIM_BUILD", str(shim_build()))
        with machine(True, POOL_MIB, fake_options=FAKE_GPU) as here:
            made = kind(here, "", {})
            made.start()
            yield made


@pytest.fixture
def session(node: Node, tmp_path: Path) -> Session:
    """A run with no end."""
    return Session(node, Figures(tmp_path / "figures.csv", node.machine.describe()), repeat=1, end_s=float("inf"))
