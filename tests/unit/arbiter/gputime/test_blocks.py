"""A blocked container: nothing of it runs, and nothing resumes it, until the block ends. Then all of it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from arbiter.gputime.blocks import NO_EFFECT, BlockStatus
from arbiter.gputime.obstacles import NO_CHANNELS, PARTIAL
from arbiter.identity import named
from tests.unit.arbiter.blocks_kit import COMPUTE, COPY, Watch, all_off, halt, report, watching, with_copies
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Driver, GpuTimeNode, running_node
from vgpu.gputime import resource_manager as rm
from vgpu.protocol.wire import ABOUT_TO, Activity, ActivityKind, Channels


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver, watchdog_s=0.02)


@pytest.fixture
def watch(driver: Driver) -> Iterator[Watch]:
    yield from watching(driver)


@pytest.mark.parametrize("service_class", ["latency-critical", "standard", "best-effort"])
@pytest.mark.parametrize("works", [False, True])
def test_a_block_suspends_compute_and_copies_and_its_end_resumes_both(
    node: GpuTimeNode, driver: Driver, service_class: str, *, works: bool
) -> None:
    one = with_copies(node, "a", service_class)
    if works:
        one.works()
        wait_for(lambda: node.status("a").working)
    assert node.scheduler.blocks.status("a").halted is False
    halt(node, "a")
    assert all_off(driver, one)
    assert not node.status("a").on
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)
    wait_for(lambda: node.status("a").on)
    assert node.scheduler.blocks.status("a") == BlockStatus(False, "it is not blocked")


def test_the_copies_of_a_container_that_is_suspended_already_are_suspended_too(
    node: GpuTimeNode, driver: Driver
) -> None:
    one, urgent = with_copies(node, "a"), node.container("lc", "latency-critical")
    one.works()
    urgent.works()
    wait_for(lambda: driver.channels_off(one.client) == set(COMPUTE))
    halt(node, "a")
    assert all_off(driver, one)
    node.scheduler.blocks.end("a")
    assert driver.calls_about(one)[-1], "its GPU time comes first"
    urgent.idles()
    wait_for(lambda: driver.owed() == 0)


@pytest.mark.usefixtures("watch")
def test_neither_idleness_nor_the_watchdog_nor_a_silence_resumes_it(
    node: GpuTimeNode, driver: Driver, watch: Watch
) -> None:
    one = with_copies(node, "a", core=50)
    one.works()
    wait_for(lambda: node.status("a").working)
    halt(node, "a")
    watch.halted.add(one.client)
    for activity in (
        Activity(ActivityKind.IDLE), Activity(ActivityKind.WORK), Activity(ActivityKind.RESUMED, ABOUT_TO),
        Activity(ActivityKind.RESUMED), Activity(ActivityKind.STILL), Activity(ActivityKind.WORK),
    ):  # fmt: skip
        one.send(activity)
    wait_for(lambda: node.read("a"))
    with node.scheduler.lock:
        calls = len(driver.calls)  # behind the beat, its suspend may be among them
        node.scheduler.beat(A, late=True)
    wait_for(lambda: node.scheduler.blocks.status("a").halted and len(driver.calls) > calls)
    threading.Event().wait(0.1)  # the watchdog would have resumed it after 0.02 s
    assert all_off(driver, one)
    assert node.scheduler.counters.watchdog_resumes == 0
    watch.halted.clear()
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_process_that_comes_during_a_block_is_suspended_before_the_container_counts_as_halted(
    node: GpuTimeNode, driver: Driver
) -> None:
    one = with_copies(node, "a")
    halt(node, "a")
    free, entered = threading.Event(), threading.Event()

    def slowly(client: int, disable: bool) -> None:
        if client != one.client:
            entered.set()
            assert free.wait(20)

    driver.before = slowly
    two = node.container("a", channels=False)
    report(two)
    assert entered.wait(20)
    assert node.scheduler.blocks.status("a") == BlockStatus(False)
    free.set()
    wait_for(lambda: node.scheduler.blocks.status("a").halted)
    assert all_off(driver, two)
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_block_that_was_lifted_and_set_again_in_between_is_noticed(node: GpuTimeNode, driver: Driver) -> None:
    one = with_copies(node, "a")
    halt(node, "a")
    before = node.scheduler.blocks.status("a")
    assert before.since(before.halts)
    assert node.scheduler.blocks.status("a").since(before.halts), "nothing has happened"
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)
    halt(node, "a")
    after = node.scheduler.blocks.status("a")
    assert after.halted
    assert not after.since(before.halts)
    assert all_off(driver, one)
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


@pytest.mark.parametrize("how", ["new channels", "a new process", "its heartbeat stopped"])
def test_whatever_may_have_let_a_blocked_container_run_is_noticed_afterwards(
    node: GpuTimeNode, driver: Driver, how: str
) -> None:
    one = with_copies(node, "a")
    halt(node, "a")
    before = node.scheduler.blocks.status("a")
    if how == "new channels":
        report(one, (*COMPUTE, 5))
    elif how == "a new process":
        report(node.container("a", channels=False))
    else:
        one.send(Activity(ActivityKind.RESUMED))
    wait_for(lambda: node.scheduler.blocks.status("a").halts - before.halts)
    assert node.scheduler.blocks.status("a").halted
    assert not node.scheduler.blocks.status("a").since(before.halts)
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_process_that_ends_does_not_end_the_halt_of_the_others(node: GpuTimeNode, driver: Driver) -> None:
    with_copies(node, "a")
    two = node.container("a", channels=False)
    report(two)
    wait_for(lambda: node.channel_groups("a") == 2)
    halt(node, "a")
    before = node.scheduler.blocks.status("a")
    two.close()
    driver.free(two)
    wait_for(lambda: node.channel_groups("a") == 1)
    assert node.scheduler.blocks.status("a").since(before.halts)
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_resume_in_progress_is_waited_for_and_undone(node: GpuTimeNode, driver: Driver) -> None:
    """The call to the driver began before the block: until it has returned and was undone, the container may run."""
    one = with_copies(node, "a")
    halt(node, "a")
    free, entered = threading.Event(), threading.Event()

    def slowly(client: int, disable: bool) -> None:
        if not disable:
            entered.set()
            assert free.wait(20)

    driver.before = slowly
    node.scheduler.blocks.end("a")
    assert entered.wait(20)
    node.scheduler.blocks.begin("a")
    assert node.scheduler.blocks.status("a") == BlockStatus(False)
    free.set()
    wait_for(lambda: node.scheduler.blocks.status("a").halted)
    assert all_off(driver, one)
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_block_before_the_first_process_holds_for_it(node: GpuTimeNode, driver: Driver, watch: Watch) -> None:
    node.scheduler.blocks.begin("a")
    assert node.scheduler.blocks.status("a").halted
    one = node.container("a", channels=False)
    watch.halted.add(one.client)
    report(one)
    wait_for(lambda: node.channel_groups("a") == 1 and node.scheduler.blocks.status("a").halted)
    assert all_off(driver, one)
    assert not node.status("a").on
    assert not node.scheduler.containers["a"].wanted, "the policy knows it"
    watch.halted.clear()
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_channels_that_do_not_fit_one_list_are_suspended_by_two(node: GpuTimeNode, driver: Driver) -> None:
    compute, copy = tuple(range(100, 140)), tuple(range(200, 240))
    one = node.container("a", channels=False)
    report(one, compute, copy)
    wait_for(lambda: node.channel_groups("a") == 1)
    halt(node, "a")
    assert driver.channels_off(one.client) == {*compute, *copy}
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_refused_suspend_is_an_obstacle_and_the_end_of_the_block_undoes_it(node: GpuTimeNode, driver: Driver) -> None:
    one = with_copies(node, "a")
    driver.refuse(one, 0x21, starts=False)
    node.scheduler.blocks.begin("a")
    wait_for(lambda: "answered 0x21 to a suspend" in node.scheduler.blocks.status("a").obstacle)
    calls = len(driver.calls_about(one))
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.calls_about(one)[calls:] and not driver.calls_about(one)[-1])
    wait_for(lambda: node.scheduler.containers["a"].is_on(A))


@pytest.mark.parametrize(
    "copy", [(), tuple(range(200, 200 + rm.CHANNELS_LIMIT))], ids=["compute", "copies: there may be more"]
)
def test_a_list_that_may_not_name_all_channels_never_counts_as_halted(node: GpuTimeNode, copy: tuple[int, ...]) -> None:
    one = node.container("a", channels=False)
    one.send(Channels(0, one.client, 2, COMPUTE, copy, unlisted=not copy), node.device)
    wait_for(lambda: node.channel_groups("a") == 1)
    node.scheduler.blocks.begin("a")
    assert node.is_quiet()
    assert node.scheduler.blocks.status("a") == BlockStatus(False, "" if copy else PARTIAL)
    node.scheduler.blocks.end("a")
    wait_for(lambda: node.scheduler.containers["a"].is_on(A))


@pytest.mark.parametrize("how", ["a block", "memory away"])
def test_a_list_that_may_not_name_all_channels_is_suspended_once_and_keeps_the_thread_from_nobody(
    node: GpuTimeNode, driver: Driver, how: str
) -> None:
    one, other = node.container("a", channels=False), node.container("other")
    copy = tuple(range(200, 200 + rm.CHANNELS_LIMIT))
    one.send(Channels(0, one.client, 2, COMPUTE, copy, away=how == "memory away"), node.device)
    if how == "a block":
        wait_for(lambda: node.channel_groups("a") == 1)
        node.scheduler.blocks.begin("a")
    wait_for(lambda: driver.channels_off(one.client) == {*COMPUTE, *copy})
    switches = node.scheduler.counters.switches
    other.works()
    wait_for(lambda: node.status("other").working)
    assert node.scheduler.containers["a"].to_do(A) is None
    assert node.scheduler.counters.switches <= switches + 1, "the one that was being made"
    assert node.scheduler.blocks.status("a") == BlockStatus(False)
    other.idles()
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def test_a_context_without_channels_is_an_obstacle(node: GpuTimeNode) -> None:
    node.scheduler.contexts("a", {(named(1, 1), 0): 0.0})
    node.scheduler.blocks.begin("a")
    assert node.scheduler.blocks.status("a") == BlockStatus(False, NO_CHANNELS)
    with_no_channels = node.container("a", channels=False)
    assert node.scheduler.blocks.status("a") == BlockStatus(False, NO_CHANNELS)
    node.scheduler.contexts("a", {})
    assert node.scheduler.blocks.status("a").halted
    with_no_channels.close()
    node.scheduler.blocks.end("a")


def test_suspends_without_effect_are_an_obstacle(node: GpuTimeNode) -> None:
    with_copies(node, "a")
    with node.scheduler.lock:
        effect = node.scheduler.containers["a"].evidence.effect
        at_s = node.scheduler.clock()
        while not effect.gates:
            effect.ended(at_s)
    node.scheduler.blocks.begin("a")
    assert node.scheduler.blocks.status("a") == BlockStatus(False, NO_EFFECT)
    node.scheduler.blocks.end("a")


def test_a_report_of_memory_away_that_crosses_the_end_of_the_block_begins_no_other(
    node: GpuTimeNode, driver: Driver
) -> None:
    one = with_copies(node, "a")
    halt(node, "a")
    node.scheduler.blocks.end("a")
    report(one, away=True)
    one.works()
    wait_for(lambda: node.status("a").working and driver.owed() == 0)
    assert not node.scheduler.containers["a"].blocked


def test_a_grant_that_goes_ends_the_block(node: GpuTimeNode, driver: Driver) -> None:
    one = with_copies(node, "a")
    halt(node, "a")
    node.drop("a")
    driver.free(one)
    one.close()
    assert node.scheduler.blocks.status("a").halted is False
    with_copies(node, "a")


def test_a_container_on_two_gpus_is_halted_when_both_are(node: GpuTimeNode, driver: Driver) -> None:
    one = node.container("a", gpus=(A, B), channels=False)
    for gpu in (0, 1):
        one.send(Channels(gpu, one.client + 1000 * gpu, 2, COMPUTE, COPY), node.device)
    wait_for(lambda: node.channel_groups("a") == 2 and node.status("a").on)
    halt(node, "a")
    for client in (one.client, one.client + 1000):
        assert driver.channels_off(client) == {*COMPUTE, *COPY}
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)
