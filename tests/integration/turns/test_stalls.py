"""The arbiter stops for a while and goes on: each container is suspended again, and within its share, in the two seconds that follow.

30 rounds are always run; `make faults` runs 100, or STALLS=... (here TANGRAM_STALL_ROUNDS and TANGRAM_FAULT_SEED).
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.integration.turns.conftest import Node, Program, until

ROUNDS = int(os.environ.get("TANGRAM_STALL_ROUNDS", "6"))
SEED = int(os.environ.get("TANGRAM_FAULT_SEED", "1"))
OVER_S = 2.0
"""The share is compared over so long after a stall."""


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
    turn = node.turn("a")
    assert turn is not None
    assert (turn.mode, turn.trouble) == ("suspend", "")
    assert percent(node, program) <= 12
