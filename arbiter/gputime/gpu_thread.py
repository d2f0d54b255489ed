"""The thread of one GPU: reads the messages of the containers whose first GPU it is, and suspends and resumes on that GPU.

From a message to the call is one wake-up. A gang's other GPUs are switched by their own threads. `Decisions` says what is to be switched,
under its lock; calls to the driver are made without the lock. A container's messages are read no longer than its budget lasts.

The thread knows when it is due again. If it comes later, it was stalled and reports that before it reads a message: what happened meanwhile
happened without it.
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

from arbiter.budget import CHANNELS_COST
from arbiter.connection import BAD_PACKET, Connection, Gone
from arbiter.gputime.channels import ChannelGroup, Runs
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.decisions import Decisions
from arbiter.gputime.preemption_plan import Order
from arbiter.gputime.timer import Nap, Timer
from arbiter.gputime.warm_up import WarmUp
from arbiter.stalls import STALL_S
from vgpu.api.errors import BadDocument
from vgpu.protocol import wire

BEAT_S: Final = 0.2
"""How often pages show that the arbiter lives. A suspended container resumes itself when they have not for 0.6 s."""
REST_S: Final = 1.0
"""How often they do while none of the GPU's containers is suspended or waits at its gate: then no container reads them. A wake-up takes 0.3 ms (measured)."""
LATE_S: Final = 0.3
"""So late with a beat, containers may have resumed themselves: what is to be suspended is suspended again."""
WATCHDOG_S: Final = 0.01
"""The watchdog resumes at most one container in this time: a call takes 0.3 ms, in which no other is switched."""
NAP_US: Final = 100
"""While requests come. A core that sleeps for longer takes 0.05 ms more to come back, 0.3 at the p99; spinning instead takes a whole core, and time of other GPUs' threads (bench/gpu_time/gpu-time.csv)."""
PACKETS_A_ROUND: Final = 16
QUIET_S: Final = 1.0
"""A container that sends garbage fills its own metric and not the log."""
_log = structlog.get_logger()


