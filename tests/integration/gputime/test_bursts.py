"""GPU time above the guarantee: real processes, a real arbiter, and the file `burst` beside the grant."""

from __future__ import annotations

import pytest

from tests.integration.gputime.conftest import GPUS, Node, Program, until
from tests.integration.gputime.test_sharing import shares
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.contract import BURST
from vgpu.api.grant import GrantGpu

GUARANTEED, LIMIT = 30, 100
APPLIES_S = 2.0
"""Within this time an edit applies (docs/concepts/gpu-time.md)."""


def burst(node: Node, name: str, percent: int) -> None:
    """Writes a container's limit, as the device plugin does."""
    folder = node.grants / name
    fresh = folder / ".burst"
    fresh.write_text(burst_to_text(BurstLimits((GrantGpu(GPUS[0], 1024, percent),))))
    fresh.rename(folder / BURST)


def no_burst(node: Node, name: str) -> None:
    (node.grants / name / BURST).unlink()


def run_bursting(node: Node, percent: int = LIMIT) -> Program:
    grant = node.grant("a", core=GUARANTEED)
    burst(node, "a", percent)
    return node.run_in(grant)


def test_alone_it_has_the_whole_gpu_and_is_never_suspended(node):
    one = run_bursting(node)
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 50_000)
    assert shares(node, 1.5, "a") == [100]
    status = node.gpu_time("a")
    assert (status.suspends, status.requested_percent, status.limit_percent) == (0, GUARANTEED, LIMIT)
    assert 0.5 < status.burst_s / status.on_s < 0.8


def test_alone_it_has_no_more_than_its_limit(node):
    one = run_bursting(node, 60)
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 50_000)
    assert shares(node, 2.0, "a") == [pytest.approx(60, abs=3)]


def test_beside_an_idle_neighbour_it_has_the_whole_gpu(node):
    one, other = run_bursting(node), node.run("b", core=70)
    other.do("launch(10_000) or wait()")
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 50_000)
    assert shares(node, 1.5, "a") == [pytest.approx(100, abs=1)]


def test_beside_a_busy_neighbour_with_the_rest_guaranteed_it_has_its_guarantee(node):
    one, other = run_bursting(node), node.run("b", core=70)
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 200_000)
    other.do("work_on(10_000)")
    until(lambda: node.ran_us(other) > 50_000)
    few, many = shares(node, 3.0, "a", "b")
    assert few / (few + many) == pytest.approx(0.3, abs=0.06), "switches cost both of their parts"
    assert many > 50, "less than asked when the machine is busy: each switch waits for a processor"
    assert not node.misuses()


def test_a_neighbour_without_a_burst_never_has_more_than_its_limit(node):
    one, other = run_bursting(node), node.run("b", core=20)
    one.do("work_on(10_000)")
    other.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 50_000 and node.ran_us(other) > 50_000)
    rest, capped = shares(node, 3.0, "a", "b")
    assert capped < 23
    assert rest > 60


def test_an_edit_of_the_burst_applies_while_it_runs(node):
    grant = node.grant("a", core=GUARANTEED)
    one = node.run_in(grant)
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 50_000)
    assert shares(node, 2.0, "a") == [pytest.approx(GUARANTEED, abs=3)]
    burst(node, "a", LIMIT)
    assert until(lambda: node.gpu_time("a").limit_percent == LIMIT, APPLIES_S) < APPLIES_S
    assert shares(node, 1.5, "a") == [pytest.approx(100, abs=3)]
    no_burst(node, "a")
    assert until(lambda: node.gpu_time("a").limit_percent == GUARANTEED, APPLIES_S) < APPLIES_S
    assert shares(node, 2.0, "a") == [pytest.approx(GUARANTEED, abs=6)]


def test_a_file_that_contradicts_the_grant_gives_the_guarantee_alone(node):
    one = run_bursting(node)
    one.do("work_on(10_000)")
    until(lambda: node.gpu_time("a").limit_percent == LIMIT)
    burst(node, "a", GUARANTEED - 10)
    until(lambda: node.gpu_time("a").limit_percent == GUARANTEED, APPLIES_S)
    assert shares(node, 2.0, "a") == [pytest.approx(GUARANTEED, abs=6)]
