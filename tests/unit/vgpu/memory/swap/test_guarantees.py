"""Requests within and above the guarantee: who gets memory, who gives way for it, and what the host pool allows."""

from __future__ import annotations

import pytest

from tests.unit.vgpu.memory.swap.node_model import BE, GIB, LC, Program, SimulatedNode, contract
from vgpu.api.errors import BadDocument
from vgpu.memory.swap.actions import CancelSwapOut, Grant, Refuse, Report, SwapIn, SwapOut
from vgpu.memory.swap.container import GpuMemory
from vgpu.memory.swap.events import (
    Able,
    Changed,
    GpuSeen,
    Joined,
    MemoryContract,
    PoolSeen,
    Requested,
    Unable,
)
from vgpu.memory.swap.policy import SwapPolicy
from vgpu.memory.swap.settings import SwapSettings


def refusals(node: SimulatedNode) -> list[str]:
    return [action.reason for _, action in node.log if isinstance(action, Refuse)]


def swapped_out(node: SimulatedNode) -> list[tuple[str, float]]:
    """(container, GiB)."""
    return [(action.name, sum(action.gpus.values()) / GIB) for _, action in node.log if isinstance(action, SwapOut)]


def full_gpu(**others: Program) -> SimulatedNode:
    """An LC container with 8 GiB guaranteed and 20 GiB used, busy; the others have nothing yet. 24 GiB."""
    node = SimulatedNode({"lc": Program(contract(8, 24, LC), 20, always=True), **others})
    node.run(1)
    return node


def test_a_request_within_the_guarantee_takes_what_is_short_from_the_most_urgent_container() -> None:
    node = full_gpu(be=Program(contract(16, 16, BE)))
    node.guarantees_wait_most_s = 0.5
    node.request("be", "0", 10 * GIB, elastic=False)
    node.run_for(1)
    assert swapped_out(node) == [("lc", 6.0)]
    assert isinstance(node.log[-1][1], Grant)
    assert not node.may_run("lc")


def test_the_least_urgent_gives_way_to_a_guarantee_before_the_longest_idle() -> None:
    programs = {
        "idle": Program(contract(1, 24, LC), 8),
        "busy": Program(contract(1, 24, BE), 8, always=True),
        "guaranteed": Program(contract(16, 16)),
    }
    node = SimulatedNode(programs)
    node.run(1)
    node.request("guaranteed", "0", 10 * GIB)
    node.run_for(1)
    assert swapped_out(node) == [("busy", 2.0)]


def test_of_equals_the_longest_idle_gives_way() -> None:
    node = SimulatedNode({name: Program(contract(1, 24), 6) for name in ("a", "b", "c")})
    node.programs["guaranteed"] = Program(contract(12, 12))
    node.join("guaranteed")
    node.run(1)
    for name in ("b", "a", "c"):
        node.work(name)
        node.run_for(0.5)
        node.idle(name)
    node.request("guaranteed", "0", 8 * GIB)
    node.run_for(1)
    assert swapped_out(node) == [("b", 2.0)]


def test_requests_within_guarantees_are_granted_in_the_order_of_arrival() -> None:
    node = full_gpu(one=Program(contract(10, 10)), other=Program(contract(6, 6)))
    first, second = node.request("one", "0", 9 * GIB), node.request("other", "0", 2 * GIB)
    node.run_for(1)
    assert [action.id for _, action in node.log if isinstance(action, Grant)][1:] == [first, second]


def test_a_container_that_falls_back_to_its_guarantee_comes_back_at_once() -> None:
    node = SimulatedNode({"lc": Program(contract(14, 24, LC), 20), "be": Program(contract(10, 10, BE))})
    node.run(1)
    node.request("be", "0", 10 * GIB)
    node.run_for(1)
    assert not node.may_run("lc")
    node.free("lc", "0", 12 * GIB)
    node.run_for(1)
    assert node.may_run("lc")
    assert node.programs["lc"].memory["0"].present == 8 * GIB


def test_a_request_above_the_guarantee_waits_no_longer_than_it_may() -> None:
    node = full_gpu(be=Program(contract(1, 24, BE)))
    node.request("be", "0", 10 * GIB, wait_s=3)
    node.run_for(5)
    assert refusals(node) == ["no memory above the guarantee became free in time"]
    assert [at for at, action in node.log if isinstance(action, Refuse)] == [pytest.approx(4, abs=0.05)]
    assert node.may_run("lc")


