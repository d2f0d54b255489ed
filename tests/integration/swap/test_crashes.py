"""Processes that are killed while memory moves: what is away comes back whole, whoever ends and when.

`TANGRAM_SWAP_ROUNDS=1000` runs so many rounds by hand, `TANGRAM_SWAP_SEED` others.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.swap.conftest import BurstNode, BurstProgram, until

ROUNDS = int(os.environ.get("TANGRAM_SWAP_ROUNDS", "6"))
SEED = int(os.environ.get("TANGRAM_SWAP_SEED", "1"))
QUICK = Path(__file__).with_name("quick_arbiter.py")
BLOCK_MIB = 40
CLASSES = ("latency-critical", "standard", "best-effort")


@pytest.fixture
def small() -> Iterator[BurstNode]:
    """A GPU for two of three containers."""
    made = BurstNode(memory_mib=256, pool_mib=512, arbiter=[str(QUICK)])
    yield made
    try:
        print(made.report())
    finally:
        made.close()


def start(node: BurstNode, number: int, name: str) -> BurstProgram:
    program = node.run(name, 32, 200, CLASSES[number], wait_s=600)
    assert program.do(f"prepare({BLOCK_MIB}, {SEED * 7919 + number})") == 0
    return program


def three(node: BurstNode) -> list[BurstProgram]:
    return [start(node, number, f"c{number}") for number in range(3)]


def all_is_well(node: BurstNode, programs: list[BurstProgram]) -> None:
    """Every cell is right, and when the memory is freed nothing is left anywhere."""
    for program in programs:
        assert program.do("wrong()") == 0, program.name
        program.do("free_all()")
    until(lambda: not node.records())
    until(lambda: not node.descriptors())
    assert node.misuses() == ""


def test_containers_take_turns_with_work_in_flight(small: BurstNode) -> None:
    programs = three(small)
    for _ in range(ROUNDS):
        for program in programs:
            assert program.do("mix(0)") >= 1
    assert small.swaps_out() >= ROUNDS
    all_is_well(small, programs)
    print(f"{small.swaps_out()} swaps out")


def kill(node: BurstNode, programs: list[BurstProgram], what: str, number: int, serial: int) -> None:
    if what == "arbiter":
        node.kill(node.arbiter)
        node.start_arbiter()
    elif what == "copier":
        node.kill(node.copier)
        node.start_copier()
    else:
        programs[number].end()
        node.programs.remove(programs[number])
        programs[number] = start(node, number, f"c{number}-{serial}")


def test_anyone_is_killed_at_any_moment(small: BurstNode) -> None:
    random_ = random.Random(SEED)
    programs = three(small)
    for serial in range(ROUNDS):
        what = random_.choice(("arbiter", "copier", "container"))
        number = random_.randrange(3)
        live = [one for at, one in enumerate(programs) if what != "container" or at != number]
        for one in programs:
            one.send("mix(0.5)")
        threading.Event().wait(random_.random() * 1.5)  # a moment of any stage: no event says which
        kill(small, programs, what, number, serial)
        for one in live:
            assert one.answer(f"{what} was killed in round {serial}") >= 1, (serial, what)
    all_is_well(small, programs)


def test_a_stopped_arbiter_leaves_what_is_away_alone(small: BurstNode) -> None:
    first, second = start(small, 1, "first"), start(small, 1, "second")
    third = start(small, 1, "third")
    assert small.swaps_out() >= 1
    swapped = next(one for one in (first, second) if small.away_mib(one.name))
    small.arbiter.send_signal(signal.SIGSTOP)
    swapped.send("mix(0)")
    threading.Event().wait(1.5)  # longer than the heartbeat may stop
    assert small.away_mib(swapped.name)
    small.arbiter.send_signal(signal.SIGCONT)
    assert swapped.answer() >= 1
    all_is_well(small, [first, second, third])
