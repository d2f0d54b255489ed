"""Containers that change places on a simulated node, as long as nothing ends or lies."""

from __future__ import annotations

import select
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from arbiter.swap import trace_file
from arbiter.swap.coordinator import LOGGED_EVERY_S
from arbiter.swap.reasons import NO_POOL
from tests.unit.arbiter.swap.node_kit import AWAY, GPU, GRAIN, RESIDENT, SimulatedNode, SimulatedProcess, contract
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.actions import Grant, SwapOut
from vgpu.memory.swap.events import GpuSeen
from vgpu.memory.swap.settings import SwapSettings
from vgpu.memory.swap.trace import from_lines, replay
from vgpu.protocol import messages, wire
from vgpu.protocol.messages import Burst, Unmap, Unmapped


def able(node: SimulatedNode, name: str, guarantee: int = 4, limit: int = 16) -> SimulatedProcess:
    """A container with one process, which can be swapped."""
    node.join(name, contract(guarantee, limit))
    process = node.process(name)
    node.settle(1.0)
    return process


def fill(node: SimulatedNode, process: SimulatedProcess, *grains: int) -> None:
    for one in grains:
        assert node.request(process, one) is NodeAnswer.GRANTED


def test_a_guarantee_takes_the_excess_of_another_and_it_comes_back_when_there_is_room(node: SimulatedNode) -> None:
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4, 4, 4)
    assert node.request(small, 4) is NodeAnswer.WAITS
    node.settle(2.0)
    assert not node.requests
    assert node.leased("small") == 4 * GRAIN
    assert [block.state for block in big.blocks.values()].count(AWAY) == 1
    assert node.blocked("big")
    assert node.swaps.status("big").gpus[0].away_bytes == 4 * GRAIN
    node.swaps.working("big", True)
    node.settle(20.0)
    assert node.blocked("big")
    node.kill(small)
    node.settle(5.0)
    node.check_all_back()
    assert node.swaps.status("big").paused is False


def test_limits_are_sent_at_once_and_when_they_change(node: SimulatedNode) -> None:
    node.settle(1.0)
    process = able(node, "a")
    assert process.limits == {0: (4 * GRAIN, 16 * GRAIN)}
    node.swaps.change("a", contract(4, 4))
    node.settle()
    assert process.limits == {0: (4 * GRAIN, 4 * GRAIN)}
    assert not node.may_burst("a")


def test_what_was_granted_and_is_not_known_to_the_ledger_yet_is_not_free(node: SimulatedNode) -> None:
    """The ledger says what is leased before it fetches the answers to requests that waited."""
    first, second = able(node, "first", 2), able(node, "second", 2)
    fill(node, first, 4, 4, 4)
    assert node.request(second, 5) is NodeAnswer.WAITS
    assert node.request(second, 5) is NodeAnswer.WAITS
    while len(node.swaps._coordinator._decided) < 2:
        node.now_s += 0.01
        for copier in node.copiers.values():
            copier.step()
        for process in node.processes.values():
            process.step()
        node.swaps.turn()
    node.swaps.use("second", GPU, 0, 0)
    assert node.swaps._containers["second"].used_bytes(GPU) == 10 * GRAIN
    for known in (5, 10):
        (granted,) = node.swaps.decided()
        assert granted.granted
        node.swaps.use("second", GPU, 0, known * GRAIN)
        assert node.swaps._containers["second"].used_bytes(GPU) == 10 * GRAIN
    assert node.swaps.decided() == []
    node.swaps.use("second", GPU, 0, 10 * GRAIN)
    assert node.swaps._containers["second"].used_bytes(GPU) == 10 * GRAIN


def test_containers_that_do_not_fit_together_take_turns_and_keep_their_contents(node: SimulatedNode) -> None:
    first, second = able(node, "first", 2), able(node, "second", 2)
    fill(node, first, 4, 4, 4)
    node.swaps.working("first", True)
    assert node.request(second, 4) is NodeAnswer.GRANTED
    assert node.request(second, 4) is NodeAnswer.WAITS
    node.swaps.working("second", True)
    for _ in range(20):
        node.settle(5.0)
    outs = [sum(type(order).__name__ == "SwapOut" for order in one.orders) for one in (first, second)]
    assert min(outs) > 3, outs
    assert len(second.blocks) == 2


