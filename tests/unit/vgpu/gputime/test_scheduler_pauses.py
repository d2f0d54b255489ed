"""Pauses between kernels while several containers get time slices, under the simulated clock of `gpu_model`."""

from __future__ import annotations

import pytest

from tests.unit.vgpu.gputime.gpu_model import LC, Program, SimulatedNode, container, looping, scheduler_with
from vgpu.gputime.events import Hung, Idle, Switched, Work


@pytest.mark.parametrize("pause_s", [0.00005, 0.0003])
def test_a_time_slice_continues_over_pauses_shorter_than_a_switch_and_pays_for_them(pause_s: float) -> None:
    node = SimulatedNode({"few": looping(30, pause_s), "many": looping(60, pause_s)})
    node.run(10.0)
    few, many = node.scheduler.usage("few"), node.scheduler.usage("many")
    assert few.on_s / 10 * 100 == pytest.approx(30, abs=0.5)
    assert many.on_s / 10 * 100 == pytest.approx(60, abs=0.5)
    assert few.suspends + many.suspends < 250, "20 frames a second, and not every pause"
    assert node.on_s("few") / few.on_s > 0.0014 / (0.0014 + pause_s) - 0.05, (
        "what it paid for was its own but for its pauses"
    )


def test_a_waiting_container_runs_in_pauses_longer_than_a_switch() -> None:
    node = SimulatedNode({"few": looping(30, 0.001), "many": looping(60, 0.001)})
    node.run(10.0)
    assert node.on_s("few") / 10 * 100 == pytest.approx(30, abs=1)
    assert node.on_s("few") + node.on_s("many") > 7.0, "alone they have 1.4 of each 2.4 ms"


def light(cap: int) -> Program:
    """Kernels of 50 us, 600 us apart."""
    return Program(container(cap=cap, weight=cap or 100), loop=(0.00005, 0.0006))


def test_a_container_that_pauses_longer_than_it_works_does_not_keep_the_gpu() -> None:
    node = SimulatedNode({f"light{number}": light(20) for number in range(5)})
    node.run(10.0)
    each = [node.on_s(name) / 10 * 100 for name in node.programs]
    assert min(each) > 7.0, "alone they have 7.7 % of the GPU: all fit side by side"


def test_a_light_loop_leaves_the_gpu_to_a_neighbour_that_always_has_work() -> None:
    node = SimulatedNode({"light": light(0), "busy": Program(container(cap=100, weight=100), always=True)})
    node.run(10.0)
    assert node.on_s("busy") / 10 > 0.95


def test_a_pause_in_a_time_slice_delays_no_more_urgent_container() -> None:
    scheduler = scheduler_with(
        holder=container(cap=60, weight=60), rival=container(cap=30, weight=30), lc=container(LC)
    )
    scheduler.apply(Work(0.0, "holder"))
    scheduler.apply(Work(0.0, "rival"))
    first = scheduler.decide(0.0)
    holder = next(name for name in ("holder", "rival") if name in first.on)
    rival = "rival" if holder == "holder" else "holder"
    scheduler.apply(Switched(0.0005, rival, False, 0.0005))
    scheduler.apply(Idle(0.001, holder))
    assert scheduler.decide(0.001).on == {holder, "lc"}, "in its pause"
    scheduler.apply(Work(0.0011, "lc"))
    assert scheduler.decide(0.0011).on == {"lc"}


def test_a_pause_is_no_part_of_a_time_slice_if_no_container_waits() -> None:
    scheduler = scheduler_with(holder=container(cap=60, weight=60), rival=container(cap=30, weight=30))
    scheduler.apply(Work(0.0, "holder"))
    scheduler.decide(0.0)
    scheduler.apply(Work(0.0001, "rival"))
    assert scheduler.decide(0.0001).on == {"holder"}
    scheduler.apply(Switched(0.0005, "rival", False, 0.0005))
    scheduler.apply(Idle(0.0009, "rival"))
    scheduler.apply(Idle(0.001, "holder"))
    assert scheduler.decide(0.001).why["holder"] == "idle"


@pytest.mark.parametrize("hung", [False, True])
def test_a_pause_is_kept_for_a_rival_that_waits_for_the_gpu_and_not_for_one_whose_gpu_hangs(hung: bool) -> None:
    scheduler = scheduler_with(holder=container(cap=60, weight=60), rival=container(cap=30, weight=30))
    scheduler.apply(Work(0.0, "holder"))
    assert scheduler.decide(0.0).on == {"holder", "rival"}
    scheduler.apply(Work(0.0001, "rival"))
    assert scheduler.decide(0.0001).on == {"holder"}
    scheduler.apply(Switched(0.0005, "rival", False, 0.0005))
    scheduler.apply(Hung(0.0006, "rival", hung=hung))
    scheduler.apply(Idle(0.001, "holder"))
    assert (scheduler.decide(0.001).why["holder"] == "idle") is hung
