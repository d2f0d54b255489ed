"""Containers that cannot be suspended, and drivers without a trial: the containers are gated, continue to run, and are reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import pytest
from structlog.testing import capture_logs

from arbiter.gputime.timer import now_s
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A as GPU
from tests.unit.arbiter.gputime_kit import Driver, GpuTimeNode, running_node
from vgpu.api.enforcement import Reason
from vgpu.gputime.trial_verdict import Suspendability
from vgpu.protocol.wire import Activity, ActivityKind

MANY = tuple(range(3, 67))


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver)


def test_more_channels_than_a_list_takes_are_gated_and_keep_their_connection(node: GpuTimeNode, driver: Driver):
    many, urgent = node.container("be", "best-effort", channels=False), node.container("lc", "latency-critical")
    with capture_logs() as log:
        for _ in range(3):
            many.reports_channels(MANY, unlisted=True)
        many.works()
        wait_for(lambda: node.status("be").working)
        urgent.works()
        wait_for(lambda: node.gate("be"))
    assert (node.status("be").mode, "more than 64" in node.status("be").trouble) == ("gate", True)
    assert [line["grant"] for line in log if line["log_level"] == "error"] == ["be"], "logged once"
    assert (many.client, True) not in driver.calls
    urgent.idles()
    wait_for(lambda: not node.gate("be"))
    assert node.scheduler.counters.failures == 0


def test_a_process_that_grows_past_a_list_while_it_is_suspended_runs_on_all_channels_it_had(
    node: GpuTimeNode, driver: Driver
):
    grown, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    sibling = node.container("be", "best-effort")
    for one in (grown, sibling, urgent):
        one.works()
    wait_for(lambda: driver.off(grown) and driver.off(sibling))
    grown.reports_channels(tuple(range(4, 68)), unlisted=True)  # of its first two one has fallen off the list
    wait_for(lambda: driver.owed() == 0)
    wait_for(lambda: node.gate("be"))
    grown.reports_channels((3, 4, 5))
    wait_for(lambda: driver.off(grown) and driver.off(sibling))
    assert (node.gate("be"), node.status("be").mode, node.status("be").trouble) == (False, "suspend", "")


def test_a_container_of_which_one_process_cannot_be_stopped_runs_whole(node: GpuTimeNode, driver: Driver):
    first, second = node.container("be", "best-effort"), node.container("be", "best-effort")
    urgent = node.container("lc", "latency-critical")
    driver.refuse(second, 0x56, starts=False)
    first.works()
    second.works()
    wait_for(lambda: node.status("be").working and node.channel_groups("be") == 2)
    urgent.works()
    wait_for(lambda: node.gate("be"))
    assert (first.client, True) in driver.calls, "it was stopped before the other one refused"
    assert not driver.off(first)
    assert node.status("be").mode == "gate"


# -- GPUs and drivers on which the trial found that nothing is suspended ------------------------------------------------------------


class BootVerdict:
    """The verdict of this boot's trial, which may change."""

    def __init__(self) -> None:
        self.now = Suspendability(Reason.NO_SUSPEND, "suspending was tried and does not work: it hung")
        self.requested: list[list[str]] = []

    def __call__(self, uuids: Iterable[str]) -> Suspendability:
        self.requested.append(list(uuids))
        return self.now


@pytest.fixture
def boot_verdict() -> BootVerdict:
    return BootVerdict()


@pytest.fixture
def denied(driver: Driver, boot_verdict: BootVerdict) -> Iterator[GpuTimeNode]:
    made = GpuTimeNode(suspending=boot_verdict, watchdog_s=0.01)
    yield made
    assert not made.failed.is_set(), "a GPU's thread failed"
    made.close()
    assert driver.owed() == 0, "every container runs after the end"


def test_where_the_trial_failed_launches_are_held_back_and_the_driver_is_never_called(
    denied: GpuTimeNode, driver: Driver, boot_verdict: BootVerdict
):
    with capture_logs() as log:
        background, urgent = denied.container("be", "best-effort"), denied.container("lc", "latency-critical")
        background.works()
        urgent.works()
        wait_for(lambda: denied.gate("be"))
        wait_for(lambda: not denied.gate("lc"))
    assert (denied.status("be").mode, "it hung" in denied.status("be").trouble) == ("gate", True)
    assert [line["grant"] for line in log if line["log_level"] == "error"] == ["be", "lc"], "logged once for each"
    with denied.scheduler.lock:
        assert denied.scheduler.watchdog.resume_stopped(GPU, now_s() + 60) is None
        assert denied.scheduler.watchdog.next_s(GPU) == inf
    urgent.idles()
    wait_for(lambda: not denied.gate("be"))
    assert driver.calls == [], "what a call does there is not known: not even a resume"
    assert boot_verdict.requested[0] == [GPU]


