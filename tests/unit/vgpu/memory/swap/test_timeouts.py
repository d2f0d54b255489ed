"""Containers that do not give way, and containers whose memory cannot come back."""

from __future__ import annotations

import pytest

from tests.unit.vgpu.memory.swap.node_model import BE, GIB, LC, Program, SimulatedNode, contract
from vgpu.memory.swap.actions import CancelSwapOut, OverLimit, Refuse, Report, Stranded, SwapOut
from vgpu.memory.swap.events import Able, Progress, Unable
from vgpu.memory.swap.settings import SwapSettings


def stopped_beside(*, within_guarantee: bool, gib: int = 10, settings: SwapSettings | None = None) -> SimulatedNode:
    """`deaf` has 20 of 24 GiB, 2 guaranteed, and its library does not answer. `waits` requests memory, within its guarantee or above."""
    programs = {
        "deaf": Program(contract(2, 24, BE), 20, stopped=True),
        "waits": Program(contract(16 if within_guarantee else 1, 24, LC)),
    }
    node = SimulatedNode(programs, settings=settings)
    node.run(1)
    node.request("waits", "0", gib * GIB, wait_s=60)
    return node


def test_a_container_that_does_not_give_way_to_a_guarantee_is_over_its_limit_after_the_time_out() -> None:
    node = stopped_beside(within_guarantee=True)
    node.run_for(30)
    assert node.times_of(OverLimit, "deaf") == [pytest.approx(11, abs=0.1)]
    assert not node.times_of(CancelSwapOut, "deaf")


def test_it_keeps_its_memory_and_counts_as_unable_if_only_excess_waits() -> None:
    node = stopped_beside(within_guarantee=False)
    node.run_for(40)
    assert not node.times_of(OverLimit, "deaf")
    assert node.times_of(CancelSwapOut, "deaf") == [pytest.approx(11, abs=0.1)]
    assert node.times_of(Report, "deaf") == [pytest.approx(11, abs=0.1)]
    assert len(node.times_of(SwapOut, "deaf")) == 1
    assert node.may_run("deaf")


def test_it_is_swapped_again_once_it_reports_that_it_can() -> None:
    node = stopped_beside(within_guarantee=False)
    node.run_for(15)
    node.programs["deaf"].stopped = False
    node.report(Able(node.now_s, "deaf"))
    node.run_for(2)
    assert len(node.times_of(SwapOut, "deaf")) == 2
    assert node.programs["waits"].memory["0"].used == 10 * GIB


def test_a_neighbour_that_requests_later_starts_the_time_anew() -> None:
    node = stopped_beside(within_guarantee=False)
    node.programs["guaranteed"] = Program(contract(4, 4))
    node.run_for(8)
    node.join("guaranteed")
    node.request("guaranteed", "0", 4 * GIB)
    node.request("waits", "0", GIB)
    node.run_for(9)
    assert not node.times_of(OverLimit, "deaf")
    node.run_for(3)
    assert node.times_of(OverLimit, "deaf") == [pytest.approx(19, abs=0.1)]


def test_time_without_a_ready_copier_does_not_count() -> None:
    node = stopped_beside(within_guarantee=True)
    node.run_for(5)
    node.set_ready(False)
    node.run_for(100)
    assert not node.times_of(OverLimit, "deaf")
    node.set_ready(True)
    node.run_for(4.5)
    assert not node.times_of(OverLimit, "deaf")
    node.run_for(1)
    assert node.times_of(OverLimit, "deaf")


def test_time_until_the_suspend_does_not_count() -> None:
    node = stopped_beside(within_guarantee=True)
    node._decide_if_due()
    assert node.times_of(SwapOut, "deaf")
    for second in range(2, 60):
        assert node.policy.decide(float(second)) == []
    assert node.policy.deadline_s() is None


