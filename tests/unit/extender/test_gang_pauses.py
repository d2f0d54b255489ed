"""What pods of a gang are refused after kube-scheduler has paused between them."""

from __future__ import annotations

import pytest

from extender.reasons import GANG_PAUSED, said_of_a_pause
from tests.builders import pod
from tests.unit.extender.extender_parts import FULL_MIB
from tests.unit.extender.ganging import GPUS, Ganging, group
from tests.unit.extender.preemption.test_coordinator import turned_down
from vgpu.scheduling.gang_pauses import LONGEST_QUIET_S, LONGEST_S
from vgpu.scheduling.gangs import QUIET_S


def test_the_rest_of_a_cycle_that_paused_is_refused_and_no_eviction_helps() -> None:
    ganging = Ganging()
    ganging.cycle()
    ganging.pause()
    result = ganging.filter(ganging.pods[2], "n1", "n2")
    reason = f"{GANG_PAUSED} for 2.0 s: the gang is tried again as a whole (refusal 1)"
    assert (result.node_names, result.failed, result.unresolvable) == ([], {}, {reason: ["n1", "n2"]})
    ganging.cycle(GPUS)
    assert (ganging.stages(), ganging.woken) == (["in gang"] * GPUS, ["n1"])


@pytest.mark.parametrize("sign", ["another pod", "its condition", "time", "its group is gone"])
def test_a_pod_that_was_refused_for_a_pause_is_tried_again_once_the_cycle_is_over(sign: str) -> None:
    ganging = Ganging()
    ganging.cycle()
    ganging.pause()
    (reason,) = ganging.filter(ganging.pods[2]).unresolvable
    assert ganging.woken == []
    match sign:
        case "another pod":
            ganging.filter(pod("other").asking(mib=FULL_MIB))
        case "its condition":
            ganging.report(turned_down(ganging.pods[2].at_version(2), message=f"0/1 nodes are available: 1 {reason}."))
        case "time":
            ganging.parts.now_s = LONGEST_S
            ganging.keeper.expire()
        case _:
            ganging.keeper.group_changed(group(), None)
    assert ganging.woken == ["n1"]
    assert ganging.filter(ganging.pods[2]).node_names == ["n1"]


def test_a_second_refusal_has_another_text_so_that_kube_scheduler_writes_it() -> None:
    """It patches no condition that stays as it was, and until it is seen no pod is retried."""
    ganging, refusals = Ganging(), list[str]()
    for pause_s in (QUIET_S, 2 * QUIET_S):
        refusals += ganging.refused_after(pause_s)
        ganging.report(turned_down(ganging.pods[2], message=f"0/1 nodes are available: 1 {refusals[-1]}."))
    assert ganging.woken == ["n1", "n1"]
    assert len(set(refusals)) == 2


def test_the_refusal_of_an_earlier_pause_does_not_end_this_one() -> None:
    """The watch shows the pod again, for example with another label, before kube-scheduler has written anew."""
    ganging, refusals = Ganging(), list[str]()
    for pause_s in (QUIET_S, 2 * QUIET_S):
        refusals += ganging.refused_after(pause_s)
        ganging.report(turned_down(ganging.pods[2], message=f"0/1 nodes are available: 1 {refusals[0]}."))
    assert ganging.woken == ["n1"]
    assert not ganging.filter(ganging.pods[2]).node_names


@pytest.mark.parametrize(("pause_s", "bound"), [(LONGEST_QUIET_S, True), (LONGEST_QUIET_S + 15, False)])
def test_a_gang_whose_pauses_are_too_long_is_reported(pause_s: float, bound: bool) -> None:
    ganging = Ganging()
    ganging.cycle()
    ganging.parts.now_s += pause_s
    ganging.keeper.expire()
    (reason,) = ganging.filter(ganging.pods[2]).unresolvable
    assert reason == f"{GANG_PAUSED} for {pause_s:.1f} s: " + (
        "the gang is tried again as a whole (refusal 1)"
        if bound
        else "GPUs are reserved for 60 s at most, so the gang cannot be bound before its pauses are shorter (refusal 1)"
    )
    assert said_of_a_pause(f"0/2 nodes are available: 1 Insufficient cpu, 1 {reason}. preemption: none") == reason


def test_a_condition_with_another_text_does_not_end_a_pause() -> None:
    ganging = Ganging()
    ganging.cycle()
    ganging.pause()
    assert not ganging.filter(ganging.pods[2]).node_names
    ganging.report(turned_down(ganging.pods[2].at_version(2), message="0/1 nodes are available: 1 Insufficient cpu."))
    assert ganging.woken == []
    known = ganging.parts.pods.get(ganging.pods[2].build().key)
    assert known is not None
    assert known.status.conditions[0].message == "", "of messages nothing else is kept"


def test_one_that_may_be_bound_is_never_refused_for_a_pause() -> None:
    ganging = Ganging()
    ganging.cycle(GPUS)
    ganging.parts.state.on("bind", ganging.pods[2].build().uid)
    ganging.end("m0")
    ganging.filter(ganging.pods[1])
    ganging.parts.now_s += QUIET_S
    ganging.keeper.expire()
    assert ganging.filter(ganging.pods[2]).node_names == ["n1"]