def test_unused_leases_are_recalled_first_and_what_returns_does_not_move(node: SimulatedNode) -> None:
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4)
    node.swaps.use("big", GPU, 0, 16 * GRAIN)
    assert node.request(small, 4) is NodeAnswer.WAITS
    node.turn()
    assert node.recalls == [("big", GPU, 4 * GRAIN)]
    node.use("big")
    node.settle(1.0)
    assert [block.state for block in big.blocks.values()] == [RESIDENT, RESIDENT]
    assert node.leased("small") == 4 * GRAIN


def test_a_part_that_returns_is_not_moved(node: SimulatedNode) -> None:
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4, 2, 2, 2)
    node.swaps.use("big", GPU, 0, 16 * GRAIN)
    assert node.request(small, 4) is NodeAnswer.WAITS
    node.turn()
    node.use("big")
    node.settle(1.0)
    assert [order.bytes for order in big.orders if isinstance(order, messages.SwapOut)] == [2 * GRAIN]
    assert node.leased("small") == 4 * GRAIN


def test_a_request_within_the_guarantee_needs_no_decision_while_memory_is_free(node: SimulatedNode) -> None:
    process = able(node, "a")
    before = node.swaps._coordinator.policy._now_s
    node.now_s += 0.5
    assert node.request(process, 4) is NodeAnswer.GRANTED
    assert not node.swaps._coordinator.undecided
    assert before < node.swaps._coordinator.policy._now_s  # only the use was applied


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """Where a rename does not wait for a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tangram-test-") as folder:
        yield Path(folder)


def test_contents_are_equal_after_a_thousand_swaps(fast_folder: Path) -> None:
    node = SimulatedNode(fast_folder, capacity=12, settings=SwapSettings(quantum_least_s=0.1, overhead_s=0.01))
    first, second = able(node, "first", 1, 12), able(node, "second", 1, 12)
    for process in (first, second):
        for grains in (1, 2, 2, 3):
            node.request(process, grains, wait_s=3600.0)
    for name in ("first", "second"):
        node.swaps.working(name, True)
    for _ in range(1000):
        if (
            sum(
                len(order.ids) for one in (first, second) for order in one.orders if isinstance(order, Unmapped | Unmap)
            )
            >= 1000
        ):
            break
        node.settle(0.5)
    else:
        raise AssertionError("too few swaps")
    node.kill(second)
    node.settle(5.0)
    node.check_all_back()
    node.close()


def test_a_container_on_two_gpus_is_blocked_until_all_is_back_on_both(tmp_path: Path) -> None:
    gpus = "GPU-a", "GPU-b"
    node = SimulatedNode(tmp_path, gpus=gpus)
    node.join("both", contract(4, 16, gpus=gpus))
    for gpu in gpus:
        node.join(f"on {gpu}", contract(4, 16, gpus=(gpu,)))
    both, others = node.process("both"), [node.process(f"on {gpu}") for gpu in gpus]
    node.settle(1.0)
    for gpu in (0, 1):
        for _ in range(4):
            assert node.request(both, 4, gpu=gpu) is NodeAnswer.GRANTED
    for other in others:
        assert node.request(other, 4) is NodeAnswer.WAITS
    node.settle(2.0)
    assert [one.away_bytes for one in node.swaps.status("both").gpus] == [4 * GRAIN, 4 * GRAIN]
    node.swaps.working("both", True)
    node.kill(others[0])
    node.settle(3.0)
    assert node.blocked("both"), "it comes back only when there is room on both"
    node.kill(others[1])
    node.settle(3.0)
    node.check_all_back()
    node.close()


def test_a_paused_container_waits_for_the_pools_from_which_its_memory_is_to_come_and_for_no_other(
    tmp_path: Path,
) -> None:
    gpus = "GPU-a", "GPU-b"
    node = SimulatedNode(tmp_path, gpus=gpus)
    node.join("both", contract(4, 16, gpus=gpus))
    node.join("on GPU-a", contract(4, 16, gpus=gpus[:1]))
    both, other = node.process("both"), node.process("on GPU-a")
    node.settle(1.0)
    for gpu in (0, 1):
        for _ in range(4):
            assert node.request(both, 4, gpu=gpu) is NodeAnswer.GRANTED
    assert node.request(other, 4) is NodeAnswer.WAITS
    node.settle(2.0)
    assert [bool(one.away_bytes) for one in node.swaps.status("both").gpus] == [True, False]
    waits = node.swaps.status("both").why
    assert waits != NO_POOL
    node.copiers["GPU-b"].kill()
    node.settle(1.0)
    assert not node.swaps.ready("GPU-b")
    assert node.swaps.status("both").why == waits
    node.copiers["GPU-a"].kill()
    node.settle(1.0)
    assert node.swaps.status("both").why == NO_POOL
    node.close()


def test_a_grant_that_nobody_fetched_ends_with_its_withdrawal(node: SimulatedNode) -> None:
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4, 4, 4)
    assert node.swaps.request("x", "small", GPU, 4 * GRAIN, elastic=False, wait_s=0) is NodeAnswer.WAITS
    for _ in range(40):
        node.swaps.turn()
        big.step()
        node.copier.step()
        node.now_s += 0.01
    node.swaps.withdraw("x")
    assert node.swaps.decided() == []
    assert node.swaps._containers["small"].used_bytes(GPU) == 0
    assert node.leased("small") == 0
    assert small.errors == []


def test_a_container_that_leaves_leaves_no_slot_and_no_request(node: SimulatedNode) -> None:
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4, 4, 4)
    assert node.request(small, 4) is NodeAnswer.WAITS
    node.settle(1.0)
    node.swaps.leave("big")
    node.turn()
    slots = node.swaps._pools[GPU].slots
    assert slots is not None
    assert slots.free_bytes == slots.pool_bytes
    big.step()
    assert big.sock is None


def test_a_second_connection_of_a_process_takes_the_place_of_the_first(node: SimulatedNode) -> None:
    process = able(node, "a")
    first = process.sock
    assert first is not None
    process.sock = None
    process.connect()
    node.settle(1.0)
    while packet := first.recv(4096):
        assert isinstance(wire.decode(packet)[1], Burst)
    first.close()
    assert node.swaps.status("a").unable == ""


def test_the_trace_leads_to_the_same_actions_again(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    node = SimulatedNode(tmp_path, trace=path)
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4, 4, 4)
    node.request(small, 4)
    node.settle(5.0)
    actions = [action for _, action in replay(from_lines(path.read_bytes()))]
    assert SwapOut("big", {GPU: 4 * GRAIN}) in actions
    assert any(isinstance(action, Grant) for action in actions)
    node.close()


def test_the_trace_is_bounded_and_begins_with_the_present_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "LIMIT_BYTES", 20_000)
    node = SimulatedNode(tmp_path, trace=tmp_path / "trace")
    big = able(node, "big")
    fill(node, big, 4)
    for number in range(400):
        node.swaps.use("big", GPU, number * GRAIN, 4 * GRAIN)
        node.settle(0.5)
    for name in ("trace", "trace.1"):
        assert 0 < (tmp_path / name).stat().st_size <= 30_000
        events = list(from_lines((tmp_path / name).read_bytes()))
        assert isinstance(events[0], GpuSeen)
        list(replay(events))
    node.close()


def test_work_that_other_threads_report_is_known_soon_while_something_waits(node: SimulatedNode) -> None:
    big, small = able(node, "big"), able(node, "small")
    fill(node, big, 4, 4, 4, 4)
    node.request(small, 4)
    node.settle(1.0)
    thread = threading.Thread(target=node.swaps.working, args=("big", True))
    thread.start()
    thread.join()
    ready, _, _ = select.select([node.swaps.fd], [], [], 10)
    assert ready, "the loop is woken"
    node.swaps.turn()
    node.now_s += 0.02
    node.swaps.turn()
    assert node.swaps._coordinator.policy._states["big"].working


def test_the_reason_of_a_refusal_is_in_the_log_and_not_of_each(node: SimulatedNode) -> None:
    process = able(node, "a")
    with capture_logs() as logs:
        for _ in range(3):
            assert node.request(process, 17) is NodeAnswer.REFUSED
        node.now_s += LOGGED_EVERY_S
        assert node.request(process, 18) is NodeAnswer.REFUSED
    refusals = [(one["grant"], one["bytes"]) for one in logs if one["event"] == "memory refused"]
    assert refusals == [("a", 17 * GRAIN), ("a", 18 * GRAIN)]
    assert "of 33554432 bytes of GPU GPU-a are used" in next(one["reason"] for one in logs if "reason" in one)
