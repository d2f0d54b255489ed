"""Launch gating: the GPU time of a container that may not be suspended under its core limit, and its waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.integration.gputime.conftest import GPUS, Node, Program, until
from vgpu.gputime.trial_verdict import ModelVerdict, TrialOutcome, TrialVerdict


@pytest.fixture
def gating(node: Node) -> Iterator[Node]:
    """The verdict of this boot's trial: the driver does not suspend."""
    node.has_tried(ModelVerdict("NVIDIA H200", GPUS, TrialVerdict(TrialOutcome.HUNG, "set by this test")))
    yield node
    assert node.misuses() == ""


def share(node: Node, program: Program, seconds: float) -> float:
    """Percent of the time that its kernels ran."""
    began, ran = time.monotonic(), node.ran_us(program)
    time.sleep(seconds)
    return (node.ran_us(program) - ran) / (time.monotonic() - began) / 1e4


@pytest.mark.parametrize("core", [20, 60])
def test_a_gated_container_has_its_core_limit_of_short_kernels(gating: Node, core: int) -> None:
    program = gating.run("be", core=core)
    program.do("work_on(5000)")
    until(lambda: gating.gpu_time("be").capped_s > 0)
    had = share(gating, program, 3)
    assert core - 8 < had < core + 8
    gpu_time = gating.gpu_time("be")
    assert (gpu_time.mode, gpu_time.suspends) == ("gate", 0)


def test_a_container_whose_channels_are_not_known_has_its_core_limit_too(node: Node) -> None:
    """As a client of MPS, which has none."""
    program = node.run_in(node.grant("be", core=20), channels=False)
    program.do("part_of_time(5000, 4)")
    assert node.gpu_time("be").mode == "gate"
    assert program.do("part_of_time(5000, 4)") < 28


def test_a_launch_that_nothing_waits_for_stays_at_the_gate_for_as_long_as_it_takes(gating: Node) -> None:
    """Kernels of a second at 20 %: four seconds between two."""
    program = gating.run("be", core=20)
    program.do("work_on(1_000_000)")
    until(lambda: gating.ran_us(program) >= 2_000_000, 20)
    assert share(gating, program, 10) < 35


def test_a_launch_does_not_wait_for_ever_behind_work_that_may_wait_for_it(gating: Node) -> None:
    """A stream of long kernels is on the GPU all the time, so the process is never without work there."""
    program = gating.run("be", core=10)
    program.do("launch(30_000_000, stream())")
    until(lambda: gating.gpu_time("be").working)
    until(lambda: gating.gpu_time("be").credit_s < 0)
    waited_s = program.do("seconds_of(1000)")
    assert 5 < waited_s < 15


def test_the_gate_of_an_arbiter_that_is_gone_is_open(gating: Node) -> None:
    program = gating.run("be", core=5)
    program.do("work_on(5000)")
    until(lambda: gating.gpu_time("be").capped_s > 0.2)
    gating.arbiter.send_signal(signal.SIGSTOP)
    ran = gating.ran_us(program)
    until(lambda: gating.ran_us(program) > ran + 1_000_000, 5)
