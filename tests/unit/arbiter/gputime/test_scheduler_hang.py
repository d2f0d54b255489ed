"""A GPU whose driver does not answer: its containers resume themselves, the others are served, and /healthz reports it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from arbiter.gputime.timer import now_s
from arbiter.metrics import STUCK_AFTER_S, stuck
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Container, Driver, GpuTimeNode
from vgpu.gputime.timing import Timing
from vgpu.protocol import wire

SILENCE_S = 0.6
"""After so long the library enables its own channels."""


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    made = GpuTimeNode(settings=Timing(starve_after_s=600))
    yield made
    assert not made.failed.is_set(), "a GPU's thread failed"
    made.close()


def silent_s(node: GpuTimeNode, name: str) -> float:
    """How long its page has shown no sign of life."""
    return now_s() - node.pages[name]._numbers[wire.GPU_TIME_AT // 8] / 1000


def hang(driver: Driver, of: Container) -> threading.Event:
    """The next call for this one does not return before the event."""
    go_on, hung = threading.Event(), threading.Event()

    def before(client: int, _disable: bool) -> None:
        if client == of.client:
            hung.set()
            go_on.wait(120)

    driver.before = before
    of.reports_channels((5, 6))
    assert hung.wait(30)
    return go_on


def test_a_container_that_depends_on_a_gpu_that_hangs_sees_no_heartbeat_and_the_others_do(
    node: GpuTimeNode, driver: Driver
):
    off, gang, elsewhere = (
        node.container("off", "best-effort"),
        node.container("gang", "best-effort", gpus=(B, A), channels=False),
        node.container("elsewhere", gpus=(B,)),
    )
    for gpu in (0, 1):
        gang.reports_channels(gpu=gpu, client=gang.client + 1000 * gpu)
    urgent = node.container("lc", "latency-critical")
    off.works()
    urgent.works()
    elsewhere.works()
    wait_for(lambda: driver.off(off) and not node.status("off").on)
    wait_for(lambda: silent_s(node, "off") < SILENCE_S, 30)
    go_on = hang(driver, urgent)
    try:
        wait_for(lambda: silent_s(node, "off") > SILENCE_S and silent_s(node, "gang") > SILENCE_S, 30)
        wait_for(lambda: silent_s(node, "elsewhere") < SILENCE_S, 30)
        assert min(silent_s(node, "off"), silent_s(node, "gang")) > SILENCE_S
        gpu, seconds = node.scheduler.suspend_threads.stuck(now_s())
        assert gpu == A
        assert seconds > SILENCE_S - 0.01  # the page has milliseconds
    finally:
        go_on.set()
    wait_for(lambda: silent_s(node, "off") < SILENCE_S and silent_s(node, "gang") < SILENCE_S, 30)


def test_a_container_that_resumed_itself_on_another_gpu_too_is_suspended_there_again(node: GpuTimeNode, driver: Driver):
    """Its page showed no heartbeat while one of its GPUs hung; the thread of the other GPU noticed nothing."""
    gang = node.container("gang", "best-effort", gpus=(B, A), channels=False)
    there = gang.client + 1000
    gang.reports_channels(gpu=0, client=there)
    gang.reports_channels(gpu=1)
    urgent = node.container("lc", "latency-critical")
    gang.works()
    urgent.works()
    wait_for(lambda: driver.off(gang) and driver.off(gang, there) and not node.status("gang").on)
    go_on = hang(driver, urgent)
    try:
        wait_for(lambda: silent_s(node, "gang") > SILENCE_S, 30)
        driver.goes_on_by_itself(gang, there)
        driver.goes_on_by_itself(gang)
    finally:
        go_on.set()
    wait_for(lambda: driver.off(gang) and driver.off(gang, there), 30)


def test_health_names_the_gpu_whose_thread_hangs(node: GpuTimeNode):
    node.container("a")
    server = SimpleNamespace(came_round_at_s=now_s(), scheduler=node.scheduler)
    assert stuck(server, now_s()) == ""  # type: ignore[arg-type]
    later_s = now_s() + STUCK_AFTER_S + 1
    server.came_round_at_s = later_s
    assert stuck(server, later_s).startswith(f"the thread of GPU {A} has not come round for ")  # type: ignore[arg-type]
    server.came_round_at_s = 0.0
    assert stuck(server, later_s).startswith("the loop has not come round for ")  # type: ignore[arg-type]
