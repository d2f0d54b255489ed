"""A blocked container when connections or arbiters end: nothing enables it, and afterwards it gets all the enables that it is owed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from tests.unit.arbiter.blocks_kit import Watch, all_off, halt, report, watching, with_copies
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, Container, Driver, GpuTimeNode, running_node
from vgpu.protocol.wire import Activity, ActivityKind


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver, watchdog_s=0.02)


@pytest.fixture
def watch(driver: Driver) -> Iterator[Watch]:
    yield from watching(driver)


def test_the_end_of_the_arbiter_resumes_all_but_a_blocked_container(driver: Driver, watch: Watch) -> None:
    """A process with memory away would fault; the next arbiter continues with it."""
    node = GpuTimeNode(watchdog_s=0)
    blocked, other = with_copies(node, "a"), with_copies(node, "b")
    urgent = node.container("lc", "latency-critical")
    halt(node, "a")
    watch.halted.add(blocked.client)
    other.works()
    urgent.works()
    wait_for(lambda: driver.off(other))
    node.close()
    assert all_off(driver, blocked)
    assert not driver.off(other)
    watch.halted.clear()


def test_a_failed_thread_resumes_all_but_a_blocked_container(driver: Driver, watch: Watch) -> None:
    node = GpuTimeNode(watchdog_s=0)
    blocked = with_copies(node, "a")
    halt(node, "a")
    watch.halted.add(blocked.client)
    node.scheduler.fail()
    assert node.failed.is_set()
    assert all_off(driver, blocked)
    node.close()
    watch.halted.clear()


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended before", "not suspended before"])
def test_a_new_arbiter_suspends_a_process_with_memory_away_and_never_resumes_it_before_the_end(
    driver: Driver, watch: Watch, *, suspended: bool
) -> None:
    """It cannot know whether the arbiter before it suspended the process: one disable more, and then as many enables."""
    before = GpuTimeNode(watchdog_s=0)
    one = with_copies(before, "a")
    if suspended:
        halt(before, "a")
    before.close()
    node = GpuTimeNode(watchdog_s=0)
    again = node.container("a", channels=False)
    again.client = one.client
    watch.halted.add(one.client)
    report(again, away=True)
    wait_for(lambda: node.scheduler.blocks.status("a").halted)
    assert all_off(driver, again)
    watch.halted.clear()
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)
    node.close()


def test_a_blocked_process_that_sends_garbage_is_hung_up_on_and_not_resumed(
    node: GpuTimeNode, driver: Driver, watch: Watch
) -> None:
    one = with_copies(node, "a")
    halt(node, "a")
    watch.halted.add(one.client)
    one.sock.send(b"garbage")
    wait_for(lambda: node.channel_groups("a") == 0)
    assert node.is_quiet()
    assert all_off(driver, one)
    again = node.container("a", channels=False)
    again.client = one.client
    report(again, away=True)
    wait_for(lambda: node.channel_groups("a") == 1 and node.scheduler.blocks.status("a").halted)
    watch.halted.clear()
    node.scheduler.blocks.end("a")
    wait_for(lambda: driver.owed() == 0)


def reconnect(node: GpuTimeNode, driver: Driver, name: str, client: int, *, away: bool) -> Container:
    """Its connection has ended: a library without memory away enables its channels as often as need be, and each connects again."""
    if not away:
        driver.enables_its_own(client)
    again = node.container(name, channels=False)
    again.client = client
    report(again, away=away)
    wait_for(lambda: node.channel_groups(name) == 1)
    return again


def act(node: GpuTimeNode, one: Container, what: str, *, away: bool) -> None:
    match what:
        case "work":
            one.works()
        case "idle":
            one.idles()
        case "resumed":
            one.send(Activity(ActivityKind.RESUMED))
        case "late":
            with node.scheduler.lock:
                node.scheduler.beat(A, late=True)
        case "list":
            report(one, away=away)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_halted_container_is_enabled_and_after_the_end_all_run(
    driver: Driver, watch: Watch, seed: int
) -> None:
    """Blocks, work, silences, new lists, reconnections and new arbiters in any order; the driver's counts outlive them all."""
    choice = random.Random(seed)
    node, blocked = GpuTimeNode(watchdog_s=0.01), set[str]()
    containers = {name: with_copies(node, name, choice.choice(["standard", "best-effort"])) for name in ("a", "b")}
    for _ in range(25):
        name = choice.choice("ab")
        what = choice.choice(["block", "end", "work", "idle", "resumed", "late", "list", "reconnect", "arbiter"])
        one = containers[name]
        if what == "block":
            halt(node, name)
            blocked.add(name)
            watch.halted.add(one.client)
        elif what == "end":
            blocked.discard(name)
            watch.halted.discard(one.client)
            node.scheduler.blocks.end(name)
        elif what == "reconnect":
            one.close()
            wait_for(partial(lambda node, name: node.channel_groups(name) == 0, node, name))
            containers[name] = reconnect(node, driver, name, one.client, away=name in blocked)
        elif what == "arbiter":
            node.close()
            node = GpuTimeNode(watchdog_s=0.01)
            containers = {
                other: reconnect(node, driver, other, old.client, away=other in blocked)
                for other, old in containers.items()
            }
        else:
            act(node, one, what, away=name in blocked)
        for other in blocked:
            wait_for(partial(lambda node, other: node.scheduler.blocks.status(other).halted, node, other))
            assert all_off(driver, containers[other])
    watch.halted.clear()
    for name, one in containers.items():
        node.scheduler.blocks.end(name)
        one.idles()
    wait_for(lambda: driver.owed() == 0)
    node.close()
