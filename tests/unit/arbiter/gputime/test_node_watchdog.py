"""A container that another process stops again and again is resumed, and named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, Driver, GpuTimeNode, running_node
from vgpu.gputime.watchdog import PROOF
from vgpu.protocol.wire import KERNELS_ONLY, Activity, ActivityKind


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver)


def test_a_container_that_another_process_stopped_is_resumed(node: GpuTimeNode, driver: Driver):
    one = node.container("a")
    one.works()
    wait_for(lambda: node.channel_groups("a") == 1 and not node.scheduler.containers["a"].to_do(A))
    driver.stop_behind_its_back(one)
    assert driver.off(one)
    wait_for(lambda: not driver.off(one), 0.5)
    assert node.scheduler.containers["a"].watchdog_resumes >= 1


def test_a_container_under_a_core_limit_that_another_process_stopped_is_resumed(node: GpuTimeNode, driver: Driver):
    """The cap suspends and resumes it all the time, which heals nothing: the driver counts."""
    one = node.container("a", core=20)
    one.works()
    wait_for(lambda: node.status("a").suspends > 2)
    driver.stop_behind_its_back(one)
    wait_for(lambda: node.scheduler.containers["a"].watchdog_resumes >= 1, 5)
    wait_for(lambda: not driver.off(one), 1)


def test_a_container_whose_work_the_driver_does_not_see_any_more_is_still_resumed(node: GpuTimeNode, driver: Driver):
    """Perhaps the driver does not count it because another process stopped it, more often than the watchdog resumed it meanwhile."""
    one = node.container("a")
    one.send(Activity(ActivityKind.WORK, KERNELS_ONLY))
    wait_for(lambda: node.channel_groups("a") == 1 and node.status("a").working)
    with node.scheduler.lock:
        node.scheduler.containers["a"].reports.ended_work.ended = True
        before = node.scheduler.counters.watchdog_resumes
    assert not node.status("a").working
    driver.stop_behind_its_back(one)
    wait_for(lambda: node.scheduler.counters.watchdog_resumes > before and not driver.off(one), 2)


def test_a_container_that_another_process_stops_again_and_again_is_named(
    node: GpuTimeNode, driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vgpu.gputime.watchdog.ANSWERED_S", 5.0)  # on a busy machine this process is late, not the work
    one = node.container("a")
    one.works()
    wait_for(lambda: node.channel_groups("a") == 1 and not node.scheduler.containers["a"].to_do(A))
    for times in range(1, PROOF + 1):
        assert not node.status("a").stopped
        with node.scheduler.lock:
            before = node.scheduler.counters.watchdog_resumes
        driver.stop_behind_its_back(one)
        wait_for(lambda: node.scheduler.counters.watchdog_resumes > before and not driver.off(one), 0.5)  # noqa: B023
        one.idles()
        wait_for(lambda: not node.status("a").working)
        assert node.scheduler.containers["a"].watchdog._answered == times
        one.works()
        wait_for(lambda: node.status("a").working)
    assert node.status("a").stopped