def test_a_request_that_may_not_wait_gets_what_is_free_and_drives_nobody_out() -> None:
    node = SimulatedNode({"a": Program(contract(1, 24), 10), "b": Program(contract(1, 24))})
    node.run(1)
    node.request("b", "0", 10 * GIB, wait_s=0)
    node.run_for(0.1)
    assert isinstance(node.log[-1][1], Grant)
    node.request("b", "0", 5 * GIB, wait_s=0)
    node.run_for(0.1)
    assert refusals(node) == ["no memory above the guarantee became free in time"]
    assert swapped_out(node) == []


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
@pytest.mark.parametrize("able_after_s", [0.5, None])
def test_a_request_that_may_not_wait_waits_for_the_report_that_its_container_can_swap(
    wait_s: float, able_after_s: float | None
) -> None:
    policy = SwapPolicy(SwapSettings())
    policy.apply(GpuSeen(0, "0", 24 * GIB))
    policy.apply(PoolSeen(0, "0", 64 * GIB, True))
    policy.apply(Joined(0, "a", contract(1, 24)))
    policy.apply(Requested(1, "a", "r", "0", 10 * GIB, True, wait_s))
    assert policy.decide(1.0) == []
    assert policy.deadline_s() == 1 + max(wait_s, 1.0)
    if able_after_s is None:
        (refused,) = policy.decide(1 + max(wait_s, 1.0))
        assert isinstance(refused, Refuse)
        return
    policy.apply(Able(1 + able_after_s, "a"))
    assert policy.decide(1 + able_after_s) == [Grant("r")]


def test_no_request_goes_above_the_limit() -> None:
    node = full_gpu()
    node.request("lc", "0", 5 * GIB)
    node.run_for(0.1)
    assert refusals(node) == [f"{20 * GIB} of {24 * GIB} bytes of GPU 0 are used"]


def test_a_lower_limit_stops_requests_and_moves_nothing() -> None:
    node = full_gpu()
    node.programs["lc"].contract = contract(8, 10, LC)
    node.report(Changed(node.now_s, "lc", node.programs["lc"].contract))
    node.request("lc", "0", GIB)
    node.run_for(1)
    assert len(refusals(node)) == 1
    assert not swapped_out(node)


@pytest.mark.parametrize(("pool_full", "answers_s"), [("refuse", 0.0), ("delay", 30.0)])
def test_a_full_pool_delays_or_refuses_excess_and_never_a_reclaim(pool_full: str, answers_s: float) -> None:
    programs = {"one": Program(contract(2, 24)), "third": Program(contract(0, 24)), "other": Program(contract(16, 16))}
    node = SimulatedNode(programs, pool_gib=8, settings=SwapSettings(pool_full=pool_full))  # type: ignore[arg-type]
    node.request("one", "0", 10 * GIB)
    node.step()
    node.request("third", "0", GIB)
    node.run_for(1)
    why = "1024 MiB more above the guarantee need room there, and 0 of 8192 MiB are left"
    waits = {name: wait.text for name, wait in node.policy.pool_waits.items()}
    assert (why in waits.get("third", "")) is (pool_full == "delay")
    node.run_for(30)
    assert [type(action) for _, action in node.log] == [Grant, Refuse]
    assert why in refusals(node)[0]
    assert node.policy.pool_waits == {}
    assert node.log[-1][0] == pytest.approx(answers_s, abs=0.05)
    node.request("other", "0", 16 * GIB)
    node.run_for(1)
    assert swapped_out(node) == [("one", 2.0)]
    assert isinstance(node.log[-1][1], Grant)


def test_slots_that_are_freed_serve_the_next_request() -> None:
    node = SimulatedNode({"one": Program(contract(2, 24)), "other": Program(contract(2, 24))}, pool_gib=8)
    node.request("one", "0", 10 * GIB)
    node.request("other", "0", 6 * GIB)
    node.run_for(1)
    node.free("one", "0", 4 * GIB)
    node.run_for(0.1)
    assert [type(action) for _, action in node.log] == [Grant, Grant]


def test_slots_in_use_are_slots_of_the_pool() -> None:
    programs = {
        "one": Program(contract(2, 24), 14),
        "guaranteed": Program(contract(14, 14)),
        "other": Program(contract(1, 24)),
    }
    node = SimulatedNode(programs, pool_gib=16)
    node.run(1)
    node.request("guaranteed", "0", 14 * GIB)
    node.run_for(1)
    node.report_pool()  # 12 GiB of 16 are excess, 4 of them away
    node.free("guaranteed", "0", 4 * GIB)
    node.request("other", "0", 4 * GIB)
    node.run_for(1)
    assert node.programs["other"].memory["0"].used == 4 * GIB