class GpuThread:
    """See the module. `take`, `hang_up` and `wake_at` are called under the lock of `scheduler`."""

    def __init__(self, uuid: str, scheduler: Decisions) -> None:
        self.uuid = uuid
        self._scheduler, self._clock = scheduler, scheduler.clock
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = Timer()
        self._nap = Nap(self._epoll.fileno(), NAP_US)
        self._warm_up = WarmUp()
        self._connections: dict[int, tuple[GpuTimeContainer, Connection]] = {}
        self._held_back: dict[GpuTimeContainer, float] = {}
        """Containers that have used their budget up, and until when they are not read."""
        self._deaf: dict[GpuTimeContainer, set[int]] = {}
        """Their descriptors on which a message waits."""
        self._stopping = False
        self.alive_at_s = self._watchdog_at_s = self._clock()
        """When the thread came round last."""
        self._beat_due_s = self.alive_at_s + BEAT_S
        self._due_s = inf
        """By when it is to come on; inf = in the driver."""
        self._sleeps = False
        self.awake_until_s = 0.0
        """Until then it sleeps for naps only."""
        self._quiet_until_s = 0.0
        self._wake_at_s = self._next_watchdog_s = inf
        self._left: list[ChannelGroup] = []
        """To be closed."""
        self._lives_on: list[ChannelGroup] = []
        """To be started before that: we hang up, and their process lives."""
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
        """Its connections on which something waits now."""
        ready = (self._connections[fd] for fd, _ in self._epoll.poll(0) if fd in self._connections)
        return {connection.number for owner, connection in ready if owner is container}

    def hang_up(self, container: GpuTimeContainer) -> None:
        """The thread sees the hang-up and does the rest."""
        for owner, connection in self._connections.values():
            if owner is container:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """From any thread."""
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._bell, 1)

    def wake_at(self, at_s: float) -> None:
        """Come round at that time at the latest."""
        self._wake_at_s = at_s
        held_back_s = min(self._held_back.values(), default=inf)
        self._timer.set(min(at_s, self._beat_due_s, self._next_watchdog_s, held_back_s))

    def beat_soon(self) -> None:
        """One of its containers is off or waits from now on, and looks whether we live."""
        self._beat_due_s = min(self._beat_due_s, self._clock() + BEAT_S)
        self.wake_at(self._wake_at_s)

    def lived_s(self, at_s: float) -> float:
        """When the thread lived last, as far as is known at `at_s`: one that sleeps and is not due yet could come at any time."""
        return at_s if self._sleeps and at_s <= self._due_s else self.alive_at_s

    def stop(self) -> None:
        """Resume every container here, then end the thread and hang up."""
        self._stopping = True
        os.eventfd_write(self._bell, 1)
        if self._thread.ident is not None:
            self._thread.join()
        with self._scheduler.lock:
            for fd, (container, connection) in list(self._connections.items()):
                if (
                    container.page is None
                ):  # dropped, and its hang-up not seen yet: only this thread knows its channel groups
                    self._lose(fd, lives=True)
                else:
                    connection.sock.close()
            self._connections.clear()
        self._close_left()
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
            self.comes(at_s)
            self._warm_up.play(at_s)
            if self._nap.ends_early():
                break
        self.comes(self._timer.at_s)
        self._sleeps = True
        ready = self._epoll.poll()
        self._sleeps = False
        return ready

    def round(self, ready: Iterable[tuple[int, int]]) -> None:
        """Awake: read these descriptors, then switch."""
        self.comes(0.0)
        for fd, events in ready:
            self._ready(fd, events)
        self._listen_again()
        self._switch()

    def comes(self, due_s: float) -> None:
        """The thread is here, and due again at that time, or now."""
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

    def _calls(self) -> float:
        """A call to the driver begins; it takes as long as it takes."""
        self.comes(inf)
        began_s = self._clock()
        self._scheduler.pulse.expect(began_s)
        return began_s

    def _called(self, began_s: float) -> float:
        """It is back, under the lock. How long the call itself took; where the arbiter was stalled in it, as long as is usual."""
        self._due_s = self.alive_at_s = at_s = self._clock()
        if at_s - began_s < STALL_S or (since_s := self._scheduler.pulse.stalled_since(began_s, at_s)) is None:
            return at_s - began_s
        self._stalled(since_s, at_s)
        return self._scheduler.policy.suspend_s

    def _ready(self, fd: int, events: int) -> None:
        if fd == self._bell:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        elif fd == self._timer.fd:
            self._timer.rang()
        else:
            with self._scheduler.lock:
                if fd in self._connections:
                    self._heard(fd, events)
            self._close_left()

    def _heard(self, fd: int, events: int) -> None:
        container, _ = self._connections[fd]
        if fd not in self._deaf.get(container, ()):
            self._read(fd)
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._lose(fd, lives=container.page is None)  # what it still had to say does not matter any more

    def _read(self, fd: int) -> None:
        container, connection = self._connections[fd]
        try:
            for _ in range(PACKETS_A_ROUND):
                if not container.budget.may(self._clock()):
                    self._hold_back(container, fd)
                    return
                received = connection.receive_with_fd()
                if received is None:
                    container.evidence.behind.discard(connection.number)
                    return
                container.budget.spend(CHANNELS_COST if isinstance(received[1], wire.Channels) else 1.0)
                order = self._scheduler.orders.of(self.uuid, container, received[1])
                if order is not None:
                    self._suspend_and_hear(order, container, connection, *received)
                    return
                self._hear(container, connection, *received, self._clock())
        except Gone:
            self._lose(fd, lives=container.page is None)
        except BadDocument as error:
            self._complain(container, connection, error)
            self._lose(fd, lives=True)
        finally:
            self._give_up(container.sweep())

    def _suspend_and_hear(
        self,
        order: Order,
        container: GpuTimeContainer,
        connection: Connection,
        fd: int | None,
        message: wire.Message,
    ) -> None:
        """Obey an order, without the lock as at every switch, then do what is done with every message."""
        self._scheduler.lock.release()
        try:
            at_s = self._calls()
            status = order.container.stop(order.channel_groups)
        finally:
            self._scheduler.lock.acquire()
        took_s = self._called(at_s)
        self._hear(container, connection, fd, message, at_s)
        self._scheduler.stopped(order.container, at_s, status, took_s)

    def _hear(
        self, container: GpuTimeContainer, connection: Connection, fd: int | None, message: wire.Message, at_s: float
    ) -> None:
        if fd is not None and not (isinstance(message, wire.Channels) and message.compute):
            os.close(fd)
            fd = None
        self._scheduler.hear(container, connection, message, fd, at_s)

    def _complain(self, container: GpuTimeContainer, connection: Connection, error: BadDocument) -> None:
        self._scheduler.counts.bad_packets += 1
        if self._clock() >= self._quiet_until_s:
            self._quiet_until_s = self._clock() + QUIET_S
            _log.warning(
                "bad packet on a connection for GPU time", grant=container.name, pid=connection.pid, reason=str(error)
            )
        connection.refuse(BAD_PACKET, str(error))

    def _lose(self, fd: int, *, lives: bool) -> None:
        container, connection = self._connections.pop(fd)
        self._deaf.get(container, set()).discard(fd)
        self._epoll.unregister(fd)
        channel_groups = self._scheduler.lose(container, connection)
        self._give_up([*container.sweep(), *channel_groups])
        if lives:
            self._lives_on += [channel_group for channel_group in channel_groups if channel_group.runs is not Runs.ON]
        connection.sock.close()

    def _give_up(self, channel_groups: list[ChannelGroup]) -> None:
        self._left += channel_groups
        self._lives_on += [channel_group for channel_group in channel_groups if channel_group.owes]

    def _hold_back(self, container: GpuTimeContainer, fd: int) -> None:
        if container not in self._held_back:
            self._scheduler.counts.held_back += 1
            self._held_back[container] = container.budget.again_s(self._clock())
            self._scheduler.hush(container, unheard=True)
            self.wake_at(self._wake_at_s)
        self._deaf.setdefault(container, set()).add(fd)
        self._epoll.modify(fd, 0)

    def _listen_again(self) -> None:
        if not self._held_back:
            return
        with self._scheduler.lock:
            at_s = self._clock()
            for container in [container for container, until_s in self._held_back.items() if until_s <= at_s]:
                del self._held_back[container]
                self._scheduler.hush(container, unheard=False)
                for fd in self._deaf.pop(container, ()):
                    self._epoll.modify(fd, select.EPOLLIN)

    def _close_left(self) -> None:
        if self._lives_on:
            began_s = self._calls()
            for channel_group in self._lives_on:
                channel_group.resume()
            with self._scheduler.lock:
                self._called(began_s)
        for channel_group in self._left:
            channel_group.close()
        self._lives_on, self._left = [], []

    def _switch(self) -> None:
        scheduler = self._scheduler
        while True:
            with scheduler.lock:
                self.alive_at_s = at_s = self._clock()
                self._beat(at_s)
                step = scheduler.step(self.uuid)
                ill = self._resume_stopped(at_s) if step is None else None
                if step is None:
                    scheduler.give_orders(self.uuid)
                    self._next_watchdog_s = max(self._watchdog_at_s + WATCHDOG_S, scheduler.watchdog.next_s(self.uuid))
                    self.wake_at(scheduler.decide_again_s(self.uuid))
            if step is None:
                if ill is not None:
                    self._start_again(ill)
                return
            container, on = step
            began_s = self._calls()
            status = container.switch(self.uuid, on)
            with scheduler.lock:
                scheduler.switched(container, on, status, self._called(began_s))

    def _start_again(self, ill: GpuTimeContainer) -> None:
        began_s = self._calls()
        for channel_group in ill.channel_groups(self.uuid):
            if channel_group.runs is not Runs.OFF:
                channel_group.resume()
        with self._scheduler.lock:
            self._called(began_s)

    def _resume_stopped(self, at_s: float) -> GpuTimeContainer | None:
        if at_s - self._watchdog_at_s < WATCHDOG_S:
            return None
        ill = self._scheduler.watchdog.resume_stopped(self.uuid, at_s)
        self._watchdog_at_s = at_s if ill is not None else self._watchdog_at_s
        return ill

    def _beat(self, at_s: float) -> None:
        if at_s >= self._beat_due_s:
            late = at_s > self._beat_due_s + LATE_S
            self._beat_due_s = at_s + (BEAT_S if self._scheduler.beat(self.uuid, late) else REST_S)