def test_a_container_that_moves_its_memory_gives_way_however_long_it_takes() -> None:
    node = stopped_beside(within_guarantee=True, gib=16)
    while node.programs["waits"].asked:
        node.programs["deaf"].memory["0"].away += GIB // 20
        node.report(Progress(node.now_s, "deaf", "0", "out", GIB // 20))
        node.run_for(0.05)
    assert node.now_s > 12
    assert not node.times_of(OverLimit, "deaf")


def test_a_block_now_and_then_is_not_giving_way() -> None:
    node = stopped_beside(within_guarantee=True)
    for _ in range(12):
        node.run_for(1)
        node.programs["deaf"].memory["0"].away += 2 * 2**20
        node.report(Progress(node.now_s, "deaf", "0", "out", 2 * 2**20))
    assert node.times_of(OverLimit, "deaf")


def tried_again(node: SimulatedNode, name: str, *, unable_s: float, tries: int) -> None:
    """It counts as unable for a while, and is then ordered again: its library answers nothing within 5 s."""
    for _ in range(tries):
        node.programs[name].order = None
        node.report(Unable(node.now_s, name, "it does not answer"))
        node.run_for(unable_s)
        node.report(Able(node.now_s, name))
        node.run_for(5)


def test_a_container_that_is_tried_again_before_the_time_out_ends_does_not_begin_anew() -> None:
    node = stopped_beside(within_guarantee=True, settings=SwapSettings(reclaim_timeout_s=60))
    node.run_for(5)
    tried_again(node, "deaf", unable_s=20, tries=4)
    assert len(node.times_of(SwapOut, "deaf")) >= 3
    (at_s,) = node.times_of(OverLimit, "deaf")
    assert 60 <= at_s <= 75


def test_who_gives_way_or_is_needed_no_more_begins_anew() -> None:
    node = stopped_beside(within_guarantee=True, settings=SwapSettings(reclaim_timeout_s=60))
    node.run_for(5)
    tried_again(node, "deaf", unable_s=20, tries=2)
    node.withdraw("waits", next(iter(node.programs["waits"].asked)))
    node.run_for(1)
    node.request("waits", "0", 10 * GIB, wait_s=60)
    tried_again(node, "deaf", unable_s=20, tries=2)
    assert not node.times_of(OverLimit, "deaf")


def test_an_order_that_was_carried_out_ends_the_time_though_others_wait_already() -> None:
    node = stopped_beside(within_guarantee=True, settings=SwapSettings(reclaim_timeout_s=20))
    node.run_for(15)
    node.programs["deaf"].stopped = False
    node.programs["next"] = Program(contract(4, 4))
    node.join("next")
    node.request("next", "0", 4 * GIB)
    while node.programs["waits"].asked:
        node.step()
    node.programs["deaf"].stopped = True
    node.run_for(15)
    assert not node.times_of(OverLimit, "deaf")
    node.run_for(10)
    assert node.times_of(OverLimit, "deaf")


def test_one_that_cannot_swap_is_over_its_limit_only_if_the_others_excess_is_not_enough() -> None:
    for others_gib, guaranteed_gib, ends in ((8, 9, False), (2, 12, True)):
        programs = {
            "cannot": Program(contract(2, 24, BE), 12),
            "can": Program(contract(1, 24), 1 + others_gib),
            "guaranteed": Program(contract(12, 12)),
        }
        node = SimulatedNode(programs)
        node.run(1)
        node.report(Unable(node.now_s, "cannot", "its suspends do not work"))
        node.request("guaranteed", "0", guaranteed_gib * GIB)
        node.run_for(15)
        assert bool(node.times_of(OverLimit, "cannot")) == ends
        assert not node.times_of(OverLimit, "can")


def test_one_that_cannot_swap_is_not_late_while_another_that_can_is() -> None:
    programs = {
        "cannot": Program(contract(2, 24, BE), 12),
        "can": Program(contract(1, 24), 9, stopped=True),
        "guaranteed": Program(contract(12, 12)),
    }
    node = SimulatedNode(programs)
    node.run(1)
    node.report(Unable(node.now_s, "cannot", "its suspends do not work"))
    node.request("guaranteed", "0", 9 * GIB)
    node.run_for(25)
    assert node.times_of(OverLimit, "can")
    assert not node.times_of(OverLimit, "cannot")


def test_a_container_within_its_guarantee_is_never_over_its_limit() -> None:
    node = SimulatedNode({"small": Program(contract(8, 8), 8, stopped=True), "deaf": Program(contract(2, 24), 14, stopped=True)})  # fmt: skip
    node.programs["guaranteed"] = Program(contract(14, 14))
    node.join("guaranteed")
    node.run(1)
    node.request("guaranteed", "0", 8 * GIB)
    node.run_for(20)
    assert node.times_of(OverLimit, "deaf")
    assert not node.times_of(OverLimit, "small")


def displaced() -> SimulatedNode:
    """`big` has 20 GiB, 2 guaranteed; then 10 GiB of guarantees are used beside it on 24 GiB."""
    node = SimulatedNode({"big": Program(contract(2, 24), 20, always=True), "small": Program(contract(10, 10))})
    node.run(1)
    node.request("small", "0", 10 * GIB)
    node.run_for(1)
    return node


def test_memory_for_which_the_guarantees_leave_no_room_is_stranded_after_five_minutes() -> None:
    node = displaced()
    node.run_for(400)
    assert node.times_of(Stranded, "big") == [pytest.approx(301, abs=1)]
    node.free("small", "0", 10 * GIB)
    node.run_for(1)
    assert node.may_run("big")


def test_idle_time_and_time_without_a_copier_does_not_count_for_being_stranded() -> None:
    node = displaced()
    node.run_for(200)
    node.idle("big")
    node.run_for(200)
    node.work("big")
    node.set_ready(False)
    node.run_for(200)
    assert not node.times_of(Stranded, "big")
    node.set_ready(True)
    node.run_for(102)
    assert node.times_of(Stranded, "big")


def test_one_for_which_memory_of_others_that_cannot_be_moved_leaves_no_room_is_stranded() -> None:
    node = SimulatedNode({"cannot": Program(contract(2, 24), 10, always=True), "big": Program(contract(2, 24), 14)})
    node.run(1)
    node.report(Unable(node.now_s, "cannot", "its suspends do not work"))
    node.programs["small"] = Program(contract(4, 4), 4)
    node.join("small")
    node.work("big")
    node.run_for(290)
    assert not node.may_run("big")
    assert not node.times_of(Stranded, "big")
    node.run_for(20)
    ((_, action),) = [one for one in node.log if isinstance(one[1], Stranded)]
    assert action == Stranded("big", "memory of other containers that cannot be moved leaves no room for its memory")
    assert not node.times_of(OverLimit, "cannot"), "no guarantee waits for what it has"
    node.report(Able(node.now_s, "cannot"))
    node.run_for(20)
    assert node.programs["big"].ran_s > 0


def test_memory_of_others_around_the_library_strands_one_that_is_away() -> None:
    """8 of 24 GiB with a guarantee of 2: no guarantee waits, so it keeps them. The other has 20."""
    node = displaced()
    node.programs["around"] = Program(contract(2, 24))
    node.join("around")
    node.free("small", "0", node.programs["small"].memory["0"].used)
    node.programs["around"].memory["0"].resident = 8 * GIB
    node._report_used("around", "0")
    node.run_for(400)
    assert node.times_of(Stranded, "big")
    assert not node.times_of(OverLimit, "around")


def test_one_within_its_guarantee_is_not_stranded_by_what_cannot_be_moved() -> None:
    """The other is over its limit, which is not its own end."""
    programs = {"around": Program(contract(2, 24, BE), 1), "waits": Program(contract(16, 24), 20, always=True)}
    node = SimulatedNode(programs)
    node.run(1)
    node.programs["small"] = Program(contract(5, 5), 5)
    node.join("small")
    node.run_for(20)
    assert not node.may_run("waits")
    node.free("waits", "0", 6 * GIB)
    node.programs["around"].memory["0"].resident = 11 * GIB // 2
    node._report_used("around", "0")
    node.run_for(400)
    assert node.times_of(OverLimit, "around")
    assert not node.may_run("waits")
    assert not node.times_of(Stranded, "waits")


def test_waiting_for_a_turn_is_not_being_stranded() -> None:
    programs = {f"t{number}": Program(contract(2, 24), 16, always=True, wait_s=3600) for number in range(3)}
    programs["t0"].contract = contract(2, 24, LC)
    node = SimulatedNode(programs)
    node.run(500)
    assert not any(isinstance(action, Stranded) for _, action in node.log)


def test_one_that_never_fits_does_not_keep_the_others_from_their_turns() -> None:
    node = displaced()
    node.programs["one"] = Program(contract(0.5, 24), 11, always=True, wait_s=3600)
    node.programs["other"] = Program(contract(0.5, 24), 10, always=True, wait_s=3600)
    node.join("one")
    node.join("other")
    node.run_for(100)
    assert node.programs["one"].ran_s > 30
    assert node.programs["other"].ran_s > 30
    assert not any(isinstance(action, Refuse) for _, action in node.log)


@pytest.mark.parametrize("ready", [True, False])
def test_memory_above_the_guarantee_that_no_swap_can_move_is_over_the_limit(ready: bool) -> None:
    """Its library states that it can be swapped, and its memory is that of a process that goes around the library."""
    programs = {"around": Program(contract(2, 24, BE), 1), "waits": Program(contract(16, 24, LC))}
    node = SimulatedNode(programs)
    node.run(1)
    node.set_ready(ready)
    node.programs["around"].memory["0"].resident = 20 * GIB
    node._report_used("around", "0")
    node.request("waits", "0", 10 * GIB, wait_s=60)
    node.run_for(30)
    (at_s,) = node.times_of(OverLimit, "around")
    assert at_s == pytest.approx(11, abs=1.5)


def test_memory_above_the_guarantee_that_no_swap_can_move_stays_while_nobody_lacks_a_guarantee() -> None:
    programs = {"around": Program(contract(2, 24, BE), 1), "waits": Program(contract(1, 24, LC))}
    node = SimulatedNode(programs)
    node.run(1)
    node.programs["around"].memory["0"].resident = 20 * GIB
    node._report_used("around", "0")
    node.request("waits", "0", 10 * GIB, wait_s=60)
    node.run_for(30)
    assert not node.times_of(OverLimit, "around")
