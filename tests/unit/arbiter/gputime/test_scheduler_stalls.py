"""After a stall of the arbiter every container is suspended again and gets its share, however long the stall and whenever it came."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from arbiter.enforcement import time_facts
from arbiter.gputime.obstacles import TRY_AGAIN_S
from arbiter.stalls import STALL_S
from tests.unit.arbiter.gputime_kit import Driver
from tests.unit.arbiter.stalls_kit import Program, Simulation, simulation
from vgpu.api.enforcement import STALL_SHOWN_S, ContainerFacts, ProcessFacts, Reason, enforcement
from vgpu.gputime.suspend_effect import FIRST_S, TIMES
from vgpu.protocol.wire import ABOUT_TO, ActivityKind

SEEDS, ROUNDS = 25, 40
OVER_S = 2.0
KEPT_S = 0.15
"""Three frames: what may be saved up, and owed after a stall."""
WAITS_S = 0.25
"""For the time slices of others, at the beginning and in the end."""
FORGIVEN_S = STALL_S + 0.1
"""A stall of so long is noticed whenever it began. Of a shorter one all debt may stay."""


def populate(sim: Simulation) -> None:
    """One to three containers whose shares leave time for switches."""
    left = 85
    for at in range(sim.chance.randint(1, 3)):
        cap = sim.chance.randint(5, 60)
        if cap > left:
            break
        left -= cap
        loops = sim.chance.random() < 0.5
        kernel_s = sim.chance.uniform(0.003, 0.03) if loops else inf
        sim.add(f"c{at}", cap, kernel_s, sim.chance.uniform(0.0002, 0.002), reports=sim.chance.random() < 0.7)
    sim.run(0.5)


def settle(sim: Simulation) -> None:
    """What a stall too short to be forgiven has left is paid."""
    scheduler = sim.node.scheduler
    for _ in range(100):
        if all(
            scheduler.policy.credit_s(name) >= -KEPT_S * scheduler.policy._states[name].cap
            for name in scheduler.containers
        ):
            return
        sim.run(0.2)
    raise AssertionError("a debt is not paid within 20 s")


def compare(sim: Simulation, program: Program, before_s: float, stalled_s: float) -> None:
    had_s = program.ran_s - before_s
    status = sim.node.scheduler.statuses()[program.container.name]
    assert (status.mode, status.trouble) == ("suspend", ""), f"{status.mode} {status.trouble}"
    most_s = program.cap * (OVER_S + KEPT_S) + 0.004
    assert had_s <= most_s, f"{had_s:.4f} s are more than {most_s:.4f}"
    if stalled_s > FORGIVEN_S and program.kernel_s == inf:
        least_s = program.cap * (OVER_S - KEPT_S - WAITS_S) - 0.004
        assert had_s >= least_s, f"{had_s:.4f} s are less than {least_s:.4f}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_within_two_seconds_of_any_stall_every_container_is_within_its_share_by_suspends(
    seed: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    with simulation(monkeypatch, driver, seed) as sim:
        populate(sim)
        for round_ in range(ROUNDS):
            settle(sim)
            sim.run(sim.chance.uniform(0.0, 0.3))
            seconds = sim.chance.uniform(0.1, 10.0) if sim.chance.random() < 0.5 else sim.chance.uniform(0.1, 1.0)
            (sim.stall_in_call if sim.chance.random() < 0.3 else sim.stall)(seconds)
            before = [(program.ran_s, sim.node.status(program.container.name).suspends) for program in sim.programs]
            sim.run(OVER_S)
            for program, (ran_s, suspends) in zip(sim.programs, before, strict=True):
                try:
                    compare(sim, program, ran_s, seconds)
                    assert seconds < FORGIVEN_S or sim.node.status(program.container.name).suspends > suspends, (
                        "runs on"
                    )
                except AssertionError as error:
                    about = f"seed {seed}, round {round_}, stalled for {seconds:.3f} s, cap {program.cap}, kernel {program.kernel_s:.4f} s, pause {program.pause_s:.4f} s"
                    raise AssertionError(f"{about}: {error}") from error


@pytest.fixture
def sim(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    with simulation(monkeypatch, driver, 1) as made:
        yield made


def mode(sim: Simulation) -> tuple[str, str]:
    status = sim.node.status("a")
    return status.mode, status.trouble


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("kernel_s", [0.003, inf])
def test_a_container_that_resumed_itself_in_a_stall_is_suspended_again(
    sim: Simulation, kernel_s: float, *, reports: bool
) -> None:
    program = sim.add("a", 10, kernel_s, 0.0005, reports=reports)
    sim.run(1.0)
    while not sim.driver.off(program.container):
        sim.run(0.001)
    sim.stall(2.2)
    assert program.resumes
    assert not sim.driver.off(program.container)
    sim.run(0.1)
    assert sim.driver.off(program.container)
    sim.run(3.0)
    assert mode(sim) == ("suspend", "")
    assert bool(sim.node.status("a").resumes) is reports


def test_a_container_that_resumes_itself_though_the_arbiter_lives_has_its_launches_delayed_and_is_tried_later(
    sim: Simulation,
) -> None:
    program = sim.add("a", 10, inf, 0.0, reports=True)
    sim.run(1.0)
    for _ in range(TIMES):
        program.sends(ActivityKind.RESUMED, ABOUT_TO)
        program.sends(ActivityKind.RESUMED)
        sim.run(0.2)
    assert mode(sim) == ("gate", "")
    sim.run(FIRST_S + 0.3)
    assert mode(sim) == ("gate", ""), "it is being tried"
    sim.run(2.0)
    assert mode(sim) == ("suspend", ""), "suspends stopped its work for a second, all together"


def test_a_driver_that_refused_once_is_called_again_after_ten_seconds(sim: Simulation) -> None:
    program = sim.add("a", 10, inf, 0.0, reports=True)
    sim.driver.refuse(program.container, 0x21)
    sim.run(2.0)
    assert mode(sim)[0] == "gate"
    sim.driver._refused.clear()
    sim.run(TRY_AGAIN_S - 3.0)
    assert mode(sim)[0] == "gate"
    sim.run(2.0)
    assert mode(sim) == ("suspend", "")
    before_s = program.ran_s
    sim.run(2.0)
    assert program.ran_s - before_s <= 0.1 * (2.0 + KEPT_S) + 0.004


def test_a_stall_is_reported_for_five_seconds_after_its_end(sim: Simulation) -> None:
    sim.add("a", 10, inf, 0.0, reports=True)
    sim.run(1.0)

    def found() -> set[Reason]:
        facts = time_facts(sim.node.scheduler)["a"]
        known = ContainerFacts(core_percent=10, stall_ended_s=facts.stall_ended_s, processes=(ProcessFacts(7),))
        return {finding.reason for finding in enforcement(known).findings}

    assert found() == set()
    sim.stall(0.6)
    sim.run(STALL_SHOWN_S - 0.1)
    assert found() == {Reason.ARBITER_STALLED}
    sim.run(0.2)
    assert found() == set()
    assert sim.node.scheduler.stalls.count == 1
    assert sim.node.scheduler.stalls.seconds == pytest.approx(0.6, abs=0.06)