def test_without_a_pool_nothing_goes_above_a_guarantee() -> None:
    node = SimulatedNode({"one": Program(contract(2, 24))})
    node.set_ready(False)
    node.request("one", "0", 4 * GIB, wait_s=1)
    node.request("one", "0", GIB)
    node.run_for(2)
    assert [type(action) for _, action in node.log] == [Grant, Refuse]


def test_nothing_moves_until_the_copier_is_ready() -> None:
    node = full_gpu(be=Program(contract(16, 16, BE)))
    node.set_ready(False)
    node.request("be", "0", 10 * GIB)
    node.run_for(20)
    assert not swapped_out(node)
    node.set_ready(True)
    node.run_for(1)
    assert swapped_out(node) == [("lc", 6.0)]
    assert isinstance(node.log[-1][1], Grant)


def test_a_container_gets_no_excess_before_it_has_reported_that_it_can_swap() -> None:
    policy = SimulatedNode({}).policy
    policy.apply(Joined(1.0, "one", contract(2, 24)))
    policy.apply(Requested(1.0, "one", "r1", "0", 4 * GIB, True, 30.0))
    assert policy.decide(1.0) == []
    policy.apply(Able(2.0, "one"))
    assert policy.decide(2.0) == [Grant("r1")]


def test_a_container_that_cannot_swap_gets_no_more_excess_and_keeps_what_it_has() -> None:
    node = full_gpu(other=Program(contract(2, 24), 4))
    node.report(Unable(node.now_s, "other", "it opened a GPUDirect RDMA registration"))
    node.request("other", "0", GIB)
    node.run_for(1)
    assert refusals(node) == ["the container cannot swap, so it gets no more memory above its guarantee"]
    assert node.times_of(Report, "other")
    assert not node.times_of(SwapOut, "other")


def test_an_order_that_failed_is_repeated_later() -> None:
    node = full_gpu(be=Program(contract(16, 16, BE)))
    node.request("be", "0", 10 * GIB)
    node.step()
    assert isinstance(node.programs["lc"].order, SwapOut)
    node.fail("lc")
    node.run_for(10)
    first_s, second_s = node.times_of(SwapOut, "lc")
    assert second_s - first_s == pytest.approx(node.settings.retry_s, abs=0.05)
    assert node.times_of(Report, "lc")


@pytest.mark.parametrize("idle", [False, True])
def test_what_nobody_needs_any_more_stays(idle: bool) -> None:
    node = full_gpu(be=Program(contract(16, 16, BE)))
    if idle:
        node.idle("lc")
    request = node.request("be", "0", 14 * GIB)
    node.run_for(0.1)
    node.withdraw("be", request)
    node.run_for(2)
    assert node.times_of(CancelSwapOut, "lc")
    assert node.may_run("lc") != idle
    assert node.programs["lc"].memory["0"].present > 10 * GIB
    assert 0 < node.moved < 10 * GIB


def test_others_come_back_when_a_container_leaves() -> None:
    node = full_gpu(be=Program(contract(16, 16, BE)))
    node.request("be", "0", 10 * GIB)
    node.run_for(1)
    node.leave("be")
    node.run_for(1)
    assert node.times_of(SwapIn, "lc")
    assert node.may_run("lc")


def test_a_gpu_that_shrinks_takes_excess() -> None:
    node = full_gpu()
    node.policy.apply(GpuSeen(node.now_s, "0", 18 * GIB))
    assert node.policy.decide(node.now_s) == [SwapOut("lc", {"0": 2 * GIB})]


def test_memory_that_cannot_move_stays_even_above_the_guarantee() -> None:
    assert GpuMemory(guarantee=2, limit=9, resident=5, elastic=1).swappable == 1


def test_a_contract_names_what_is_wrong_with_it() -> None:
    with pytest.raises(BadDocument, match="guarantee of 2 bytes of GPU 0: 0 to the limit of 1"):
        MemoryContract({"0": (2, 1)})
    with pytest.raises(BadDocument, match="container x on GPU 7: 1 other GPUs were reported"):
        full_gpu().policy.apply(Joined(1.0, "x", MemoryContract({"7": (1, 1)})))
