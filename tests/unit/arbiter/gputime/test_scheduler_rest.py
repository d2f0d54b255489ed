"""The threads of GPUs whose containers all run wake up once a second, and five times as often while one is suspended and looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from arbiter.gputime.suspend_thread import REST_S
from arbiter.gputime.timer import now_s
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Driver, GpuTimeNode
from vgpu.protocol import wire

STALE_S = 0.6
"""How long a library whose page shows a suspend waits for the next heartbeat."""


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    made = GpuTimeNode()
    yield made
    made.close()
    assert driver.owed() == 0, "every container runs after the end"


def beat(node: GpuTimeNode, name: str) -> int:
    return node.pages[name]._numbers[wire.GPU_TIME_AT // 8]


def beats(node: GpuTimeNode, name: str, seconds: float) -> list[float]:
    """The moments at which a container's page was seen to change its beat."""
    seen, until_s, last = [now_s()], now_s() + seconds, beat(node, name)
    while now_s() < until_s:
        if beat(node, name) != last:
            last = beat(node, name)
            seen.append(now_s())
        time.sleep(0.005)
    return [*seen, until_s]


def longest_s(moments: list[float]) -> float:
    return max(after - before for before, after in pairwise(moments))


def test_a_thread_rests_while_no_container_is_suspended_and_wakes_when_due(node: GpuTimeNode):
    node.container("a").works()
    wait_for(lambda: node.status("a").on)
    time.sleep(2 * REST_S)  # what it did at the start is over
    moments = beats(node, "a", 4 * REST_S)
    assert 3 <= len(moments) - 2 <= 5
    assert longest_s(moments) < REST_S + 0.5


def test_a_container_suspended_after_a_rest_sees_a_heartbeat_at_once_and_then_in_time(
    node: GpuTimeNode, driver: Driver
):
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    wait_for(lambda: node.status("be").on)
    for _ in range(3):
        time.sleep(1.5 * REST_S)
        before = beat(node, "be")
        urgent.works()
        wait_for(lambda: driver.off(background))
        wait_for(lambda before=before: beat(node, "be") != before, STALE_S / 2)
        assert longest_s(beats(node, "be", 2.0)) < STALE_S
        urgent.idles()
        wait_for(lambda: not driver.off(background))


def test_one_on_two_gpus_sees_the_beats_also_while_only_one_of_them_has_something_to_do(
    node: GpuTimeNode, driver: Driver
):
    background, urgent = (
        node.container("be", "best-effort", gpus=(A, B)),
        node.container("lc", "latency-critical", gpus=(B,)),
    )
    background.reports_channels(gpu=1, client=background.client + 5000)
    background.works()
    wait_for(lambda: node.status("be").on)
    time.sleep(1.5 * REST_S)
    before = beat(node, "be")
    urgent.works()
    wait_for(lambda: not node.status("be").on)
    wait_for(lambda: beat(node, "be") != before, STALE_S / 2)
    assert longest_s(beats(node, "be", 2.0)) < STALE_S
