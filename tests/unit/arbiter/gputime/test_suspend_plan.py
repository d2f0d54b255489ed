"""Which container is suspended for a request before any decision, and that the decision would be the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Container, Driver, GpuTimeNode
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.events import Event, Switched, from_lines, to_lines
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.protocol.wire import Activity, ActivityKind

REPORTS: dict[str, Callable[[Container], None]] = {
    "work": Container.works,
    "a section": lambda container: container.send(Activity(ActivityKind.BEGIN_SECTION)),
    "work in 1.5 ms": lambda container: container.send(Activity(ActivityKind.HINT, 1500)),
}
SLOW_S = 0.05
"""Of a suspend, where a test looks at what is counted meanwhile."""


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    made = GpuTimeNode(watchdog_s=0)
    yield made
    driver.before = None
    made.close()
    assert driver.owed() == 0, "every container runs after the end"


def ordered(node: GpuTimeNode, name: str = "lc", gpu: str = A) -> str:
    """Who would be stopped first for a container's work."""
    with node.scheduler.lock:
        order = node.scheduler.suspend_plan.suspend_for(
            gpu, node.scheduler.containers[name], Activity(ActivityKind.WORK)
        )
        return order.container.name if order is not None else ""


def given(node: GpuTimeNode, gpu: str = A) -> None:
    """Orders are as things stand now."""
    with node.scheduler.lock:
        node.scheduler.suspend_plan.discard()
        suspend_thread = node.scheduler.suspend_threads.of(gpu)
    suspend_thread.wake()
    wait_for(lambda: gpu in node.scheduler.suspend_plan._gpus)


def events(node: GpuTimeNode) -> list[Event]:
    with node.scheduler.lock:
        return list(node.scheduler.trace)


