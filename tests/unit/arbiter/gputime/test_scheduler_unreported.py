"""What follows when the driver's count and a container's usage reports cannot both be true. The driver is a double of the call that channel groups make."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.metrics import families
from arbiter.gputime.process import GpuTimeProcess
from arbiter.gputime.timer import now_s
from arbiter.gputime.usage_report import FORGET_S, LOOK_MOST_S
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, Driver, GpuTimeNode, running_node
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.activity_check import PROVEN_S, UnreportedWork
from vgpu.gputime.suspend_effect import TIMES
from vgpu.protocol import wire
from vgpu.protocol.wire import Activity, ActivityKind


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver, cap_unreported=True)


def look(node: GpuTimeNode, seen_s: dict[str, float]) -> None:
    """A second passes in which the driver sees these compute."""
    with node.scheduler.lock:
        containers = [container for name, container in node.scheduler.containers.items() if name in seen_s]
        at_s = max(
            [now_s(), *(container.reports.weighed[0] + 1 for container in containers if container.reports.weighed)]
        )
    node.scheduler.usage_check(seen_s, frozenset(), at_s)


def accuse(node: GpuTimeNode, name: str) -> None:
    """The driver sees it compute without a word until that is enough."""
    wait_for(lambda: name in node.scheduler.statuses())
    for _ in range(5):
        assert not node.status(name).unreported
        look(node, {name: 1.0})
    assert node.status(name).unreported, "the first look has nothing to compare with; then four of a second are enough"


def acquit(node: GpuTimeNode, name: str) -> None:
    """Nothing is seen of it until it is believed again."""
    for _ in range(100):
        look(node, {name: 0.0})
        if not node.status(name).unreported:
            return
    raise AssertionError("it is believed again within a minute")


def works_unseen(node: GpuTimeNode, name: str) -> bool:
    """Does the policy take it to have work?"""
    with node.scheduler.lock:
        return node.scheduler.policy._states[name].working


def test_every_container_with_work_preempts_one_with_unreported_work(node: GpuTimeNode, driver: Driver):
    liar, other = node.container("liar"), node.container("other")
    other.works()
    wait_for(lambda: node.status("other").working)
    assert not driver.off(liar)
    with capture_logs() as log:
        accuse(node, "liar")
    assert [line["grant"] for line in log if line["log_level"] == "warning"] == ["liar"]
    wait_for(lambda: driver.off(liar))
    liar.idles()
    assert node.is_quiet()
    assert driver.off(liar), "its word does not count"
    assert not node.status("liar").working
    other.idles()
    wait_for(lambda: not driver.off(liar))
    other.works()
    wait_for(lambda: driver.off(liar))
    acquit(node, "liar")
    assert not works_unseen(node, "liar")
    other.idles()
    wait_for(lambda: not driver.off(liar))


def test_what_it_does_report_of_keeps_its_class(node: GpuTimeNode, driver: Driver):
    """So one that is accused wrongly loses nothing at its requests."""
    one, background = node.container("lc", "latency-critical"), node.container("be", "best-effort")
    background.works()
    accuse(node, "lc")
    assert node.is_quiet()
    assert not driver.off(background), "unreported work of a latency-critical container suspends no other"
    one.works()
    wait_for(lambda: driver.off(background))
    one.idles()
    wait_for(lambda: not driver.off(background))


def test_a_verdict_outlives_the_process_and_a_container_without_processes_has_no_work(
    node: GpuTimeNode, driver: Driver
):
    liar, other = node.container("liar"), node.container("other")
    other.works()
    accuse(node, "liar")
    wait_for(lambda: driver.off(liar))
    driver.free(liar)
    liar.close()
    wait_for(lambda: not works_unseen(node, "liar"))
    again = node.container("liar")
    wait_for(lambda: driver.off(again))


def test_a_container_that_is_not_there_any_more_is_not_judged(node: GpuTimeNode):
    node.container("a")
    node.status("a")
    node.drop("a")
    node.scheduler.usage_check({"a": 1.0, "never": 1.0}, frozenset(), now_s())
    assert "a" not in node.scheduler.statuses()


def test_a_throttled_container_counts_as_working_meanwhile(node: GpuTimeNode, driver: Driver, monkeypatch):
    """Else a flood of messages would hide work, and a container of many processes would count as one with unreported work."""
    reported: list[float] = []
    monkeypatch.setattr(
        UnreportedWork, "evaluate", lambda _, passed_s, reported_s, __: reported.append(reported_s / passed_s)
    )
    flooder = node.container("flood", "best-effort")
    node.status("flood")
    with node.scheduler.lock:
        node.scheduler.containers["flood"].budget._a_second = 200.0  # so that a slow machine floods, too
    stop = threading.Event()

    def flood() -> None:
        flooder.sock.setblocking(True)
        with suppress(OSError):  # hung up on at the end, in the middle of a send
            while not stop.is_set():
                for what in (ActivityKind.WORK, ActivityKind.IDLE):
                    flooder.sock.send(wire.encode(1, Activity(what)))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_for(lambda: node.scheduler.counters.delayed_reads, 20)
        node.scheduler.usage_check({"flood": 0.0}, frozenset(), now_s())
        held_back = node.scheduler.counters.delayed_reads
        wait_for(lambda: node.scheduler.counters.delayed_reads > held_back + 3, 20)
        node.scheduler.usage_check({"flood": 1.0}, frozenset(), now_s())
    finally:
        stop.set()
        flooder.sock.shutdown(2)
        thread.join(10)
    assert reported[0] > 0.5


def test_what_is_requested_and_had_and_waited_for_is_in_the_metrics(node: GpuTimeNode, driver: Driver):
    capped, urgent = node.container("capped", core=30), node.container("lc", "latency-critical")
    capped.works()
    wait_for(lambda: node.status("capped").suspends >= 1)
    urgent.works()
    wait_for(lambda: node.status("lc").working)
    grants = {name: Grant("ns", name, "", "main", (GrantGpu(A, 1, 0),), "standard", 2) for name in ("capped", "lc")}
    assert not node.scheduler.verdicts.checks(now_s())
    node.scheduler.usage_check({"capped": 0.3}, frozenset(), now_s())
    reported = {
        (sample.name.removeprefix("tangram_").partition("_")[2], sample.labels.get("pod", "")): sample.value
        for family in families(node.scheduler, grants)
        for sample in family.samples
    }
    assert reported["gpu_time_limit_ratio", "capped"] == 0.3
    assert reported["gpu_time_limit_ratio", "lc"] == reported["gpu_time_credit_seconds", "lc"] == 0
    assert -0.1 < reported["gpu_time_credit_seconds", "capped"] <= 0.3 * 0.05 * 3
    assert reported["gpu_time_running_seconds_total", "capped"] > 0
    assert reported["suspends_total", "capped"] >= 1
    throttled_s = reported["gpu_time_throttled_seconds_total", "capped"]
    assert 0 < reported["gpu_time_suspended_seconds_total", "capped"] >= throttled_s
    assert reported["gpu_work_arrivals_total", "lc"] == 1
    assert reported["gpu_time_preempting_seconds_total", "lc"] >= 0
    assert reported["gpu_time_observed_seconds_total", "capped"] == 0, "the first look has nothing to compare with"
    assert reported["unreported_work", "capped"] == 0
    assert reported["unreported_work_found_total", ""] == 0
    assert reported["usage_check_up", ""] == 1


def test_without_cap_unreported_it_is_reported_and_nothing_follows(driver: Driver) -> None:
    node = GpuTimeNode()
    liar, other = node.container("liar"), node.container("other", "best-effort")
    other.works()
    wait_for(lambda: node.status("other").working)
    with capture_logs() as log:
        accuse(node, "liar")
    assert [line["event"] for line in log if line["log_level"] == "warning"] == [
        "a container does work that it does not report: without cap-unreported this has no effect"
    ]
    assert node.scheduler.counters.unreported_work == 1
    assert not works_unseen(node, "liar")
    assert node.is_quiet()
    assert not driver.off(liar)
    assert not driver.off(other)
    node.close()


def test_a_verdict_that_no_reading_confirms_ends(node: GpuTimeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when NVML is gone, or the GPU: no verdict lasts for ever."""
    node.container("liar")
    accuse(node, "liar")
    assert works_unseen(node, "liar")
    monkeypatch.setattr("arbiter.gputime.node_scheduler.now_s", lambda: now_s() + FORGET_S + 10)
    wait_for(lambda: not node.status("liar").unreported, 30)
    assert not works_unseen(node, "liar")
    monkeypatch.undo()
    assert not node.scheduler.verdicts.checks(now_s() + FORGET_S + 10)


