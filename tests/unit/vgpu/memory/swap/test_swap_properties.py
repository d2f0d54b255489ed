"""Whatever happens on a node: what must always be true is true, everybody who can run runs, and a trace leads to the same actions.

`SimulatedNode` itself checks after every decision that no GPU has more memory than it has, that only excess moves, that no container runs with
memory away or is paused within its guarantee, that excess has room in the host pool, and that every request is answered in time.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.vgpu.memory.swap.node_model import (
    BE,
    GIB,
    LC,
    SLOWER,
    SPEED,
    STANDARD,
    Program,
    SimulatedNode,
    contract,
)
from vgpu.api.errors import BadDocument
from vgpu.memory.swap.actions import CancelSwapOut, Grant, OverLimit, Refuse, SwapIn, SwapOut
from vgpu.memory.swap.events import Able
from vgpu.memory.swap.settings import SwapSettings
from vgpu.memory.swap.trace import from_lines, replay, to_lines

NAMES = ("a", "b", "c", "d")
CAPACITY_GIB = 16
WHAT = ["request"] * 6 + ["work"] * 12 + ["idle"] * 6 + ["resident", "free", "announce", "withdraw"] * 2 + ["fail", "stop", "pool", "leave"]  # fmt: skip
Happening = tuple[str, str, int, float]


def crowd(random_: random.Random) -> dict[str, Program]:
    """Four containers on two GPUs that have no room for their working sets together."""
    contracts = [
        contract(
            random_.choice([0, 1, 2, 4]), random_.choice([0, 16, 16, 16, 16]), random_.choice([LC, STANDARD, BE]),
            random_.choice([1.0, 3.0]), random_.choice(["0", "0", "0", "1", "01"]), random_.choice([1, 2]),
        )
        for _ in NAMES
    ]  # fmt: skip
    return {
        name: Program(one, min(random_.choice([8, 10, 12]), max(limit for _, limit in one.gpus.values()) / GIB))
        for name, one in zip(NAMES, contracts, strict=True)
    }


def history(random_: random.Random, most: int, without: tuple[str, ...] = ()) -> list[Happening]:
    """What happens, to which container, GiB of it, and seconds until the next."""
    what = [one for one in WHAT if one not in without]
    begin = [("work", name, 1, 0.1) for name in NAMES]
    return begin + [
        (
            random_.choice(what),
            random_.choice(NAMES),
            random_.choice([1, 4, 10]),
            random_.choice([0.02, 0.1, 0.6, 4, 12]),
        )
        for _ in range(random_.randrange(most))
    ]


def happen(node: SimulatedNode, what: str, name: str, gib: int) -> None:
    """One event of the list. It changes nothing where it cannot happen."""
    program, number = node.programs.get(name), gib
    if what == "pool":
        node.set_ready(not node.ready)
    if program is None:
        return
    gpu = min(program.memory) if number < 10 else max(program.memory)
    match what:
        case "request":
            node.request(name, gpu, gib * GIB, wait_s=gib * 1.0)
        case "resident":
            asked = sum(one.bytes for one in program.asked.values() if one.gpu == gpu and not one.elastic)
            one, guarantee = program.memory[gpu], program.contract.gpus[gpu][0]
            if one.resident + asked + gib * GIB <= guarantee:
                node.request(name, gpu, gib * GIB, elastic=False, wait_s=1.0)
        case "free":
            node.free(name, gpu, gib * GIB)
        case "work" if not program.working:
            node.work(name)
        case "idle" if program.working:
            node.idle(name)
        case "announce":
            node.announce(name, number / 4)
        case "fail":
            node.fail(name)
        case "stop":
            program.stopped = not program.stopped
        case "leave":
            node.leave(name)
        case "withdraw" if program.asked:
            node.withdraw(name, min(program.asked))


def play(seed: int, pool_gib: int = 512, most: int = 40) -> SimulatedNode:
    """A node after a history that the seed decides. Lists drawn by hypothesis are mostly too short for anything to be swapped."""
    random_ = random.Random(seed)
    node = SimulatedNode(crowd(random_), CAPACITY_GIB, pool_gib, SwapSettings(starve_after_s=60), gpus="01")
    for what, name, gib, pause_s in history(random_, most):
        happen(node, what, name, gib)
        node.run_for(pause_s)
    return node


def settle(node: SimulatedNode) -> None:
    """Everything that was broken works again."""
    node.set_ready(True)
    for name, program in node.programs.items():
        program.stopped = False
        node.report(Able(node.now_s, name))
    node.run_for(6)


seeds = st.integers(0, 10**9)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([16, 512]))
def test_what_must_always_be_true_is_true_and_in_the_end_all_guarantees_are_served(seed: int, pool_gib: int) -> None:
    node = play(seed, pool_gib)
    settle(node)
    node.run_for(12)
    for name, program in node.programs.items():
        for asked in program.asked.values():
            within = program.memory[asked.gpu].used + asked.bytes <= program.contract.gpus[asked.gpu][0]
            assert not within, f"{asked} of {name} waits after all others have given way"


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_every_container_that_fits_and_wants_to_run_runs_within_the_bound(seed: int) -> None:
    node = play(seed, most=25)
    settle(node)
    for name in node.programs:
        happen(node, "work", name, 1)
    began_s = node.now_s
    longest_s = (
        SLOWER * (2 * node.settings.overhead_s + (CAPACITY_GIB * GIB / SPEED)) * (1 + 1 / node.settings.swap_part)
    )
    node.run_for(2 * node.settings.starve_after_s + 4 * longest_s)
    for name, program in node.programs.items():
        used = {gpu: one.used for gpu, one in program.memory.items()}
        others = [other for other in node.programs.values() if other is not program]
        fits = all(
            used[gpu] + sum(min(o.memory[gpu].used, o.contract.gpus[gpu][0]) for o in others if gpu in o.memory)
            <= node.capacity[gpu]
            for gpu in used
        )
        ran = program.spans and program.spans[-1][1] > began_s
        assert ran or not fits, f"{name} did not run"


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_where_all_give_way_no_guarantee_waits_longer_than_their_copies_take(seed: int) -> None:
    random_ = random.Random(seed)
    node = SimulatedNode(crowd(random_), CAPACITY_GIB, gpus="01")
    node.guarantees_wait_most_s = 0.5 + CAPACITY_GIB * GIB / SPEED
    for what, name, gib, pause_s in history(random_, 40, without=("stop", "pool", "fail")):
        happen(node, what, name, gib)
        node.run_for(pause_s)
    assert not any(isinstance(action, OverLimit) for _, action in node.log)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_a_recorded_trace_leads_to_the_same_actions(seed: int) -> None:
    node = play(seed)
    lines = to_lines(node.trace)
    assert list(replay(from_lines(lines), node.settings)) == node.log


def test_the_histories_swap() -> None:
    kinds = Counter(type(action) for seed in range(20) for _, action in play(seed, most=80).log)
    assert min(kinds[kind] for kind in (CancelSwapOut, Grant, Refuse)) >= 1
    assert min(kinds[SwapOut], kinds[SwapIn]) >= 15, kinds


def test_a_trace_names_the_line_that_is_wrong() -> None:
    node = SimulatedNode({"a": Program(contract(1))})
    lines = to_lines(node.trace)
    assert list(from_lines(lines)) == node.trace
    with pytest.raises(BadDocument, match="trace line 2"):
        list(from_lines(lines.splitlines()[0] + b"\n{}"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(8, 20), st.sampled_from([1.0, 3.0]), st.sampled_from(["0", "01"])), min_size=2, max_size=4
    )
)
def test_equals_that_always_work_change_places_once_a_quantum_at_most_and_lose_little(
    offered: list[tuple[int, float, str]],
) -> None:
    programs = {
        f"t{number}": Program(contract(0.5, 24, weight=weight, gpus=gpus), gib, always=True, wait_s=3600)
        for number, (gib, weight, gpus) in enumerate(offered)
    }
    node = SimulatedNode(programs, settings=SwapSettings(starve_after_s=1e6), gpus="01")
    node.run(200)
    for name, program in programs.items():
        assert not program.asked
        begins = [begin for begin, _ in program.spans if begin > 60]
        for begin, end in program.spans:
            excess_gib = program.memory[min(program.memory)].used / GIB - 0.5
            quantum_s = (node.settings.overhead_s + excess_gib * GIB / SPEED) / node.settings.swap_part
            assert begin < 60 or end > 199 or end - begin >= quantum_s - 0.1, f"{name} ran from {begin} to {end} s"
        assert begins or program.spans[-1][1] > 199
