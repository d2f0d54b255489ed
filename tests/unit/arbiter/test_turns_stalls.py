"""After a stall of the arbiter every container is suspended again and gets its share, however long the stall and whenever it came."""

from __future__ import annotations

import pytest

from arbiter.pulse import STALL_S
from tests.unit.arbiter.stalls_kit import Program, Simulation, simulation
from tests.unit.arbiter.turns_kit import Driver

SEEDS, ROUNDS = 25, 40
OVER_S = 2.0
KEPT_S = 0.15
"""Three frames: what may be saved up, and owed after a stall."""
WAITS_S = 0.25
"""For the turns of others, at the beginning and in the end."""
FORGIVEN_S = STALL_S + 0.1
"""A stall of so long is noticed whenever it began. Of a shorter one all debt may stay."""


def populate(sim: Simulation) -> None:
    """One to three containers whose shares leave room for switches."""
    left = 85
    for at in range(sim.chance.randint(1, 3)):
        cap = sim.chance.randint(5, 60)
        if cap > left:
            break
        left -= cap
        loops = sim.chance.random() < 0.5
        kernel_s = sim.chance.uniform(0.003, 0.03) if loops else float("inf")
        sim.add(f"c{at}", cap, kernel_s, sim.chance.uniform(0.0002, 0.002), tells=sim.chance.random() < 0.7)
    sim.run(0.5)


def settle(sim: Simulation) -> None:
    """What a stall too short to be forgiven has left is paid."""
    turns = sim.node.turns
    for _ in range(100):
        if all(turns.share.credit_s(name) >= -KEPT_S * turns.share._states[name].cap for name in turns.tenants):
            return
        sim.run(0.2)
    raise AssertionError("a debt is not paid within 20 s")


def compare(sim: Simulation, program: Program, before_s: float, stalled_s: float) -> None:
    had_s = program.ran_s - before_s
    status = sim.node.turns.statuses()[program.tenant.name]
    assert (status.mode, status.trouble) == ("suspend", ""), f"{status.mode} {status.trouble}"
    most_s = program.cap * (OVER_S + KEPT_S) + 0.004
    assert had_s <= most_s, f"{had_s:.4f} s are more than {most_s:.4f}"
    if stalled_s > FORGIVEN_S and program.kernel_s == float("inf"):
        least_s = program.cap * (OVER_S - KEPT_S - WAITS_S) - 0.004
        assert had_s >= least_s, f"{had_s:.4f} s are less than {least_s:.4f}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_within_two_seconds_of_any_stall_everybody_is_within_its_share_by_suspends(
    seed: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    with simulation(monkeypatch, driver, seed) as sim:
        populate(sim)
        for round_ in range(ROUNDS):
            settle(sim)
            sim.run(sim.chance.uniform(0.0, 0.3))
            seconds = sim.chance.uniform(0.1, 10.0) if sim.chance.random() < 0.5 else sim.chance.uniform(0.1, 1.0)
            (sim.stall_in_call if sim.chance.random() < 0.3 else sim.stall)(seconds)
            before = [(program.ran_s, sim.node.status(program.tenant.name).suspends) for program in sim.programs]
            sim.run(OVER_S)
            for program, (ran_s, suspends) in zip(sim.programs, before, strict=True):
                try:
                    compare(sim, program, ran_s, seconds)
                    assert seconds < FORGIVEN_S or sim.node.status(program.tenant.name).suspends > suspends, "runs on"
                except AssertionError as error:
                    about = f"seed {seed}, round {round_}, stalled for {seconds:.3f} s, cap {program.cap}, kernel {program.kernel_s:.4f} s, pause {program.pause_s:.4f} s"
                    raise AssertionError(f"{about}: {error}") from error