def test_what_waits_at_the_gate_is_not_paid_for_while_nothing_is_on_the_gpu(denied: GpuTimeNode) -> None:
    gated, urgent = denied.container("be", core=50), denied.container("lc", "latency-critical")
    gated.works()
    urgent.works()
    wait_for(lambda: denied.gate("be"))
    assert denied.status("be").on, "what it launched before runs on, as far as anyone knows"
    gated.send(Activity(ActivityKind.DRAINED))
    wait_for(lambda: not denied.status("be").on)
    before = denied.status("be")
    wait_for(lambda: denied.status("be").off_s > before.off_s + 0.05)
    after = denied.status("be")
    assert (after.on_s, after.suspends) == (before.on_s, 0)
    gated.works()
    assert denied.is_quiet()
    assert denied.gate("be")
    assert denied.status("be").on, "its gate lets nothing through, and something is on the GPU all the same"


def test_no_container_is_off_at_an_open_gate(denied: GpuTimeNode) -> None:
    gated = denied.container("be")
    gated.works()
    wait_for(lambda: denied.status("be").working)
    gated.send(Activity(ActivityKind.DRAINED))
    assert denied.is_quiet()
    assert denied.status("be").on


def test_one_process_that_waits_at_the_gate_is_no_evidence_for_another(denied: GpuTimeNode) -> None:
    first, second = denied.container("be"), denied.container("be")
    urgent = denied.container("lc", "latency-critical")
    for one in (first, second, urgent):
        one.works()
    wait_for(lambda: denied.gate("be") and denied.status("be").processes == 2)
    first.send(Activity(ActivityKind.DRAINED))
    assert denied.is_quiet()
    assert denied.status("be").on
    second.send(Activity(ActivityKind.DRAINED))
    wait_for(lambda: not denied.status("be").on)


@pytest.mark.parametrize("doubt", ["its word was found untrue", "its words are not listened to"])
def test_a_drained_report_of_a_container_with_doubted_reports_does_not_count(denied: GpuTimeNode, doubt: str) -> None:
    gated, urgent = denied.container("be"), denied.container("lc", "latency-critical")
    gated.works()
    urgent.works()
    wait_for(lambda: denied.gate("be"))
    gated.send(Activity(ActivityKind.DRAINED))
    wait_for(lambda: not denied.status("be").on)
    with denied.scheduler.lock:
        container = denied.scheduler.containers["be"]
        if "untrue" in doubt:
            container._caps_unreported, container.reports.unreported_work.proven = True, True
        else:
            container.throttled = True
        denied.scheduler._publish_state(container, 0.0)
    assert denied.status("be").on


def test_an_arbiter_that_ends_requests_nothing_of_a_driver_that_may_not_suspend(
    driver: Driver, boot_verdict: BootVerdict
) -> None:
    node = GpuTimeNode(suspending=boot_verdict, watchdog_s=0.01)
    node.container("be", "best-effort").works()
    wait_for(lambda: node.status("be").working)
    node.close()
    assert driver.calls == []


def test_a_verdict_that_comes_later_counts_from_the_next_report_of_channels(
    denied: GpuTimeNode, driver: Driver, boot_verdict: BootVerdict
):
    background, urgent = denied.container("be", "best-effort"), denied.container("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: denied.gate("be"))
    boot_verdict.now = Suspendability()
    background.reports_channels((3, 4, 5))
    wait_for(lambda: driver.off(background))
    assert (denied.gate("be"), denied.status("be").trouble) == (False, "")


def test_no_process_is_tried_and_the_status_shows_a_suspend_without_a_trial_on_a_known_driver(
    denied: GpuTimeNode, driver: Driver, boot_verdict: BootVerdict
):
    boot_verdict.now = Suspendability(None, "driver 580.1 is known, not tried: the GPU takes no context")
    with capture_logs() as log:
        background = denied.container("be", "best-effort")
        background.reports_channels((3, 4, 5))
        wait_for(lambda: "not tried" in denied.status("be").trouble)
    assert [line["log_level"] for line in log] == ["warning"], "logged once"
    assert not any(disable for _, disable in driver.calls), "no container is suspended as a trial"
    urgent = denied.container("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    assert denied.status("be").mode == "suspend"