def judged(at_s: list[float], seen_s: list[float], *, works: bool, on: bool = True, core: int = 0) -> GpuTimeContainer:
    """A container after these readings. Before each of them it reported whether it works, and was switched then."""
    grant = Grant("ns", "a", "uid", "main", (GrantGpu(A, 1, core),), "standard", 2)
    container = GpuTimeContainer("a", grant, None, at_s[0] - 1, caps_unreported=True)
    container.processes[1] = GpuTimeProcess(1)
    container.take_activity(1, Activity(ActivityKind.WORK if works else ActivityKind.IDLE), at_s[0] - 1)
    container.record_switch(at_s[0] - 1, on=on)
    for at, seconds in zip(at_s, seen_s, strict=True):
        container.weigh(at, seconds)
    return container


@pytest.mark.parametrize(
    ("at_s", "seen_s", "unreported_s"),
    [
        ([10], [1.0], 0.0),
        ([10, 11], [1.0, 1.0], 0.9),
        ([10, 11, 12, 13], [1.0] * 4, 2.7),
        ([10, 11, 12, 13, 14], [1.0] * 5, 3.6),
        ([10, 12, 14], [1.0, 2.0, 2.0], 3.6),
        ([10, 11, 12, 13, 113], [1.0, 1.0, 1.0, 1.0, 2.0], 0.0),
        ([10, 11, 13.5, 14.5], [1.0, 1.0, 2.0, 1.0], 0.9 - 0.25 + 0.9),
        ([10, 13, 16, 19, 22, 25, 28], [1.0] + [2.0] * 6, 0.0),
        ([10, 11, 11, 12], [1.0, 1.0, 0.0, 1.0], 1.8),
    ],
)
def test_evidence_against_a_container_is_what_was_seen_and_never_what_a_pause_hid(
    at_s: list[float], seen_s: list[float], unreported_s: float
) -> None:
    container = judged(at_s, seen_s, works=False)
    assert container.reports.unreported_work.seconds == pytest.approx(unreported_s)
    assert container.reports.unreported_work.proven == (unreported_s >= PROVEN_S)
    assert container.reports.seen_s == pytest.approx(sum(seen_s[1:]))


