"""Bad input from containers on a connection for GPU time harms only the container itself. The driver is a double of the call that channel groups make."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest

from arbiter.gputime.process import CHANNEL_GROUPS_LIMIT
from arbiter.gputime.suspend_thread import PACKETS_A_ROUND
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Container, Driver, GpuTimeNode, open_descriptors, running_node
from vgpu.protocol import wire
from vgpu.protocol.wire import Activity, ActivityKind, Channels


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver)


def test_a_container_is_stopped_for_a_more_urgent_one_and_started_again(node: GpuTimeNode, driver: Driver):
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    urgent.idles()
    wait_for(lambda: not driver.off(background))
    assert not driver.off(urgent)
    assert driver.owed() == 0


def test_fresh_channels_are_not_enabled(node: GpuTimeNode, driver: Driver):
    fresh, known = node.container("fresh", "best-effort", channels=False), node.container("known")
    fresh.reports_channels(fresh=True)
    urgent = node.container("lc", "latency-critical")
    urgent.works()
    fresh.works()
    wait_for(lambda: driver.off(fresh))
    wait_for(lambda: driver.calls_about(known))
    assert driver.calls_about(fresh)[0] is True, "its first call is a disable, not an enable"
    assert driver.calls_about(known)[0] is False


def test_a_list_that_is_marked_fresh_again_leaves_nothing_suspended(node: GpuTimeNode, driver: Driver):
    liar, urgent = node.container("be", "best-effort", channels=False), node.container("lc", "latency-critical")
    liar.reports_channels(fresh=True)
    liar.works()
    urgent.works()
    wait_for(lambda: driver.off(liar))
    liar.reports_channels(compute=(3, 4, 5), fresh=True)
    wait_for(lambda: driver.channels_off(liar.client) == {3, 4, 5})
    urgent.idles()
    wait_for(lambda: not driver.off(liar))
    assert (True, True) not in pairwise(driver.calls_about(liar)), "an enable before each further disable"


@pytest.mark.parametrize("status", [0x21, 0x1F, -1], ids=["bad handle", "bad argument", "no ioctl at all"])
def test_handles_that_the_driver_refuses_leave_their_container_running_and_its_work_held_back(
    node: GpuTimeNode, driver: Driver, status: int
):
    forger, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    driver.refuse(forger, status)
    forger.works()
    urgent.works()
    wait_for(lambda: node.status("be").trouble)
    assert node.status("be").mode == "gate"
    wait_for(lambda: node.gate("be"))
    assert not driver.off(forger)
    urgent.idles()
    wait_for(lambda: not node.gate("be"))
    assert driver.owed() == 0


def test_a_refused_list_is_tried_again_when_the_container_reports_other_channels(node: GpuTimeNode, driver: Driver):
    one, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    driver.refuse(one, 0x21)
    one.works()
    urgent.works()
    wait_for(lambda: node.status("be").trouble)
    driver.refuse(one, 0)
    one.reports_channels(compute=(7, 8))
    wait_for(lambda: driver.off(one))
    assert not node.status("be").trouble


@pytest.mark.parametrize("kind", ["pipe", "file", "null", "socket"])
def test_a_descriptor_that_is_no_nvidia_device_ends_its_connection(node: GpuTimeNode, tmp_path, kind: str):
    other = node.container("other")
    wait_for(lambda: node.channel_groups("other"))
    before = node.descriptors("liar")
    liar = node.container("liar", channels=False)
    made = {
        "pipe": lambda: os.pipe(),
        "file": lambda: (os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT),),
        "null": lambda: (os.open("/dev/null", os.O_RDWR),),
        "socket": lambda: (os.dup(liar.sock.fileno()),),
    }[kind]()
    liar.reports_channels(fd=made[0])
    assert "neither of the NVIDIA driver" in liar.refused()
    for fd in made:
        os.close(fd)
    liar.close()
    other.works()
    wait_for(lambda: node.status("other").working)
    wait_for(lambda: open_descriptors() <= before)


@pytest.mark.parametrize(
    ("message", "fd", "reason"),
    [
        (Channels(5, 1, 2, (3,), ()), True, "names GPU 5"),
        (Channels(0, 1, 2, (3,), ()), False, "without a descriptor"),
        (wire.Lease(0, 1, 1), False, "is invalid"),
        (wire.Hello(1, 1, "again"), False, "is invalid"),
    ],
    ids=["GPU", "no descriptor", "lease", "hello"],
)
def test_a_message_that_makes_no_sense_ends_its_connection_and_leaves_no_descriptor(
    node: GpuTimeNode, message: wire.Message, fd: bool, reason: str
):
    before = node.descriptors("liar")
    liar = node.container("liar", channels=False)
    liar.send(message, node.device if fd else None)
    assert reason in liar.refused()
    liar.close()
    wait_for(lambda: open_descriptors() <= before)


@pytest.mark.parametrize(
    "packet",
    [
        b"x" * 40,
        wire.encode(1, Activity(ActivityKind.WORK))[:-1],
        wire.encode(1, Activity(ActivityKind.WORK)).replace(b"TNGR\x01", b"TNGR\x02"),
        wire.encode(1, Activity(ActivityKind.WORK))[:16] + b"\xff" * 16,
    ],
    ids=["noise", "cut", "other version", "unknown activity"],
)
def test_bytes_that_are_no_message_end_their_connection_and_no_other(node: GpuTimeNode, packet: bytes):
    other, liar = node.container("other"), node.container("liar")
    liar.sock.send(packet)
    assert liar.refused()
    other.works()
    wait_for(lambda: node.status("other").working)


def test_a_process_may_name_only_so_many_clients(node: GpuTimeNode):
    liar = node.container("liar", channels=False)
    before = open_descriptors()
    liar.process_budget(10**9)
    for client in range(CHANNEL_GROUPS_LIMIT + 1):
        liar.send(Channels(0, client, 2, (3,), ()), node.device)
    assert "too many" in liar.refused()
    wait_for(lambda: open_descriptors() <= before)


def test_a_list_that_is_replaced_or_given_up_leaves_no_descriptor_and_no_enable_owed(node: GpuTimeNode, driver: Driver):
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    before = node.device_descriptors()
    for more in range(5):
        background.reports_channels(compute=tuple(range(3, 5 + more)))
    wait_for(lambda: driver.channels_off(background.client) == {3, 4, 5, 6, 7, 8})
    wait_for(lambda: node.channel_groups("be") == 1 and node.device_descriptors() <= before)
    driver.free(background)
    background.reports_channels(compute=())
    wait_for(lambda: node.channel_groups("be") == 0 and node.device_descriptors() == before - 1)
    wait_for(lambda: driver.owed() == 0)


def test_a_container_that_floods_is_read_later_and_no_other_is(node: GpuTimeNode, driver: Driver):
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    flooder = node.container("flood", "best-effort")
    background.works()
    stop = threading.Event()

    def flood() -> None:
        flooder.sock.setblocking(True)
        packet = wire.encode(1, Activity(ActivityKind.YIELD))
        sent = 0
        with suppress(OSError):  # hung up on at the end, in the middle of a send
            while not stop.is_set() and sent < 100_000:
                flooder.sock.send(packet)
                sent += 1

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_for(lambda: node.scheduler.counters.delayed_reads)
        waits = []
        for _ in range(20):
            began = time.monotonic()
            urgent.works()
            wait_for(lambda: driver.off(background))
            waits.append(time.monotonic() - began)
            urgent.idles()
            wait_for(lambda: not driver.off(background))
    finally:
        stop.set()
        flooder.sock.shutdown(2)
        thread.join(10)
    waits.sort()
    assert waits[10] < 0.05, (
        "suspended within milliseconds, although 100,000 messages of another container are on their way"
    )


def test_a_flood_of_channels_does_not_keep_the_driver_busy(node: GpuTimeNode, driver: Driver):
    flooder = node.container("flood")
    calls = len(driver.calls)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        try:
            flooder.reports_channels()
        except BlockingIOError:
            threading.Event().wait(0.005)
    assert len(driver.calls) - calls < 400, "some 200 lists a second, with an enable or two each"


def test_more_connections_than_a_container_may_have_are_turned_away(node: GpuTimeNode, monkeypatch):
    monkeypatch.setattr("arbiter.gputime.node_scheduler.PROCESSES_LIMIT", 8)
    crowd = [node.container("crowd", channels=False) for _ in range(8)]
    assert "more than 8" in node.container("crowd", channels=False).refused()
    crowd[0].close()
    wait_for(lambda: len(node.scheduler.containers["crowd"].processes) == 7)
    node.container("crowd").works()
    wait_for(lambda: node.status("crowd").working)


def test_thousands_of_connects_leave_nothing_behind(node: GpuTimeNode):
    other = node.container("other")
    wait_for(lambda: node.channel_groups("other"))
    before = node.descriptors("crowd")
    for _ in range(2000):
        node.container("crowd", channels=False).close()
    wait_for(lambda: not node.scheduler.containers["crowd"].processes)
    wait_for(lambda: open_descriptors() <= before)
    other.works()
    wait_for(lambda: node.status("other").working)


def test_a_section_that_never_ends_is_ended(node: GpuTimeNode, driver: Driver):
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    urgent.send(Activity(ActivityKind.BEGIN_SECTION))
    wait_for(lambda: driver.off(background))
    wait_for(lambda: not driver.off(background), 3)


@pytest.mark.parametrize("what", [ActivityKind.HINT, ActivityKind.BEGIN_SECTION, ActivityKind.END_SECTION])
def test_a_container_that_is_not_latency_critical_announces_nothing(
    node: GpuTimeNode, driver: Driver, what: ActivityKind
):
    one, other = node.container("a"), node.container("b", "best-effort")
    other.works()
    one.send(Activity(what, 2**63))
    one.send(Activity(ActivityKind.IDLE))
    assert node.is_quiet()
    assert not driver.off(other)


@pytest.mark.parametrize("step", range(6))
def test_a_container_that_dies_in_any_step_leaves_every_other_running(node: GpuTimeNode, driver: Driver, step: int):
    other = node.container("other")
    other.works()
    dies = node.container("dies", "latency-critical", channels=False)
    steps = [
        dies.reports_channels,
        dies.works,
        lambda: dies.send(Activity(ActivityKind.HINT, 10_000_000)),
        lambda: dies.send(Activity(ActivityKind.BEGIN_SECTION)),
        lambda: wait_for(lambda: driver.off(other)),
    ]
    for one in steps[:step]:
        one()
    dies.close()
    wait_for(lambda: not node.scheduler.containers["dies"].processes)
    wait_for(lambda: not driver.off(other), 3)
    assert driver.owed() == 0


def test_debts_outlive_the_process_that_made_them(node: GpuTimeNode, driver: Driver):
    """Else a capped container that connects anew each time would have no cap."""
    one = node.container("a", core=10)
    one.works()
    wait_for(lambda: node.status("a").suspends >= 1)
    had = node.status("a").on_s
    one.close()
    driver.free(one)
    wait_for(lambda: not node.scheduler.containers["a"].processes)
    again = node.container("a", core=10)
    again.works()
    wait_for(lambda: node.channel_groups("a") == 1)
    assert node.status("a").on_s >= had


def test_a_container_with_several_gpus_is_suspended_on_all_of_them(node: GpuTimeNode, driver: Driver):
    gang = node.container("gang", "best-effort", gpus=(A, B))
    gang.reports_channels(gpu=1, client=9)
    gang.works()
    urgent = node.container("lc", "latency-critical", gpus=(B,))
    urgent.works()
    wait_for(lambda: driver.off(gang) and driver.off(gang, 9))
    urgent.idles()
    wait_for(lambda: not driver.off(gang) and not driver.off(gang, 9))
    assert PACKETS_A_ROUND > 1


def test_a_container_of_the_same_name_after_the_grant_went_has_nothing_of_the_one_before(
    node: GpuTimeNode, driver: Driver
):
    first, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    first.works()
    urgent.works()
    wait_for(lambda: driver.off(first))
    node.drop("be")
    wait_for(lambda: driver.owed() == 0)
    assert first.hung_up()
    second = node.container("be", "best-effort")
    assert isinstance(second, Container)
    second.works()
    wait_for(lambda: driver.off(second))
