"""Memory that a program frees while it is away: its slots are free at once, and it is never brought back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.arbiter.swap.node_kit import AWAY, GPU, GRAIN, RESIDENT, SimulatedNode, SimulatedProcess, contract
from vgpu.memory.records import NodeAnswer
from vgpu.protocol.messages import Discard, SwapIn


@pytest.fixture
def node(tmp_path: Path):
    made = SimulatedNode(tmp_path, capacity=12, pool=48)
    made.join("idle", contract(2, 12, "best-effort"))
    made.join("busy", contract(2, 12))
    yield made
    made.close()


@pytest.fixture
def idle(node: SimulatedNode) -> SimulatedProcess:
    """It has 8 grains in four blocks, of which three are away."""
    process = node.process("idle")
    busy = node.process("busy")
    node.settle(1.0)
    for _ in range(4):
        assert node.request(process, 2) is NodeAnswer.GRANTED
    node.swaps.working("busy", True)
    assert node.request(busy, 10) is NodeAnswer.WAITS
    node.settle(1.0)
    assert [block.state for block in process.blocks.values()].count(AWAY) == 3
    return process


def free_grains(node: SimulatedNode) -> int:
    slots = node.swaps._pools[GPU].slots
    assert slots is not None
    return slots.free_bytes // GRAIN


def figures(node: SimulatedNode) -> tuple[int, ...]:
    """Resident, elastic, away of the idle container, in grains."""
    return tuple(amount // GRAIN for amount in node.swaps._containers["idle"].figures(GPU))


def test_its_slots_are_free_and_what_is_left_comes_back(node: SimulatedNode, idle: SimulatedProcess) -> None:
    assert free_grains(node) == 42
    assert figures(node) == (0, 8, 6)
    idle.discard(2)
    node.settle()
    assert free_grains(node) == 46
    assert figures(node) == (0, 4, 2)
    assert len(idle.blocks) == 2
    node.kill(node.processes[max(node.processes)])
    node.swaps.working("idle", True)
    node.settle(60.0)
    node.check_all_back()


def test_a_container_whose_memory_is_all_discarded_may_run_again(node: SimulatedNode, idle: SimulatedProcess) -> None:
    idle.discard(3)
    node.settle(1.0)
    assert not node.blocked("idle")
    assert free_grains(node) == 48
    assert not any(isinstance(order, SwapIn) for order in idle.orders)


def test_until_it_is_returned_its_lease_counts_as_away_for_a_second(
    node: SimulatedNode, idle: SimulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "use", lambda _: None)
    idle.discard(3)
    node.settle()
    assert figures(node) == (0, 8, 6)
    node.settle(0.9)
    assert figures(node) == (0, 8, 6)
    idle.send(Discard(0, (999,)), 999)
    idle.blocks[999] = type(next(iter(idle.blocks.values())))(GRAIN, state="discarded")
    node.settle(0.3)
    assert figures(node) == (0, 8, 2), "another DISCARD does not put that off, and what it has left gives way"


def test_it_is_answered_once_the_records_are_written(node: SimulatedNode, idle: SimulatedProcess) -> None:
    node.disk_full = True
    idle.discard(1)
    node.settle(3.0)
    assert len(idle.blocks) == 4
    assert free_grains(node) == 42, "its slot may still be named by the file"
    node.disk_full = False
    node.settle(3.0)
    assert len(idle.blocks) == 3
    assert free_grains(node) == 44


@pytest.mark.parametrize("when", ["before it is read", "before it is recorded", "before it is answered"])
def test_an_arbiter_that_is_killed_has_it_repeated(node: SimulatedNode, idle: SimulatedProcess, when: str) -> None:
    node.disk_full = when == "before it is recorded"
    idle.discard(2)
    if when != "before it is read":
        node.turn()
    idle.drop()
    node.disk_full = False
    node.kill_arbiter()
    node.use("idle")
    idle.connect()
    node.settle(5.0)
    assert len(idle.blocks) == 2
    assert idle.errors == []
    assert free_grains(node) == 46
    node.kill(node.processes[max(node.processes)])
    node.swaps.working("idle", True)
    node.settle(60.0)
    node.check_all_back()


def test_it_may_cross_an_order_that_brings_it_back(node: SimulatedNode, idle: SimulatedProcess) -> None:
    """All of the order, and a part of it."""
    node.kill(node.processes[max(node.processes)])
    idle.deaf = True
    node.swaps.working("idle", True)
    node.settle(1.0)
    idle.discard(2)
    node.turn()
    idle.deaf = False
    node.settle(10.0)
    assert idle.errors == []
    assert [block.state for block in idle.blocks.values()] == [RESIDENT, RESIDENT]
    assert free_grains(node) == 48
    node.check_all_back()


@pytest.mark.parametrize("wrong", ["twice", "not away"])
def test_what_no_library_discards_ends_the_connection(node: SimulatedNode, idle: SimulatedProcess, wrong: str) -> None:
    block = next(id_ for id_, block in idle.blocks.items() if block.state == AWAY)
    if wrong == "not away":
        node.kill(node.processes[max(node.processes)])
        node.swaps.working("idle", True)
        node.settle(0.0)
        while idle.blocks[block].state == AWAY:
            node.now_s += 0.1
            node.turn()
            idle.step()
        node.turn()
    idle.send(Discard(0, (block, block) if wrong == "twice" else (block,)), 9)
    node.turn()
    while idle.step():
        pass
    assert [error.text for error in idle.errors] == [
        f"DISCARD names {'a block twice' if wrong == 'twice' else f'block {block}, which is not away'}"
    ]
    assert idle.sock is None