def test_a_pause_counts_for_a_container_that_reported_work_in_it() -> None:
    """What the next look sees may be of before its end: the driver counts late."""
    container = judged([10, 11], [0.0, 1.0], works=False)
    container.take_activity(1, Activity(ActivityKind.WORK), 11)
    container.weigh(11 + LOOK_MOST_S + 1, 1.0)
    assert container.reports.unreported_work.seconds == 0


@pytest.mark.parametrize(("on", "proven"), [(True, False), (False, True)])
def test_reports_while_it_is_suspended_explain_nothing(*, on: bool, proven: bool) -> None:
    """Otherwise a container that always reports work could compute past the library while its own cap suspends it."""
    container = judged([float(at) for at in range(10, 20)], [1.0] * 10, works=True, on=on, core=10)
    assert container.reports.unreported_work.proven is proven


def test_reports_of_a_gated_container_count_while_it_may_not_run() -> None:
    """Its kernels go on."""
    grant = Grant("ns", "a", "uid", "main", (GrantGpu(A, 1, 10),), "standard", 2)
    container = GpuTimeContainer("a", grant, None, 9.0)
    container.processes[1] = GpuTimeProcess(1)
    for _ in range(TIMES):
        container.evidence.effect.ended(9.0)
    container.take_activity(1, Activity(ActivityKind.WORK), 9.0)
    container.record_switch(9.0, on=False)
    for at in range(10, 20):
        container.weigh(float(at), 1.0)
    assert not container.reports.unreported_work.proven


@pytest.mark.parametrize(("seen_s", "pace"), [(1.0, 1.0), (0.5, 0.5), (0.2, 0.2), (2.0, 1.0)])
def test_time_without_a_word_costs_what_the_driver_saw_of_it(seen_s: float, pace: float) -> None:
    container = judged([float(at) for at in range(10, 60)], [seen_s] * 50, works=False)
    assert container.reports.unreported_work.proven
    assert container.reports.pace == pytest.approx(pace)


# --- work that was reported and that the driver does not see any more ---


def see(node: GpuTimeNode, whole: bool = True) -> None:
    """A second passes in which the driver counts no GPU time; `whole`: the count includes the container."""
    with node.scheduler.lock:
        container = node.scheduler.containers["a"]
        at_s = max(now_s(), container.reports.added_until_s + 1, (container.reports.weighed or (0.0,))[0] + 1)
    node.scheduler.usage_check({"a": 0.0}, frozenset({"a"} if whole else ()), at_s)


def is_working(node: GpuTimeNode) -> bool:
    with node.scheduler.lock:
        return node.scheduler.containers["a"].has_reported_work()


@pytest.fixture
def working(node: GpuTimeNode) -> GpuTimeNode:
    """A container that launched kernels and never reports their end."""
    node.container("a").send(Activity(ActivityKind.WORK, wire.KERNELS_ONLY))
    wait_for(lambda: node.status("a").working)
    return node


def test_reported_work_that_the_driver_does_not_see_ends_and_a_word_brings_it_back(working: GpuTimeNode) -> None:
    for _ in range(3):
        see(working)
    assert not is_working(working)
    assert working.scheduler.counters.unreported_ends == 1
    working.containers[0].send(Activity(ActivityKind.STILL, wire.KERNELS_ONLY))
    wait_for(lambda: is_working(working))


def test_where_the_driver_could_not_see_it_reported_work_stays(working: GpuTimeNode) -> None:
    for _ in range(10):
        see(working, whole=False)
    assert is_working(working)


def test_a_copy_that_follows_a_kernel_keeps_the_work(working: GpuTimeNode) -> None:
    working.containers[0].send(Activity(ActivityKind.STILL, 0))
    wait_for(lambda: not any(p.kernels_only for p in working.scheduler.containers["a"].processes.values()))
    for _ in range(10):
        see(working)
    assert is_working(working)
