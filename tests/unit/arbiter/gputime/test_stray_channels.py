"""Work on channels that run while their container is suspended: it is paid for, and shows whether suspends work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import Driver, GpuTimeNode, running_node
from vgpu.protocol.wire import KERNELS_ONLY, LATE_SHIFT, Activity, ActivityKind


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver)


def test_what_a_process_did_before_it_was_met_is_paid(node: GpuTimeNode):
    one = node.container("a", core=20)
    wait_for(lambda: node.channel_groups("a") == 1)
    before = node.status("a").on_s
    one.send(Activity(ActivityKind.WORK, KERNELS_ONLY | 40_000 << LATE_SHIFT))
    one.idles()
    wait_for(lambda: node.status("a").on_s >= before + 0.04)


@pytest.mark.parametrize("works", [True, False], ids=["with work", "without"])
def test_a_process_that_comes_while_its_container_is_stopped_pays_for_work_until_it_is_stopped_too(
    node: GpuTimeNode, driver: Driver, *, works: bool
):
    one, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    one.works()
    urgent.works()
    wait_for(lambda: driver.off(one) and not node.status("be").on)
    before = node.status("be").on_s
    driver.before = lambda client, _disable: time.sleep(0.05) if client == node.containers[-1].client else None
    other = node.container("be", "best-effort", channels=False)
    if works:
        other.works()
    other.reports_channels(fresh=True)
    wait_for(lambda: driver.off(other))
    wait_for(lambda: node.status("be").on_s >= before + 0.05 or (not works and node.read("be")))
    assert works or node.status("be").on_s == before


def test_a_container_of_many_processes_pays_from_the_first_that_is_resumed(node: GpuTimeNode, driver: Driver):
    ones, urgent = [node.container("be", "best-effort") for _ in range(4)], node.container("lc", "latency-critical")
    ones[0].works()
    urgent.works()
    wait_for(lambda: all(driver.off(one) for one in ones) and not node.status("be").on)
    before = node.status("be").on_s
    driver.before = lambda _client, disable: None if disable else time.sleep(0.03)
    urgent.idles()
    wait_for(lambda: node.status("be").on)
    assert node.status("be").on_s >= before + 0.09


def test_work_that_ends_while_its_container_is_stopped_shows_that_suspends_have_no_effect(
    node: GpuTimeNode, driver: Driver
):
    one, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    urgent.works()
    one.works()
    wait_for(lambda: driver.off(one))
    threading.Event().wait(0.03)
    one.idles()
    for _ in range(3):
        one.works()
        one.idles()
    one.works()
    wait_for(lambda: node.status("be").mode == "gate")


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "once it may run again"])
def test_a_program_that_is_restarted_in_a_stopped_container_is_limited_as_the_one_before(
    node: GpuTimeNode, driver: Driver, *, waits: bool
):
    """The earlier process ends while its container is suspended. When the container may run, no process is left to resume, so no switch was recorded."""
    first = node.container("a", core=20)
    first.works()
    wait_for(lambda: driver.off(first) and not node.status("a").on)
    first.close()
    wait_for(lambda: not node.scheduler.containers["a"].processes)
    driver.free(first)
    if waits:
        wait_for(lambda: node.scheduler.containers["a"].wanted and node.status("a").credit_s > 0.02)
    second = node.container("a", core=20, channels=False)
    second.reports_channels(fresh=True)
    second.works()
    for _ in range(3):
        wait_for(lambda: driver.off(second), 2)
        assert not node.status("a").on
        before = node.status("a").on_s
        wait_for(lambda: not driver.off(second), 2)
        wait_for(lambda: node.status("a").on_s > before, 2)  # noqa: B023


def test_the_gate_of_a_suspended_container_without_processes_is_shut_until_the_next_one_is_suspended(
    node: GpuTimeNode, driver: Driver
):
    """However short its processes live, none computes for free before the arbiter has met it."""
    first = node.container("a", core=5)
    first.send(Activity(ActivityKind.WORK, 150_000 << LATE_SHIFT))
    wait_for(lambda: driver.off(first) and not node.status("a").on)
    assert not node.gate("a")
    first.close()
    driver.free(first)
    wait_for(lambda: node.gate("a"))
    assert (node.status("a").on, node.status("a").mode) == (False, "suspend")
    second = node.container("a", core=5, channels=False)
    open_before_it_was_off = []
    driver.before = lambda client, _disable: (
        open_before_it_was_off.append(not node.gate("a")) if client == second.client else None
    )
    second.works()
    second.reports_channels(fresh=True)
    wait_for(lambda: driver.off(second) and not node.gate("a"))
    assert open_before_it_was_off[0] is False
    suspends = node.status("a").suspends
    second.close()
    driver.free(second)
    wait_for(lambda: node.gate("a"))
    wait_for(lambda: not node.gate("a") and node.status("a").on, 20)
    assert node.status("a").suspends == suspends


def test_work_of_a_process_without_known_channels_is_no_evidence_on_suspends(node: GpuTimeNode, driver: Driver):
    """A program that is started anew in a suspended container runs until the arbiter has met it."""
    one, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    urgent.works()
    one.works()
    wait_for(lambda: driver.off(one) and not node.status("be").on)
    threading.Event().wait(0.03)
    fresh = node.container("be", "best-effort", channels=False)
    for _ in range(5):
        fresh.works()
        fresh.idles()
    wait_for(lambda: node.read("be"))
    assert node.status("be").mode == "suspend"
    fresh.works()
    fresh.reports_channels(fresh=True)
    for _ in range(5):
        fresh.idles()
        fresh.works()
    wait_for(lambda: driver.off(fresh))
    wait_for(lambda: node.read("be"))
    assert node.status("be").mode == "suspend"


def test_work_that_began_before_a_list_of_channels_and_ended_after_it_is_no_evidence_on_suspends(
    node: GpuTimeNode, driver: Driver
):
    """A new context in a suspended container: its channels run until they are reported and suspended."""
    one, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    urgent.works()
    one.works()
    wait_for(lambda: driver.off(one) and not node.status("be").on)
    for client in range(1, 5):
        threading.Event().wait(0.03)
        one.idles()
        one.works()
        one.reports_channels(client=client, fresh=True)
        one.idles()
        wait_for(lambda: driver.off(one, client))  # noqa: B023
    wait_for(lambda: node.read("be"))
    assert node.status("be").mode == "suspend"
