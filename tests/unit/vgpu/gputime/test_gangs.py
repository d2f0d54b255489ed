"""Containers with several GPUs in simulated time: they run on all of their GPUs or on none, get fair parts, and lose little to skew."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.gputime.gang_model import GangNode, Job, busy, requests
from tests.unit.vgpu.gputime.gpu_model import BE, LC, STANDARD, container, scheduler_with
from vgpu.gputime.events import Hung, Switched, Work
from vgpu.gputime.switch_order import DueSwitch, next_switch
from vgpu.gputime.timing import Timing

SKEW_MOST = 0.05
"""Part of the GPU time that kernels spend waiting for those on other GPUs. Specified: the goal of sharing several GPUs."""
SECONDS = 4.0
Jobs = Callable[[], dict[str, Job]]

NEIGHBOURS: Mapping[str, Jobs] = {
    "best-effort": lambda: {"gang": busy(gpus="01"), "a": busy(BE, "0"), "b": busy(BE, "1")},
    "equals": lambda: {"gang": busy(gpus="01"), "a": busy(STANDARD, "0"), "b": busy(STANDARD, "1")},
    "requests": lambda: {"gang": busy(gpus="01"), "lc": requests(LC, "0", 0.01, 0.002), "b": busy(BE, "1")},
    "more requests": lambda: {"gang": busy(gpus="01"), "lc": requests(LC, "0", 0.002, 0.001), "b": busy(BE, "1")},
    "a limit": lambda: {"gang": busy(gpus="01", cap=30), "a": busy(STANDARD, "0", 60), "b": busy(BE, "1")},
    "lowest class": lambda: {
        "gang": busy(BE, gpus="01"),
        "lc": requests(LC, "0", 0.02, 0.004),
        "s": requests(STANDARD, "1", 0.03, 0.01),
    },
    "four": lambda: {
        "gang": busy(gpus="0123"),
        "lc": requests(LC, "0", 0.01, 0.002),
        "other": requests(LC, "2", 0.05, 0.005),
        **{gpu: busy(BE, gpu) for gpu in "0123"},
    },
    "four equals": lambda: {"gang": busy(gpus="0123"), **{gpu: busy(STANDARD, gpu) for gpu in "0123"}},
    "two gangs": lambda: {"gang": busy(gpus="12"), "x": busy(gpus="01"), "y": busy(gpus="23"), "b": busy(BE, "0")},
    "a ring": lambda: {
        **{f"gang {gpu}": busy(gpus="0123"[gpu] + "1230"[gpu]) for gpu in range(4)},
        "lc": requests(LC, "1", 0.02, 0.005),
        "b": busy(BE, "3"),
    },
}


def gangs_of(node: GangNode) -> list[Job]:
    return [job for job in node.jobs.values() if len(job.container.gpus) > 1]


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_at_most_a_twentieth_of_the_gpu_time_is_lost_to_skew(neighbours: str) -> None:
    """Of all GPU time, and of that which each gang takes, unless it is suspended more than a hundred times a second: then each run lasts two milliseconds."""
    node = GangNode(NEIGHBOURS[neighbours](), seed=1)
    node.run(SECONDS)
    assert node.skew_s <= SKEW_MOST * node.gpu_time_s
    for gang in gangs_of(node):
        assert gang.ran_s > 0
        assert neighbours == "more requests" or gang.skew_s <= SKEW_MOST * (
            gang.skew_s + gang.ran_s * len(gang.container.gpus)
        )


@pytest.mark.parametrize("neighbours", ["requests", "more requests", "four"])
def test_gpus_that_resume_a_gang_each_by_itself_lose_twice_as_much(neighbours: str) -> None:
    lost_s = []
    for together in (True, False):
        node = GangNode(NEIGHBOURS[neighbours](), seed=1, together=together)
        node.run(SECONDS)
        lost_s.append(node.skew_s)
    assert lost_s[1] > 2 * lost_s[0] > 0


def test_a_gang_and_its_neighbours_of_equal_rank_get_equal_parts() -> None:
    node = GangNode(NEIGHBOURS["four equals"]())
    node.run(SECONDS)
    assert all(job.ran_s == pytest.approx(SECONDS / 2, rel=0.05) for job in node.jobs.values())


def test_gangs_whose_gpus_overlap_in_a_ring_get_equal_parts() -> None:
    node = GangNode({f"{gpu}": busy(gpus="0123"[gpu] + "1230"[gpu]) for gpu in range(4)})
    node.run(SECONDS)
    assert all(job.ran_s == pytest.approx(SECONDS / 2, rel=0.05) for job in node.jobs.values())


def test_the_whole_gang_yields_to_a_request_on_one_gpu_and_another_container_gets_its_other_gpu() -> None:
    node = GangNode({"gang": busy(gpus="01"), "lc": busy(LC, "0"), "b": busy(BE, "1")})
    node.run(10.0)
    slices = 10 * Timing().starve_slice_s / Timing().starve_after_s
    assert node.jobs["gang"].ran_s == pytest.approx(slices, rel=0.2), (
        "the slices against starvation, on both GPUs at once"
    )
    assert node.jobs["b"].ran_s > 9.5


def test_a_gang_that_ends_in_the_middle_of_a_switch_holds_up_nobody() -> None:
    node = GangNode(NEIGHBOURS["two gangs"]())
    node.run(1.0)
    while not any(one.name == "gang" for one in node._switches.values()):
        node.run(node.now_s + 0.0003)
    node.end("gang")
    before = {name: job.ran_s for name, job in node.jobs.items()}
    node.run(node.now_s + 1)
    assert node.jobs["x"].ran_s - before["x"] > 0.95
    assert node.jobs["y"].ran_s - before["y"] > 0.95


@st.composite
def many(draw: st.DrawFn) -> dict[str, Job]:
    """Any containers on up to four GPUs."""
    jobs = {}
    for number in range(draw(st.integers(1, 6))):
        gpus = "".join(sorted(draw(st.sets(st.sampled_from("0123"), min_size=1))))
        service_class = draw(st.sampled_from([LC, STANDARD, BE]))
        cap = draw(st.sampled_from([0, 0, 20, 50]))
        one = busy(service_class, gpus, cap)
        if draw(st.booleans()):
            one.period_s, one.work_s = draw(st.floats(0.001, 0.1)), draw(st.floats(0.0005, 0.02))
        jobs[f"job {number}"] = one
    return jobs


@settings(max_examples=examples(12), deadline=None)
@given(many(), st.integers(0, 100))
def test_whatever_shares_the_gpus_nobody_waits_for_ever_and_no_gpu_for_another_in_a_circle(
    jobs: dict[str, Job], seed: int
) -> None:
    """Each with work gets at least a slice against starvation. Those with several GPUs wait for each of them to be free."""
    node = GangNode(jobs, seed)
    node.run(2.0)
    half_way = {name: job.ran_s for name, job in jobs.items()}
    node.run(2.0 + 2 * len(jobs))
    for name, job in jobs.items():
        assert job.ran_s > half_way[name], f"{name} does not advance"


due_switches = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.sets(st.sampled_from("0123"), min_size=1), st.booleans(), st.booleans()),
)


@given(due_switches)
def test_while_any_switch_is_due_some_gpu_makes_one_and_no_gang_is_resumed_beside_a_due_suspend(
    all_due: dict[str, tuple[set[str], bool, bool]],
) -> None:
    def due(gpu: str) -> list[DueSwitch]:
        return [
            DueSwitch(name, on, frozenset(gpus), at_once)
            for name, (gpus, on, at_once) in all_due.items()
            if gpu in gpus
        ]

    made = {gpu: next_switch(gpu, due) for gpu in "0123"}
    assert any(made.values()) is bool(all_due)
    for gpu, one in made.items():
        if any(not other.on for other in due(gpu)):
            assert one is not None
            assert not one.on, "suspends come first, and wait for nothing"
        elif one is not None and not one.at_once:
            assert all(other.on for its in one.gpus for other in due(its))


def test_a_gang_whose_gpu_does_not_answer_leaves_its_other_gpus_to_others_and_has_no_claim_afterwards() -> None:
    scheduler = scheduler_with(gang=container(gpus="01"), a=container(gpus="0"))
    scheduler.apply(Switched(0.0, "gang", on=False, took_s=0.0006))
    for name in ("gang", "a"):
        scheduler.apply(Work(0.0, name))
    scheduler.apply(Hung(0.0, "gang", hung=True))
    for at_s in (0.0, 0.5, 5.0, 50.0):
        decision = scheduler.decide(at_s)
        assert (decision.on, decision.why["gang"]) == ({"a"}, "hung")
    assert scheduler.usage("gang").off_s == 0.0, "it waits for the GPU, not for GPU time"
    scheduler.apply(Hung(50.0, "gang", hung=False))
    on_s = {"gang": 0.0, "a": 0.0}
    for step in range(1, 1001):
        at_s = 50.0 + step / 100
        on = scheduler.decide(at_s).on
        for name in on_s:
            on_s[name] += 0.01 if name in on else 0
            scheduler.apply(Switched(at_s, name, on=name in on, took_s=0.0006))
    assert on_s["gang"] == pytest.approx(5.0, abs=0.3)


def test_a_gang_that_runs_goes_on_while_a_gpu_does_not_answer() -> None:
    scheduler = scheduler_with(gang=container(gpus="01"))
    scheduler.apply(Work(0.0, "gang"))
    scheduler.apply(Hung(0.0, "gang", hung=True))
    assert scheduler.decide(0.0).on == {"gang"}


def test_a_gang_whose_gpus_hang_again_and_again_still_gets_its_slices_against_starvation() -> None:
    scheduler = scheduler_with(gang=container(BE, gpus="01"), lc=container(LC, gpus="0"))
    scheduler.apply(Switched(0.0, "gang", on=False, took_s=0.0006))
    for name in ("gang", "lc"):
        scheduler.apply(Work(0.0, name))
    assert scheduler.decide(0.0).on == {"lc"}
    for step in range(1, 5):
        scheduler.apply(Hung(0.3 * step, "gang", hung=True))
        assert scheduler.decide(0.3 * step).why["gang"] == "hung"
        scheduler.apply(Hung(0.3 * step + 0.1, "gang", hung=False))
    assert scheduler.decide(1.31).on == {"gang"}
