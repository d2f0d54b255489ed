"""Why a container's GPU time is not enforced, as the arbiter itself detects it, with processes on its sockets."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from arbiter.enforcement import enforcements
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.server import ArbiterServer
from tests.unit.arbiter.conftest import GPU, MIB, ArbiterNode, HandMeter, Process, wait_for
from tests.unit.arbiter.gputime_kit import Driver
from vgpu.api.enforcement import NO_CHANNELS_S, LimitState, Reason
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.trial_verdict import Suspendability
from vgpu.protocol import wire
from vgpu.protocol.wire import Activity, ActivityKind, Channels

VISIBLE_S = 5.0
"""Specified."""
CLIENT = 1001


class Arbiter:
    """A node whose arbiter schedules GPU time, and one container that requested a part of it."""

    def __init__(self, node: ArbiterNode, suspending: Suspendability) -> None:
        self.node = node
        self.device = os.memfd_create("device")
        self.scheduler = NodeScheduler(lambda: None, suspending=lambda _: suspending, watchdog_s=0)
        node.allocate("k", Grant("default", "a", "uid-a", "main", (GrantGpu(GPU, 1000, 30),)))
        self.server = ArbiterServer(node.folder, node.limits, node_memory=node.node_memory, scheduler=self.scheduler)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def reasons(self) -> list[Reason]:
        with self.server.lock:
            return [finding.reason for finding in enforcements(self.server)["k"].findings]

    def gpu_time(self) -> LimitState:
        with self.server.lock:
            return enforcements(self.server)["k"].gpu_time

    def process_with_context(self) -> Process:
        process = self.node.process()
        process.send(wire.Context(0, wire.Step.DONE, 0))
        return process

    def channels(self, *, unlisted: bool = False, client: int = CLIENT) -> Process:
        """The connection for GPU time of this very process."""
        scheduler = self.node.connect().hello(wire.FOR_GPU_TIME)
        self.reports(scheduler, unlisted=unlisted, client=client)
        return scheduler

    def reports(self, scheduler: Process, *, unlisted: bool = False, client: int = CLIENT) -> None:
        packet = wire.encode(1, Channels(0, client, 2, (3, 4), (), unlisted=unlisted, fresh=True))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.device]))
        scheduler.sock.sendmsg([packet], [rights])

    def close(self) -> None:
        self.server.stop()
        self._thread.join(10)
        self.scheduler.close()
        os.close(self.device)


@pytest.fixture
def arbiters(node: ArbiterNode, driver: Driver) -> Iterator[Callable[..., Arbiter]]:
    made: list[Arbiter] = []

    def make(suspending: Suspendability = Suspendability()) -> Arbiter:  # noqa: B008 - it is frozen
        made.append(Arbiter(node, suspending))
        return made[-1]

    yield make
    for arbiter in made:
        arbiter.close()
    assert driver.owed() == 0, "every container runs after the end"


def test_a_context_without_channels_is_reported_after_two_seconds_and_no_longer_when_they_come(
    arbiters: Callable[..., Arbiter],
) -> None:
    arbiter = arbiters()
    began_s = time.monotonic()
    arbiter.process_with_context()
    assert arbiter.gpu_time() is LimitState.ENFORCED
    wait_for(lambda: arbiter.reasons() == [Reason.NO_CHANNELS], VISIBLE_S)
    assert time.monotonic() - began_s >= NO_CHANNELS_S
    assert arbiter.gpu_time() is LimitState.UNENFORCED
    arbiter.channels()
    wait_for(lambda: arbiter.reasons() == [], VISIBLE_S)


def test_a_context_that_is_destroyed_owes_no_channels(arbiters: Callable[..., Arbiter]) -> None:
    arbiter = arbiters()
    process = arbiter.process_with_context()
    wait_for(lambda: arbiter.reasons() == [Reason.NO_CHANNELS], VISIBLE_S)
    process.send(wire.Context(0, wire.Step.GONE, 0))
    wait_for(lambda: arbiter.reasons() == [], VISIBLE_S)


def mps_server() -> MemoryReading:
    return MemoryReading(time.monotonic(), {GPU: {1: MIB}}, {1: SeenProcess(0, None, 0, mps_server=True)})


def mps_client() -> MemoryReading:
    """This very process is one."""
    pid = os.getpid()
    return MemoryReading(time.monotonic(), {GPU: {pid: MIB}}, {pid: SeenProcess(0, None, 0)}, frozenset({pid}))


def test_under_an_mps_server_that_is_the_reason(meter: HandMeter, arbiters: Callable[..., Arbiter]) -> None:
    arbiter = arbiters()
    arbiter.process_with_context()
    meter._report(mps_server())
    wait_for(lambda: arbiter.reasons() == [Reason.MPS], VISIBLE_S)


def test_a_client_of_mps_is_gated_whatever_channels_it_reports(
    meter: HandMeter, arbiters: Callable[..., Arbiter], driver: Driver
) -> None:
    arbiter = arbiters()
    process = arbiter.process_with_context()
    scheduler = arbiter.channels()
    scheduler.send(Activity(ActivityKind.WORK))
    wait_for(lambda: driver.channels_off(CLIENT), VISIBLE_S)  # its cap of 30 %
    meter._report(mps_client())
    wait_for(lambda: set(arbiter.reasons()) == {Reason.MPS, Reason.GATED}, VISIBLE_S)
    wait_for(lambda: not driver.channels_off(CLIENT), VISIBLE_S)
    calls = len(driver.calls)
    page = process.page
    assert page is not None
    wait_for(lambda: page[wire.GPU_TIME_AT // 8 + 1] >> 32, VISIBLE_S)
    assert not any(disable for _, disable in driver.calls[calls:])
    assert "MPS" in arbiter.scheduler.statuses()["k"].trouble
    meter._report(MemoryReading(time.monotonic(), {GPU: {}}))
    wait_for(lambda: arbiter.reasons() == [], VISIBLE_S)
    wait_for(lambda: driver.channels_off(CLIENT), VISIBLE_S)


def test_a_gpu_that_does_not_answer_leaves_a_client_of_mps_what_it_is(
    meter: HandMeter, arbiters: Callable[..., Arbiter]
) -> None:
    arbiter = arbiters()
    arbiter.process_with_context()
    meter._report(mps_client())
    wait_for(lambda: arbiter.reasons() == [Reason.MPS], VISIBLE_S)
    meter._report(MemoryReading(time.monotonic()))
    wait_for(lambda: not meter._readings, VISIBLE_S)
    assert arbiter.reasons() == [Reason.MPS]


@pytest.mark.parametrize("mps", [False, True])
def test_a_context_without_channels_has_its_launches_delayed_until_they_come(
    meter: HandMeter, arbiters: Callable[..., Arbiter], driver: Driver, mps: bool
) -> None:
    arbiter = arbiters()
    process = arbiter.process_with_context()
    scheduler = arbiter.node.connect().hello(
        wire.FOR_GPU_TIME
    )  # as a library does whose driver's calls are of an unknown form
    if mps:
        meter._report(mps_server())
    wait_for(lambda: set(arbiter.reasons()) == {Reason.MPS if mps else Reason.NO_CHANNELS, Reason.GATED}, VISIBLE_S)
    scheduler.send(Activity(ActivityKind.WORK))
    page = process.page
    assert page is not None
    wait_for(lambda: page[wire.GPU_TIME_AT // 8 + 1] >> 32, VISIBLE_S)  # its cap of 30 %
    assert driver.calls == []
    arbiter.reports(scheduler)
    wait_for(lambda: arbiter.reasons() == [], VISIBLE_S)
    wait_for(lambda: driver.channels_off(CLIENT), VISIBLE_S)


def test_more_channels_than_a_list_takes_are_reported_by_the_list_of_an_old_library(
    arbiters: Callable[..., Arbiter],
) -> None:
    arbiter = arbiters()
    arbiter.process_with_context()
    arbiter.channels(unlisted=True)
    wait_for(lambda: set(arbiter.reasons()) == {Reason.CHANNELS_UNLISTED, Reason.GATED}, VISIBLE_S)


@pytest.mark.parametrize("reason", [Reason.UNKNOWN_DRIVER, Reason.NO_SUSPEND])
def test_a_driver_that_does_not_suspend_is_reported(
    arbiters: Callable[..., Arbiter], driver: Driver, reason: Reason
) -> None:
    arbiter = arbiters(Suspendability(reason, "by the trial"))
    arbiter.process_with_context()
    scheduler = arbiter.channels()
    wait_for(lambda: set(arbiter.reasons()) == {reason, Reason.GATED}, VISIBLE_S)
    scheduler.send(Activity(ActivityKind.WORK))
    wait_for(lambda: arbiter.scheduler.statuses()["k"].working, VISIBLE_S)
    assert driver.calls == []


def test_a_thread_of_a_gpu_that_hangs_in_the_driver_is_reported_while_it_hangs(
    arbiters: Callable[..., Arbiter], driver: Driver
) -> None:
    let_go = threading.Event()
    driver.before = lambda _client, disable: None if not disable else (let_go.wait(20), None)[1]
    arbiter = arbiters()
    arbiter.process_with_context()
    arbiter.channels().send(
        Activity(ActivityKind.WORK)
    )  # it is suspended at its cap of 30 %, which is the call that hangs
    try:
        wait_for(lambda: Reason.ARBITER_STALLED in arbiter.reasons(), VISIBLE_S)
    finally:
        let_go.set()
    wait_for(lambda: arbiter.reasons() == [], VISIBLE_S)


def test_a_process_without_a_thread_is_never_suspended_and_is_gated(
    arbiters: Callable[..., Arbiter], driver: Driver
) -> None:
    arbiter = arbiters()
    process = arbiter.process_with_context()
    process.send(wire.Report(1, True))
    scheduler = arbiter.channels()
    wait_for(lambda: set(arbiter.reasons()) == {Reason.NO_THREAD, Reason.GATED}, VISIBLE_S)
    page = process.page
    assert page is not None
    scheduler.send(Activity(ActivityKind.WORK))
    wait_for(lambda: page[wire.GPU_TIME_AT // 8 + 1] >> 32, VISIBLE_S)  # its cap of 30 %
    assert not any(disable for _, disable in driver.calls)


def test_a_suspended_process_that_loses_its_thread_is_resumed(arbiters: Callable[..., Arbiter], driver: Driver) -> None:
    arbiter = arbiters()
    process = arbiter.process_with_context()
    scheduler = arbiter.channels()
    scheduler.send(Activity(ActivityKind.WORK))
    wait_for(lambda: driver.channels_off(CLIENT), VISIBLE_S)  # its cap of 30 %
    process.send(wire.Report(1, True))
    wait_for(lambda: Reason.NO_THREAD in arbiter.reasons(), VISIBLE_S)
    wait_for(lambda: not driver.channels_off(CLIENT), VISIBLE_S)
    calls = len(driver.calls)
    page = process.page
    assert page is not None
    wait_for(lambda: page[wire.GPU_TIME_AT // 8 + 1] >> 32, VISIBLE_S)
    assert not any(disable for _, disable in driver.calls[calls:])
    process.close()
    wait_for(lambda: driver.channels_off(CLIENT), VISIBLE_S)
