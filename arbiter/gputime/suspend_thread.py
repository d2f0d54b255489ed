"""The thread of one GPU: reads the messages of the containers whose first GPU it is, and suspends and resumes on that GPU.

A message leads to the call within one wake-up. If a container has several GPUs, each is switched by its own thread. `SuspendHost` decides what to
switch, under its lock; calls to the driver are made without the lock. A container's messages are read no longer than its budget lasts.

The thread records when it is due again. If it wakes later, it was stalled and reports that before it reads a message: the arbiter did not act on
events meanwhile.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Final

import structlog

from arbiter import descriptors
from arbiter.budget import CHANNELS_COST
from arbiter.connection import BAD_PACKET, Connection, PeerGone
from arbiter.gputime.channels import ChannelGroup, ChannelState
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.suspend_host import SuspendHost
from arbiter.gputime.suspend_plan import PlannedSuspend
from arbiter.gputime.timer import Nap, Timer
from arbiter.gputime.warm_up import WarmUp
from arbiter.stalls import STALL_S
from vgpu.api.errors import BadDocument
from vgpu.protocol import wire

BEAT_S: Final = 0.2
"""Period of the heartbeat in pages. A suspended container resumes itself after 0.6 s without one."""
REST_S: Final = 1.0
"""Period while none of the GPU's containers is suspended or waits at its gate: then no container reads the heartbeat. A wake-up takes 0.3 ms (measured)."""
LATE_S: Final = 0.3
"""If a heartbeat is this late, containers may have resumed themselves: those that may not run are suspended again."""
WATCHDOG_S: Final = 0.01
"""The watchdog resumes at most one container in this time: a call takes 0.3 ms, in which no other is switched."""
NAP_US: Final = 100
"""Sleep while requests come. A core that sleeps for longer takes 0.05 ms more to wake, 0.3 at the p99; spinning instead takes a whole core, and time of
other GPUs' threads (bench/gpu_time/gpu-time.csv)."""
PACKETS_A_ROUND: Final = 16
QUIET_S: Final = 1.0
"""A container that sends garbage fills its own metric and not the log."""
_log = structlog.get_logger()


