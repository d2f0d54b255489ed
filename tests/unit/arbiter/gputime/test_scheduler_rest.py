"""The threads of GPUs whose containers all run wake up once a second, and five times as often while one is suspended and looks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arbiter.gputime.suspend_thread import BEAT_S, REST_S
from arbiter.gputime.timer import now_s
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Driver, GpuTimeNode
from vgpu.protocol import wire


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    made = GpuTimeNode()
    yield made
    made.close()
    assert driver.owed() == 0, "every container runs after the end"


def beat(node: GpuTimeNode, name: str) -> int:
    return node.pages[name]._numbers[wire.GPU_TIME_AT // 8]


def next_beat_s(node: GpuTimeNode, gpu: str = A) -> float:
    """In how many seconds the next heartbeat of a GPU's thread is due. What is due, and not what was seen: a busy machine delays that."""
    with node.scheduler.lock:
        return node.scheduler.suspend_threads.of(gpu)._beat_due_s - now_s()


def beats(node: GpuTimeNode, name: str, number: int, most_s: float) -> None:
    """So many heartbeats reach the page, and each is due within `most_s`."""
    for _ in range(number):
        before = beat(node, name)
        assert next_beat_s(node) <= most_s
        wait_for(lambda before=before: beat(node, name) != before)


def rests(node: GpuTimeNode) -> bool:
    """The thread has planned its next heartbeat as one that rests."""
    return BEAT_S < next_beat_s(node) <= REST_S


def test_a_thread_rests_while_no_container_is_suspended_and_wakes_when_due(node: GpuTimeNode):
    node.container("a").works()
    wait_for(lambda: node.status("a").on)
    wait_for(lambda: rests(node))  # what it did at the start is over
    for _ in range(3):
        before = beat(node, "a")
        wait_for(lambda before=before: beat(node, "a") != before)
        wait_for(lambda: rests(node))


def test_a_container_suspended_after_a_rest_sees_a_heartbeat_at_once_and_then_in_time(
    node: GpuTimeNode, driver: Driver
):
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    wait_for(lambda: node.status("be").on)
    wait_for(lambda: rests(node))
    urgent.works()
    wait_for(lambda: driver.off(background) and not node.status("be").on)
    beats(node, "be", 5, BEAT_S)
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
    wait_for(lambda: rests(node))
    urgent.works()
    wait_for(lambda: not node.status("be").on)
    beats(node, "be", 5, BEAT_S)
