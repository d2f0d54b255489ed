"""The arbiter stops for a while and goes on: each container is suspended again, and within its share, in the two seconds that follow.

Six random stalls are always made; `make faults` makes 100, or STALLS=... in the order of SEED=... (here TANGRAM_STALL_ROUNDS and
TANGRAM_FAULT_SEED), and prints what the containers got.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.integration.gputime.conftest import Node, Program, until

ROUNDS = int(os.environ.get("TANGRAM_STALL_ROUNDS", "6"))
SEED = int(os.environ.get("TANGRAM_FAULT_SEED", "1"))
OVER_S = 2.0
"""The share is compared over so long after a stall."""
KEPT_S = 0.15
"""Three frames: what may be saved up."""
LATE_S = 0.12
"""On a busy machine the arbiter's threads, and this test, come late."""


def stall(node: Node, seconds: float) -> None:
    node.arbiter.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    node.arbiter.send_signal(signal.SIGCONT)


def percent(node: Node, program: Program, seconds: float = OVER_S) -> float:
    """Of the GPU's time that a program has from now on."""
    began, before = time.monotonic(), node.ran_us(program)
    time.sleep(seconds)
    return (node.ran_us(program) - before) / (time.monotonic() - began) / 1e4


def test_a_container_that_was_on_during_a_stall_does_not_pay_for_it(node: Node):
    program = node.run("a", core=10)
    program.do("work_on(2000)")
    until(lambda: node.held(program))
    until(lambda: not node.held(program))
    stall(node, 2.2)
    assert 5 <= percent(node, program) <= 12


@pytest.mark.parametrize("seconds", [0.8, 2.2])
def test_a_container_that_resumed_itself_during_a_stall_is_suspended_again(node: Node, seconds: float):
    program = node.run("a", core=10)
    program.start("part_of_time(2000, 8)")
    time.sleep(1)
    until(lambda: node.held(program))
    stall(node, seconds)
    time.sleep(0.5)
    gpu_time = node.gpu_time("a")
    assert gpu_time is not None
    assert (gpu_time.mode, gpu_time.trouble) == ("suspend", "")
    assert percent(node, program) <= 12


def ran_s(node: Node, programs: dict[str, tuple[Program, int]]) -> dict[str, float]:
    seen = node._seen()
    return {name: seen[program.process.pid]["ran_us"] / 1e6 for name, (program, _) in programs.items()}


@pytest.mark.timeout(120 + 15 * ROUNDS)
def test_after_any_stall_every_container_is_within_its_share_by_suspends(node: Node):
    """Of one that always has work, one that waits for each kernel, and one whose kernels are longer than its time."""
    chance = random.Random(SEED)
    programs = {name: (node.run(name, core=core), core) for name, core in (("always", 10), ("loop", 25), ("long", 30))}
    programs["always"][0].do("work_on(2000)")
    programs["loop"][0].start(f"part_of_time(3000, {ROUNDS * 15 + 100})")
    programs["long"][0].do("work_on(40_000)")
    time.sleep(1)
    parts: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(ROUNDS):
        time.sleep(chance.random() * 0.3)
        seconds = 0.1 * 100 ** chance.random()
        stall(node, seconds)
        began, before = time.monotonic(), ran_s(node, programs)
        time.sleep(OVER_S)
        passed, after = time.monotonic() - began, ran_s(node, programs)
        for name, (_, core) in programs.items():
            had_s, most_s = after[name] - before[name], core / 100 * (passed + KEPT_S) + LATE_S
            parts[name].append(had_s / passed / core * 100)
            gpu_time = node.gpu_time(name)
            about = (
                f"seed {SEED}, round {round_}, stalled for {seconds:.2f} s: {name} had {had_s:.3f} s of {most_s:.3f}"
            )
            assert gpu_time is not None, about
            assert (gpu_time.mode, gpu_time.trouble) == ("suspend", ""), about
            assert had_s <= most_s, about
    for name, found in parts.items():
        print(f"{name}: {min(found):.2f} to {max(found):.2f} of its share, {sum(found) / len(found):.3f} on average")