class SuspendThread:
    """See the module. `take`, `hang_up` and `wake_at` are called under the lock of `scheduler`."""

    def __init__(self, uuid: str, scheduler: SuspendHost) -> None:
        self.uuid = uuid
        self._scheduler, self._clock = scheduler, scheduler.clock
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = Timer()
        self._nap = Nap(self._epoll.fileno(), NAP_US)
        self._warm_up = WarmUp()
        self._connections: dict[int, tuple[GpuTimeContainer, Connection]] = {}
        self._throttled_until_s: dict[GpuTimeContainer, float] = {}
        """Containers that have used their budget, and until when they are not read."""
        self._unread_fds: dict[GpuTimeContainer, set[int]] = {}
        """Their descriptors with an unread message."""
        self._stopping = False
        self.alive_at_s = self._watchdog_at_s = self._clock()
        """When the thread last completed a round, or a call of the driver."""
        self._beat_due_s = self.alive_at_s + BEAT_S
        self._due_s = inf
        """When its next round is due; inf = it is in a call of the driver."""
        self._sleeps = False
        self.awake_until_s = 0.0
        """Until then it sleeps for short naps only."""
        self._quiet_until_s = 0.0
        self._wake_at_s = self._next_watchdog_s = inf
        self._to_close: list[ChannelGroup] = []
        """Channel groups to close."""
        self._to_resume: list[ChannelGroup] = []
        """Channel groups to resume before that: the arbiter closes the connection, and their process is alive."""
        for fd in (self._bell, self._timer.fd):
            self._epoll.register(fd, select.EPOLLIN)
        self._timer.set(self._beat_due_s)
        self._thread = threading.Thread(target=self._run, name=f"GPU {uuid}", daemon=True)

    def start(self) -> None:
        """Begin, once."""
        self._thread.start()

    def take(self, container: GpuTimeContainer, connection: Connection) -> None:
        """Read this connection from now on."""
        self._connections[connection.sock.fileno()] = (container, connection)
        self._epoll.register(connection.sock.fileno(), select.EPOLLIN)

    def unread(self, container: GpuTimeContainer) -> set[int]:
        """Its connections with an unread message now. None while the thread is being stopped: it reads no more."""
        if self._stopping:
            return set()
        ready = (self._connections[fd] for fd, _ in self._epoll.poll(0) if fd in self._connections)
        return {connection.number for owner, connection in ready if owner is container}

    def hang_up(self, container: GpuTimeContainer) -> None:
        """Shut the connections down; the thread notices that and cleans up."""
        for owner, connection in self._connections.values():
            if owner is container:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """From any thread. No effect on a thread that is being stopped, which is awake."""
        if not self._stopping and threading.current_thread() is not self._thread:
            os.eventfd_write(self._bell, 1)

    def wake_at(self, at_s: float) -> None:
        """Wake at that time at the latest."""
        self._wake_at_s = at_s
        throttled_until_s = min(self._throttled_until_s.values(), default=inf)
        self._timer.set(min(at_s, self._beat_due_s, self._next_watchdog_s, throttled_until_s))

    def beat_soon(self) -> None:
        """One of its containers is suspended or waits from now on, and reads the heartbeat."""
        self._beat_due_s = min(self._beat_due_s, self._clock() + BEAT_S)
        self.wake_at(self._wake_at_s)

    def lived_s(self, at_s: float) -> float:
        """When the thread was last alive, as far as is known at `at_s`: a sleeping thread that is not due yet counts as alive."""
        return at_s if self._sleeps and at_s <= self._due_s else self.alive_at_s

    def overdue_s(self, at_s: float) -> float:
        """For how long it has made no progress, though its next round was due or it is in a call of the driver."""
        return max(0.0, at_s - (self.alive_at_s if self._due_s == inf else max(self.alive_at_s, self._due_s)))

    def stop(self) -> None:
        """Resume every container of this thread, end the thread and close the connections."""
        self._stopping = True
        os.eventfd_write(self._bell, 1)
        if self._thread.ident is not None:
            self._thread.join()
        with self._scheduler.lock:
            for fd, (container, connection) in list(self._connections.items()):
                if (
                    container.page is None
                ):  # dropped, but its connection not closed yet: only this thread has its channel groups
                    self._lose(fd, lives=True)
                else:
                    connection.close()
            self._connections.clear()
        self._close_dropped()
        self._epoll.close()
        self._timer.close()
        self._warm_up.close()
        os.close(self._bell)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.round(self._wait())
        except BaseException:
            _log.critical(
                "the thread of a GPU failed: every container runs, and the arbiter ends", gpu=self.uuid, exc_info=True
            )
            self._scheduler.fail()
            raise

    def _wait(self) -> list[tuple[int, int]]:
        while (at_s := self._clock()) < self.awake_until_s:
            self.note_progress(at_s)
            self._warm_up.play(at_s)
            if self._nap.ends_early():
                break
        self.note_progress(self._timer.at_s)
        self._sleeps = True
        ready = self._epoll.poll()
        self._sleeps = False
        return ready

    def round(self, ready: Iterable[tuple[int, int]]) -> None:
        """One round: read these descriptors, then switch."""
        self.note_progress(0.0)
        for fd, events in ready:
            self._ready(fd, events)
        self._end_throttling()
        self._switch()

    def note_progress(self, due_s: float) -> None:
        """The thread is awake, and due again at that time, or now."""
        at_s = self._clock()
        if at_s - self._due_s >= STALL_S:
            with self._scheduler.lock:
                self._stalled(self._due_s, at_s)
        self._due_s = max(at_s, due_s)

    def _stalled(self, since_s: float, at_s: float) -> None:
        """Under the lock."""
        self.alive_at_s = at_s
        self._scheduler.stalled(self.uuid, since_s, at_s)
        self._beat(at_s)

    def _begin_driver_call(self) -> float:
        """A call to the driver begins; its duration is unknown."""
        self.note_progress(inf)
        began_s = self._clock()
        self._scheduler.pulse.expect(began_s)
        return began_s

    def _end_driver_call(self, began_s: float) -> float:
        """The call has returned; under the lock. Returns its duration, or the usual one if the arbiter was stalled during the call."""
        self._due_s = self.alive_at_s = at_s = self._clock()
        if at_s - began_s < STALL_S or (since_s := self._scheduler.pulse.stalled_since(began_s, at_s)) is None:
            return at_s - began_s
        self._stalled(since_s, at_s)
        return self._scheduler.policy.suspend_s

    def _called(self) -> None:
        """One of the driver's calls in a switch has returned: a switch of many channel groups is no hang."""
        self.alive_at_s = self._clock()

    def _ready(self, fd: int, events: int) -> None:
        if fd == self._bell:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        elif fd == self._timer.fd:
            self._timer.rang()
        else:
            with self._scheduler.lock:
                if fd in self._connections:
                    self._readable(fd, events)
            self._close_dropped()

    def _readable(self, fd: int, events: int) -> None:
        container, _ = self._connections[fd]
        if fd not in self._unread_fds.get(container, ()):
            self._read(fd)
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._lose(fd, lives=container.page is None)  # its unread messages do not matter any more

    def _read(self, fd: int) -> None:
        container, connection = self._connections[fd]
        try:
            for _ in range(PACKETS_A_ROUND):
                if not container.budget.may(self._clock()):
                    self._throttle(container, fd)
                    return
                received = connection.receive_with_fd()
                if received is None:
                    container.evidence.unread_connections.discard(connection.number)
                    return
                container.budget.spend(CHANNELS_COST if isinstance(received[1], wire.Channels) else 1.0)
                planned = self._scheduler.suspend_plan.suspend_for(self.uuid, container, received[1])
                if planned is not None:
                    self._suspend_and_handle(planned, container, connection, *received)
                    return
                self._handle(container, connection, *received, self._clock())
        except PeerGone:
            self._lose(fd, lives=container.page is None)
        except BadDocument as error:
            self._log_bad_packet(container, connection, error)
            self._lose(fd, lives=True)
        finally:
            self._give_up(container.sweep())

    def _suspend_and_handle(
        self,
        planned: PlannedSuspend,
        container: GpuTimeContainer,
        connection: Connection,
        fd: int | None,
        message: wire.Message,
    ) -> None:
        """Suspend as planned, without the lock as for every switch, then handle the message like any other."""
        self._scheduler.lock.release()
        try:
            at_s = self._begin_driver_call()
            status = planned.container.suspend(planned.channel_groups, self._called)
        finally:
            self._scheduler.lock.acquire()
        took_s = self._end_driver_call(at_s)
        self._handle(container, connection, fd, message, at_s)
        self._scheduler.suspended(planned.container, at_s, status, took_s)

    def _handle(
        self, container: GpuTimeContainer, connection: Connection, fd: int | None, message: wire.Message, at_s: float
    ) -> None:
        if fd is not None and not (isinstance(message, wire.Channels) and message.compute):
            descriptors.close(fd, container.name)
            fd = None
        self._scheduler.handle(container, connection, message, fd, at_s)

    def _log_bad_packet(self, container: GpuTimeContainer, connection: Connection, error: BadDocument) -> None:
        self._scheduler.counters.bad_packets += 1
        if self._clock() >= self._quiet_until_s:
            self._quiet_until_s = self._clock() + QUIET_S
            _log.warning(
                "bad packet on a connection for GPU time", grant=container.name, pid=connection.pid, reason=str(error)
            )
        connection.refuse(BAD_PACKET, str(error))

    def _lose(self, fd: int, *, lives: bool) -> None:
        container, connection = self._connections.pop(fd)
        self._unread_fds.get(container, set()).discard(fd)
        self._epoll.unregister(fd)
        channel_groups = self._scheduler.lose(container, connection)
        self._give_up([*container.sweep(), *channel_groups])
        if lives:
            self._to_resume += [
                channel_group for channel_group in channel_groups if channel_group.runs is not ChannelState.ON
            ]
        connection.close()

    def _give_up(self, channel_groups: list[ChannelGroup]) -> None:
        self._to_close += channel_groups
        self._to_resume += [channel_group for channel_group in channel_groups if channel_group.owes]

    def _throttle(self, container: GpuTimeContainer, fd: int) -> None:
        if container not in self._throttled_until_s:
            self._scheduler.counters.delayed_reads += 1
            self._throttled_until_s[container] = container.budget.again_s(self._clock())
            self._scheduler.set_throttled(container, throttled=True)
            self.wake_at(self._wake_at_s)
        self._unread_fds.setdefault(container, set()).add(fd)
        self._epoll.modify(fd, 0)

    def _end_throttling(self) -> None:
        if not self._throttled_until_s:
            return
        with self._scheduler.lock:
            at_s = self._clock()
            for container in [container for container, until_s in self._throttled_until_s.items() if until_s <= at_s]:
                del self._throttled_until_s[container]
                self._scheduler.set_throttled(container, throttled=False)
                for fd in self._unread_fds.pop(container, ()):
                    self._epoll.modify(fd, select.EPOLLIN)

    def _close_dropped(self) -> None:
        if self._to_resume:
            began_s = self._begin_driver_call()
            for channel_group in self._to_resume:
                channel_group.resume()
                self._called()
            with self._scheduler.lock:
                self._end_driver_call(began_s)
        for channel_group in self._to_close:
            channel_group.close()
        self._to_resume, self._to_close = [], []

    def _switch(self) -> None:
        scheduler = self._scheduler
        while True:
            with scheduler.lock:
                self.alive_at_s = at_s = self._clock()
                self._beat(at_s)
                step = scheduler.step(self.uuid)
                stopped = self._resume_stopped(at_s) if step is None else None
                if step is None:
                    scheduler.plan_suspends(self.uuid)
                    self._next_watchdog_s = max(self._watchdog_at_s + WATCHDOG_S, scheduler.watchdog.next_s(self.uuid))
                    self.wake_at(scheduler.decide_again_s(self.uuid))
            if step is None:
                if stopped is not None:
                    self._resume_again(stopped)
                return
            container, on = step
            began_s = self._begin_driver_call()
            status = container.switch(self.uuid, on, self._called)
            with scheduler.lock:
                scheduler.switched(container, on, status, self._end_driver_call(began_s))

    def _resume_again(self, stopped: GpuTimeContainer) -> None:
        began_s = self._begin_driver_call()
        for channel_group in stopped.channel_groups(self.uuid):
            if channel_group.runs is not ChannelState.OFF:
                channel_group.resume()
                self._called()
        with self._scheduler.lock:
            self._end_driver_call(began_s)

    def _resume_stopped(self, at_s: float) -> GpuTimeContainer | None:
        if at_s - self._watchdog_at_s < WATCHDOG_S:
            return None
        stopped = self._scheduler.watchdog.resume_stopped(self.uuid, at_s)
        self._watchdog_at_s = at_s if stopped is not None else self._watchdog_at_s
        return stopped

    def _beat(self, at_s: float) -> None:
        if at_s >= self._beat_due_s:
            late = at_s > self._beat_due_s + LATE_S
            self._beat_due_s = at_s + (BEAT_S if self._scheduler.beat(self.uuid, late) else REST_S)
