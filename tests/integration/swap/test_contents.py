"""Swaps by the real copier, of blocks of processes on the fake driver: every byte comes back, also when the copier is killed in between."""

from __future__ import annotations

import select
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.swap.copier import Copier
from arbiter.swap.node import SwapNode
from tests.integration.copier.harness import UUID, Node, Owner, digest
from tests.unit.arbiter.swap.node_kit import (
    AWAY,
    BOOT,
    CHOSEN,
    GRAIN,
    MADE,
    HeldBlock,
    SimulatedNode,
    SimulatedProcess,
    contract,
)
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.settings import SwapSettings

POOL_GRAINS = 64
LIMIT_S = 100
SETTINGS = SwapSettings(quantum_least_s=0.02, overhead_s=0.005, swap_part=0.5, retry_s=0.05)


class RealProcess(SimulatedProcess):
    """Its blocks are memory of the fake driver, in a process of its own."""

    def __init__(self, node: SimulatedNode, name: str, pid: int) -> None:
        super().__init__(node, name, pid)
        self.owner: Owner = node.real.owner()  # type: ignore[attr-defined]
        self._made = 0
        self.left = 0

    def create(self, block: HeldBlock) -> None:
        self._made += 1
        block.memory = self._made
        self.owner.make(str(block.memory), block.bytes, None)

    def export(self, block: HeldBlock) -> int:
        return self.owner.export(str(block.memory))

    def release(self, block: HeldBlock) -> None:
        if block.memory >= 0:
            self.owner.drop(str(block.memory))
            self.left += block.state in (AWAY, CHOSEN)
        block.memory = -1

    def write(self, block: HeldBlock) -> None:
        """Another content: a new block of the fake driver's at once, which is faster than a copy through a pipe."""
        self.owner.drop(str(block.memory))
        block.expected = self.node.token()
        self.owner.make(str(block.memory), block.bytes, block.expected)

    def right(self, block: HeldBlock) -> bool:
        return self.owner.digest(str(block.memory)) == digest(block.bytes, block.expected)


CONTEXT_MIB = 300
"""Of the copier."""


class RealNode(SimulatedNode):
    """The real copier, the real clock."""

    process_kind = RealProcess

    def __init__(self, folder: Path, real: Node) -> None:
        self.real = real
        super().__init__(folder, capacity=12, pool=POOL_GRAINS, settings=SETTINGS, gpus=(UUID,))

    def start(self) -> None:
        self.swaps = SwapNode(
            time.monotonic, self.blocks, self.settings, self.folder, self.folder, BOOT,
            lambda *recall: self.recalls.append(recall),
            started_at=lambda pid: 7 if pid in self.processes else 0, connect=Copier,
        )  # fmt: skip
        self.swaps.add_gpu(UUID, self.capacity * GRAIN + (CONTEXT_MIB << 20), CONTEXT_MIB << 20)
        for name, one in self.contracts.items():
            self.swaps.join(name, one, tuple(one.gpus))

    def wait(self, what: str, until: object) -> None:
        """Serve everything until that is so."""
        end_s = time.monotonic() + LIMIT_S
        while not until():  # type: ignore[operator]
            assert time.monotonic() < end_s, f"not within {LIMIT_S} s: {what}"
            self.turn()
            socks = [one.sock for one in self.processes.values() if one.sock is not None]
            due_s = max(0.0, (self.swaps.deadline_s() or end_s) - time.monotonic())
            ready, _, _ = select.select([self.swaps.fd, *socks], [], [], min(1.0, due_s))
            for one in self.processes.values():
                if one.sock in ready:
                    one.step()


@pytest.fixture
def node() -> Iterator[RealNode]:
    real = Node(f"gpu h200 memory_mib=2048 context_mib={CONTEXT_MIB} uuid={UUID}\n")
    folder = Path(tempfile.mkdtemp(prefix="swap-"))
    real.run(path=folder / f"{UUID}.sock", pool_bytes=POOL_GRAINS * GRAIN)
    made = RealNode(folder, real)
    yield made
    made.close()
    real.end()
    shutil.rmtree(folder)


def two(node: RealNode) -> tuple[RealProcess, RealProcess]:
    """Containers of 8 grains each on a GPU of 12, that take turns."""
    for name in ("one", "other"):
        node.join(name, contract(1, 12, gpus=(UUID,)))
    one, other = node.process("one"), node.process("other")
    node.wait("both can be swapped", lambda: all(node.may_burst(name) for name in ("one", "other")))
    for process in (one, other):
        for _ in range(8):
            assert node.request(process, 1, wait_s=3000) in (NodeAnswer.GRANTED, NodeAnswer.WAITS)
    for name in ("one", "other"):
        node.swaps.working(name, True)
    assert isinstance(one, RealProcess)
    assert isinstance(other, RealProcess)
    return one, other


def moved(node: RealNode) -> int:
    return sum(one.left for one in node.processes.values() if isinstance(one, RealProcess))


def check(node: RealNode) -> None:
    for process in node.processes.values():
        for id_, block in process.blocks.items():
            assert block.state in (AWAY, MADE) or process.right(block), f"block {id_} of {process.name}"


def test_contents_are_equal_after_many_blocks_have_left_and_come_back(node: RealNode) -> None:
    """A thousand swaps are simulated in tests/unit/arbiter/swap: here a block takes the fake driver some ten milliseconds."""
    one, other = two(node)
    for count in range(20, 100, 20):
        node.wait(f"{count} blocks have left", lambda count=count: moved(node) >= count)
        check(node)
    assert min(one.left, other.left) > 20
    node.kill(other)
    node.wait("all is back", lambda: not node.blocks.names)
    node.check_all_back()


def test_contents_are_equal_whenever_the_copier_and_the_arbiter_are_killed(node: RealNode) -> None:
    _, other = two(node)
    for round_ in range(4):
        goal = moved(node) + 3 + round_
        node.wait("blocks leave", lambda goal=goal: moved(node) >= goal)
        if round_ % 2:
            node.real.processes[-1].kill()
            node.real.processes[-1].wait()
            node.real.run(path=node.folder / f"{UUID}.sock", pool_bytes=POOL_GRAINS * GRAIN)
        else:
            node.kill_arbiter()
            for process in node.processes.values():
                process.connect()
                node.use(process.name)
                node.swaps.working(process.name, True)
        check(node)
    node.kill(other)
    node.wait("all is back", lambda: not node.blocks.names)
    node.check_all_back()