def a_pair(node: GpuTimeNode) -> tuple[Container, Container]:
    """A latency-critical container, and the best-effort one that works and is to be stopped for it."""
    urgent, background = node.container("lc", "latency-critical"), node.container("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == "be")
    return urgent, background


def slowly(_: int, disable: bool) -> None:
    if disable:
        time.sleep(SLOW_S)


class Watched:
    """At each suspend: had the policy heard of the request by then? Was the lock held?"""

    def __init__(self, node: GpuTimeNode, driver: Driver) -> None:
        self.node, self.heard, self.locked = node, list[bool](), list[bool]()
        driver.before = self._look

    def _look(self, _: int, disable: bool) -> None:
        if not disable:
            return
        free = self.node.scheduler.lock.acquire(blocking=False)
        self.locked.append(not free)
        if free:
            policy = self.node.scheduler.policy
            self.heard.append(policy._states["lc"].active(policy.now_s))
            self.node.scheduler.lock.release()


@pytest.mark.parametrize("report", REPORTS)
def test_a_request_stops_a_neighbour_before_the_policy_is_called(
    node: GpuTimeNode, driver: Driver, report: str
) -> None:
    urgent, background = a_pair(node)
    watched = Watched(node, driver)
    REPORTS[report](urgent)
    wait_for(
        lambda: node.status("be").suspends == 1
    )  # what was announced and does not come is kept for milliseconds only
    assert (watched.heard, watched.locked) == ([False], [False])
    urgent.works()
    urgent.idles()
    urgent.send(Activity(ActivityKind.END_SECTION))
    wait_for(lambda: not driver.off(background))


@pytest.mark.parametrize("report", ["work", "a section"])  # what a hint announces ends in mid-suspend here
def test_what_was_stopped_by_order_is_in_the_accounts_as_if_it_had_been_decided(
    node: GpuTimeNode, driver: Driver, report: str
) -> None:
    """Also where the records were looked at meanwhile."""
    urgent, background = a_pair(node)
    driver.before = slowly
    REPORTS[report](urgent)
    for _ in range(5):
        node.scheduler.statuses()
        time.sleep(SLOW_S / 10)
    wait_for(lambda: not node.status("be").on)
    assert node.status("be").suspends == driver.calls_about(background).count(True) == 1
    with node.scheduler.lock:
        reported = list(node.scheduler.trace)
        assert [event.at_s for event in reported] == sorted(event.at_s for event in reported)
        again = GpuTimeScheduler()
        for event in from_lines(to_lines(reported)):
            again.apply(event)
        at_s = node.scheduler.policy.now_s + 0.001
        assert again.decide(at_s).on == node.scheduler.policy.decide(at_s).on
        for name in ("lc", "be"):
            usage = node.scheduler.policy.usage(name)
            assert usage.on_s == pytest.approx(again.usage(name).on_s, abs=1e-6)
            assert usage.suspended_s == pytest.approx(again.usage(name).suspended_s, abs=1e-6)


def test_what_a_request_waited_is_counted(node: GpuTimeNode, driver: Driver) -> None:
    urgent, _ = a_pair(node)
    driver.before = slowly
    urgent.works()
    wait_for(lambda: any(isinstance(event, Switched) and not event.on for event in events(node)))
    assert node.status("lc").clearing_s >= SLOW_S


def test_several_are_stopped_one_after_the_other_and_each_is_reported_at_once(
    node: GpuTimeNode, driver: Driver
) -> None:
    """A container that is suspended and whose page does not show it could not resume itself when the arbiter dies."""
    urgent, one = a_pair(node)
    other = node.container("be2", "best-effort")
    other.works()
    wait_for(lambda: node.status("be2").working and ordered(node) != "")
    reported: list[int] = []

    def look(_: int, disable: bool) -> None:
        if disable:
            reported.append(sum(not status.on for status in node.scheduler.statuses().values()))

    driver.before = look
    urgent.works()
    wait_for(lambda: driver.off(one) and driver.off(other))
    assert reported == [0, 1]


def test_a_container_that_becomes_urgent_while_another_is_suspended_is_not_suspended(
    node: GpuTimeNode, driver: Driver
) -> None:
    urgent, _ = a_pair(node)
    other = node.container("be2", "best-effort")
    other.works()
    wait_for(lambda: node.status("be2").working and ordered(node) == "be")

    def raise_it(_: int, disable: bool) -> None:
        if disable:
            driver.before = None
            node.scheduler.change(
                "be2", Grant("default", "be2", "uid-be2", "main", (GrantGpu(A, 1024, 0),), "latency-critical", 2)
            )

    driver.before = raise_it
    urgent.works()
    wait_for(lambda: not node.status("be").on)
    wait_for(lambda: node.status("lc").working)
    assert True not in driver.calls_about(other)


def test_work_that_is_announced_for_later_suspends_no_container_yet(node: GpuTimeNode, driver: Driver) -> None:
    urgent, background = a_pair(node)
    urgent.send(Activity(ActivityKind.HINT, 400_000))
    wait_for(lambda: any(type(event).__name__ == "Hint" for event in events(node)))
    assert node.is_quiet()
    assert True not in driver.calls_about(background)


def test_no_container_that_the_policy_leaves_on_is_ordered_to_stop(node: GpuTimeNode, driver: Driver) -> None:
    urgent, equal = node.container("lc", "latency-critical"), node.container("other", "latency-critical")
    equal.works()
    wait_for(lambda: node.status("other").working)
    given(node)
    assert ordered(node) == ""
    urgent.works()
    wait_for(lambda: node.status("lc").working)
    assert True not in driver.calls_about(equal)


def test_a_container_in_the_grace_of_its_last_work_is_not_suspended_when_that_is_over(
    node: GpuTimeNode, driver: Driver
) -> None:
    urgent = node.container("lc", "latency-critical")
    grant = Grant("default", "l4", "uid-l4", "main", (GrantGpu(A, 1024, 0),), "latency-critical", 4)
    less = node.container("l4", "latency-critical")
    node.scheduler.change("l4", grant)
    less.works()
    less.idles()
    wait_for(lambda: node.status("l4").arrivals == 1 and not node.status("l4").working)
    wait_for(lambda: not node.scheduler.policy._states["l4"].active(time.monotonic()))
    urgent.works()
    wait_for(lambda: node.status("lc").working)
    assert True not in driver.calls_about(less)


def test_a_container_with_several_gpus_is_in_no_plan_and_has_none(node: GpuTimeNode, driver: Driver) -> None:
    urgent, gang = node.container("lc", "latency-critical"), node.container("gang", "best-effort", gpus=(A, B))
    gang.reports_channels((5, 6), gpu=1)
    gang.works()
    wait_for(lambda: node.status("gang").working and node.scheduler.containers["gang"].gpus == {A, B})
    given(node)
    assert ordered(node) == ""
    urgent.works()
    wait_for(lambda: driver.off(gang))


def test_a_container_that_another_gpus_thread_reads_is_in_no_plan(node: GpuTimeNode, driver: Driver) -> None:
    """Its channels could change while it is stopped."""
    urgent = node.container("lc", "latency-critical")
    far = node.container("far", "best-effort", gpus=(B, A), channels=False)
    far.reports_channels((5, 6), gpu=1)
    far.works()
    wait_for(lambda: node.status("far").working and node.scheduler.containers["far"].gpus == {A})
    given(node)
    assert ordered(node) == ""
    urgent.works()
    wait_for(lambda: driver.off(far))


def test_channels_in_an_unknown_state_are_not_suspended_once_more(node: GpuTimeNode, driver: Driver) -> None:
    """A disable is counted: two need two enables."""
    _, background = a_pair(node)
    with node.scheduler.lock:
        container = node.scheduler.containers["be"]
        container.doubt(0.0) if driver.off(background) else None
        container.switch(A, on=False)
        container.doubt(0.0)
        container.switch(A, on=False)
    assert driver.calls_about(background).count(True) == 1
    node.scheduler.suspend_threads.wake(node.scheduler.containers["be"])
    wait_for(lambda: not driver.off(background))


def test_a_plan_ends_with_the_class_that_it_was_computed_for(node: GpuTimeNode, driver: Driver) -> None:
    urgent, background = a_pair(node)
    grant = Grant("default", "lc", "uid-lc", "main", (GrantGpu(A, 1024, 0),), "best-effort", 2)
    node.scheduler.change("lc", grant)
    assert ordered(node) == ""
    urgent.works()
    wait_for(lambda: node.status("lc").working)
    assert True not in driver.calls_about(background)


def test_a_container_that_yields_and_is_lowered_suspends_no_other_by_a_hint(node: GpuTimeNode, driver: Driver) -> None:
    urgent, background = a_pair(node)
    node.scheduler.change("be", Grant("default", "be", "uid-be", "main", (GrantGpu(A, 1024, 0),), "best-effort", 4))
    urgent.send(Activity(ActivityKind.YIELD))
    wait_for(lambda: node.scheduler.policy._states["lc"].urgency == (2, 2))
    given(node)
    assert ordered(node) == "be", "best-effort now, and still before one of a later level"
    grant = Grant("default", "lc", "uid-lc", "main", (GrantGpu(A, 1024, 0),), "best-effort", 2)
    node.scheduler.change("lc", grant)
    assert ordered(node) == ""
    urgent.send(Activity(ActivityKind.HINT, 100))
    urgent.send(Activity(ActivityKind.END_YIELD))
    wait_for(lambda: not any(process.yields for process in node.scheduler.containers["lc"].processes.values()))
    assert True not in driver.calls_about(background)


def test_a_container_that_cannot_be_suspended_is_tried_once(node: GpuTimeNode, driver: Driver) -> None:
    urgent, background = a_pair(node)
    driver.refuse(background, 0x56, starts=False)
    urgent.works()
    wait_for(lambda: "0x56" in node.status("be").trouble)
    assert node.status("be").on
    urgent.idles()
    wait_for(lambda: not node.scheduler.policy._states["lc"].active(node.scheduler.policy.now_s))
    given(node)
    urgent.works()
    wait_for(lambda: node.status("lc").arrivals == 2)
    assert driver.calls_about(background).count(True) == 1


def test_a_process_that_hangs_up_ends_the_plan_also_where_its_container_goes_on_as_before(
    node: GpuTimeNode, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is ordered to stop is a list of channels, and some of them are gone."""
    urgent, working = a_pair(node)
    idle = node.container("be", "best-effort")
    wait_for(lambda: node.channel_groups("be") == 2)
    given(node)
    assert ordered(node) == "be"
    monkeypatch.setattr(node.scheduler.suspend_plan, "compute", lambda *_: None)
    idle.close()
    wait_for(lambda: node.channel_groups("be") == 1)
    assert ordered(node) == ""
    urgent.works()
    wait_for(lambda: driver.off(working))
    assert (node.status("be").mode, node.status("be").trouble) == ("suspend", "")


@pytest.mark.parametrize("change", ["drop", "channels", "hang up", "class"])
def test_any_change_ends_the_plan_until_it_is_computed_anew(
    node: GpuTimeNode, driver: Driver, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, background = a_pair(node)
    monkeypatch.setattr(node.scheduler.suspend_plan, "compute", lambda *_: None)
    match change:
        case "drop":
            node.drop("be")
        case "channels":
            background.reports_channels((3, 4), fresh=True)
        case "hang up":
            background.close()
        case "class":
            node.scheduler.change(
                "be", Grant("default", "be", "uid-be", "main", (GrantGpu(A, 1024, 0),), "standard", 2)
            )
    wait_for(lambda: ordered(node) == "")


def test_no_container_is_suspended_at_the_end(node: GpuTimeNode, driver: Driver) -> None:
    urgent, background = a_pair(node)
    node.scheduler.fail()
    assert ordered(node) == ""
    urgent.works()
    wait_for(lambda: node.scheduler.containers["lc"].has_reported_work())
    assert node.is_quiet() is False, "it was made to fail"
    assert True not in driver.calls_about(background)


@pytest.mark.parametrize("leaves", ["lc", "be"])
def test_a_grant_may_go_while_its_order_is_carried_out(node: GpuTimeNode, driver: Driver, leaves: str) -> None:
    urgent, background = a_pair(node)
    gone: list[str] = []

    def drop(_: int, disable: bool) -> None:
        if disable and not gone:
            gone.append(leaves)
            node.drop(leaves)

    driver.before = drop
    urgent.works()
    wait_for(lambda: gone == [leaves])
    wait_for(lambda: not driver.off(background))
    assert not node.failed.is_set()


def test_a_neighbour_is_stopped_once_and_started_once_for_each_request(node: GpuTimeNode, driver: Driver) -> None:
    urgent, background = a_pair(node)
    for requests in range(1, 21):
        urgent.works()
        wait_for(lambda: not node.status("be").on)
        assert max(driver._count.values()) == 1
        urgent.idles()
        wait_for(lambda: ordered(node) == "be")
        assert driver.calls_about(background).count(True) == requests
    assert driver.owed() == 0


def test_a_driver_that_hangs_in_a_planned_suspend_does_not_block_the_lock(node: GpuTimeNode, driver: Driver) -> None:
    urgent, _ = a_pair(node)
    hung, go_on = threading.Event(), threading.Event()

    def hang(_: int, disable: bool) -> None:
        if disable:
            hung.set()
            go_on.wait(10)

    driver.before = hang
    urgent.works()
    try:
        assert hung.wait(5)
        assert node.scheduler.statuses()["lc"].working is False, "it is not heard of yet"
    finally:
        go_on.set()
    wait_for(lambda: node.status("lc").working)
