"""The arbiter's loop: one thread, every socket of every grant directory.

It passes bytes and time on and decides nothing: `ServedContainer` decides by its ledger, and `Attention` chooses the container to read next. An error on
one connection or directory affects no other.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from arbiter.attention import ROUND_S, Attention
from arbiter.connection import Connection
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.grant_file import same_place
from arbiter.grant_watch import GrantWatch
from arbiter.listeners import Listeners
from arbiter.memory.attribution import Attributor
from arbiter.memory.container import ContainerOptions, ServedContainer
from arbiter.memory.contexts import NodeMemory
from arbiter.memory.tracer import Suspect
from arbiter.memory.unlisted import UnlistedMemory
from arbiter.node_swapping import NodeSwapping
from arbiter.sensors import GpuSensors
from arbiter.swap.node import SwapNode
from vgpu.protocol.status import KillStatus

ACCEPTS_A_PIECE: Final = 2
"""Limits the delay of running processes when many start at once: one takes up to half a millisecond (measured)."""
LATE_S: Final = 0.05
"""Largest delay of a time-out, if a container has unread messages."""
RESCAN_S: Final = 1.0
"""The folder is read this often even without an inotify event. Guessed: an event is hardly ever lost."""
SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Temporary errors: too many files are open, or there is too little memory. The failed action is retried at the next rescan."""
_log = structlog.get_logger()


class ArbiterServer:
    """Serves every directory under `grants_dir`, at sockets there or, if given, in a directory of the same name in `sockets_dir`.
    All changes are made under `lock`, so a reader acquires it to read."""

    def __init__(
        self,
        grants_dir: Path,
        limits: ContainerOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        node_memory: NodeMemory | None = None,
        scheduler: NodeScheduler | None = None,
        sockets_dir: Path | None = None,
        attributor: Attributor | None = None,
        unlisted_memory: UnlistedMemory | None = None,
        swap_node: SwapNode | None = None,
        sensors: GpuSensors | None = None,
    ) -> None:
        grants_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.containers: dict[str, ServedContainer] = {}
        self.lock = threading.Lock()
        self.came_round_at_s = clock()
        """When the loop last completed a round; /healthz reads it."""
        self.bad_packets_before = self.kills_before = 0
        self.refused_before: Counter[str] = Counter()
        """Totals of removed directories, so that the counters never decrease."""
        self.node_memory = node_memory if node_memory is not None else NodeMemory()
        self.attributor = attributor if attributor is not None else Attributor()
        self.unlisted_memory = unlisted_memory if unlisted_memory is not None else UnlistedMemory()
        self.scheduler, self.sensors = scheduler, sensors
        self.swapping = NodeSwapping(swap_node, self.containers, clock)
        self._folder, self._sockets, self._clock = grants_dir, sockets_dir, clock
        self._limits = limits if limits is not None else ContainerOptions()
        self._stopping = False
        self._poller = selectors.EpollSelector()
        self._stop_out, self._stop_in = socket.socketpair()
        self._stop_out.setblocking(False)
        self._watch = GrantWatch(grants_dir)
        self._poller.register(self._stop_out, selectors.EVENT_READ, self._stopped)
        self._poller.register(self._watch.fd, selectors.EVENT_READ, self._folder_changed)
        if self.node_memory.meter is not None:
            self._poller.register(self.node_memory.meter.fd, selectors.EVENT_READ, self._measured)
        if self.node_memory.tracer is not None:
            self._poller.register(self.node_memory.tracer.fd, selectors.EVENT_READ, self._traced)
        if swap_node is not None:
            self._poller.register(swap_node.fd, selectors.EVENT_READ, swap_node.turn)
        self._attention: dict[ServedContainer, Attention] = {}
        self._resting: dict[ServedContainer, float] = {}
        """Throttled containers, and until when they wait."""
        self._deadlines: dict[ServedContainer, float] = {}
        """The next deadline of each container that waits for something. Updated by `_settle`, so that a round costs the same with one
        container and with hundreds."""
        self._broken: set[str] = set()
        self._listeners = Listeners(self._attention, self._accept)
        self._rescan(opens_at_s=clock() + self._limits.grace_s)
        self._rescan_at_s = clock() + RESCAN_S

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            begun_s = self._clock()  # this round reads all messages sent before this
            ready = self._poller.select(self._pause_s())
            with self.lock:
                self._attend(ready, begun_s)
                self._time_passed(begun_s)
                self.swapping.decide(self._settle)
                self.came_round_at_s = self._clock()
        self._close()

    def _attend(self, ready: list[tuple[selectors.SelectorKey, int]], begun_s: float) -> None:
        """Do the arbiter's own actions first, then one piece per container until the round's time is over: the containers with the least recent service
        come first."""
        containers = []
        for key, _ in ready:
            if isinstance(key.data, ServedContainer):
                containers.append(key.data)
            else:
                key.data()
        served = [container for container in containers if container in self._attention]
        for container in sorted(served, key=lambda one: self._attention[one].had):
            attention = self._attention.get(container)
            if attention is None:  # its directory was removed meanwhile
                continue
            attention.serve()
            if (until_s := attention.rest_s(self._clock())) is not None:
                self._rest(container, until_s)
            if self._clock() - begun_s > ROUND_S:
                return

    def _rest(self, container: ServedContainer, until_s: float) -> None:
        if container in self._attention:
            self._attention[container].resting = True
            self._poller.unregister(self._attention[container].fd)
            self._resting[container] = until_s

    def throttles(self) -> dict[str, int]:
        """How often each container was throttled; only containers that ever were."""
        found = Counter(self.swapping.throttles())
        found.update({one.folder.name: its.throttles for one, its in list(self._attention.items()) if its.throttles})
        return found

    def refused(self) -> Counter[str]:
        """Number of connections that the arbiter rejected or closed, by reason."""
        return sum((container.refused for container in list(self.containers.values())), self.refused_before)

    def killed(self) -> tuple[KillStatus, ...]:
        """Processes that were recently killed for their containers' limits."""
        return self.node_memory.kills.lately(self._clock())

    def gpus(self) -> frozenset[str]:
        """UUIDs of the GPUs in any grant. For any thread."""
        with self.lock:
            grants = [container.grant for container in self.containers.values() if container.grant is not None]
        return frozenset(gpu.uuid for grant in grants for gpu in grant.gpus)

    def stop(self) -> None:
        """End `run`. A signal handler or another thread may call it, repeatedly and after the end."""
        self._stopping = True
        with suppress(OSError):  # a closed socket has no descriptor that may have been reused
            self._stop_in.send(b"x", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _stopped(self) -> None:
        self._stop_out.recv(64)

    def _measured(self) -> None:
        meter = self.node_memory.meter
        if meter is None:
            return
        for taken in meter.taken():
            reading = self.attributor.attribute(taken, self.containers, self.swapping.copier_pids)
            self.swapping.measure(reading)
            for container in self.containers.values():
                if container.evaluate(reading):
                    self._settle(container)
            self.unlisted_memory.evaluate(reading, self.containers)
            self._trace()

    def _trace(self) -> None:
        """Pass the unconnected processes with GPU memory to the tracer."""
        if self.node_memory.tracer is not None:
            contexts = [container.contexts for container in self.containers.values()]
            suspects = {Suspect(pid, of.starts.get(pid, 0)) for of in contexts for pid in of.suspects()}
            self.node_memory.tracer.suspect(suspects)

    def _traced(self) -> None:
        """The tracer has results: evaluate them now, because a bypassing process may be gone at the next reading."""
        if self.node_memory.tracer is not None and self.node_memory.tracer.any_results():
            for container in self.containers.values():
                container.traced()

    def _want_gpus(self) -> None:
        if self.node_memory.meter is not None:
            grants = [container.grant for container in self.containers.values() if container.grant is not None]
            self.node_memory.meter.want(gpu.uuid for grant in grants for gpu in grant.gpus)

    def _pause_s(self) -> float:
        deadlines = (at_s + LATE_S * (one in self._resting) for one, at_s in self._deadlines.items())
        own_s = self._rescan_at_s, self.swapping.due_s
        return max(0.0, min(*own_s, *deadlines, *self._resting.values()) - self._clock())

    def _time_passed(self, now_s: float) -> None:
        for container in [one for one, until_s in self._resting.items() if now_s >= until_s]:
            del self._resting[container]
            self._attention[container].resting = False
            self._poller.register(self._attention[container].fd, selectors.EVENT_READ, container)
        for container in [c for c, deadline_s in self._deadlines.items() if now_s >= deadline_s]:
            if now_s >= self._deadlines[container] + LATE_S or not self._attention[container].unread():
                container.expire(now_s)
                self._settle(container)
        if now_s >= self._rescan_at_s:
            self._rescan()
            self._rescan_at_s = now_s + RESCAN_S

    def _folder_changed(self) -> None:
        changed = set(self._watch.changed())
        if not changed:
            return
        if None in changed:
            self._rescan()
        for name in changed:
            if name is not None and name in self.containers:
                self._load(self.containers[name])
        self._want_gpus()

    def _load(self, container: ServedContainer) -> None:
        before = container.grant
        container.load()
        if (
            self.scheduler is not None
            and before is not None
            and container.grant is not None
            and container.grant is not before
        ):
            if same_place(before, container.grant):
                self.scheduler.change(container.folder.name, container.grant, container.burst)
            else:
                self.scheduler.drop(container.folder.name)
        self._settle(container)

    def _rescan(self, opens_at_s: float = 0.0) -> None:
        """Update the containers from the folder."""
        self._listeners.resume()
        try:
            with os.scandir(self._folder) as entries:
                there = {entry.name: entry.inode() for entry in entries if entry.is_dir(follow_symlinks=False)}
        except OSError as error:
            if error.errno not in SHORT:
                raise
            _log.error("the grants folder cannot be read now", reason=str(error))
            return
        for name, container in list(self.containers.items()):
            if there.get(name) != container.inode:  # gone, or made anew under the same name
                self._remove(name)
        for container in [container for container in self.containers.values() if container.unreachable]:
            self._listeners.renew(container)
        self._broken &= there.keys()
        for name in sorted(there.keys() - self.containers.keys()):
            if not name.startswith("."):
                self._add(name, opens_at_s)
        self._want_gpus()

    def _add(self, name: str, opens_at_s: float) -> None:
        folder = self._folder / name
        self._watch.follow(folder)
        try:
            container = ServedContainer(
                folder, self._limits, self._clock, opens_at_s, self.node_memory, self._sockets, self.swapping.node, self._siblings
            )  # fmt: skip
        except OSError as error:
            if name not in self._broken:  # retried at each rescan, logged once
                _log.error("grant directory cannot be served", grant=name, reason=str(error))
            self._broken.add(name)
            return
        self._broken.discard(name)
        self.containers[name] = container
        self._attention[container] = attention = Attention(self._clock())
        self._poller.register(attention.fd, selectors.EVENT_READ, container)
        self._settle(container)
        self._listeners.add(container)

    def _siblings(self, of: ServedContainer) -> dict[str, str]:
        """The other grant directories of its pod, by the runtime's ID of their containers, as far as these are known."""
        if of.grant is None:
            return {}
        return {
            one.container_id: name
            for name, one in self.containers.items()
            if one.container_id not in ("", of.container_id) and one.grant is not None and one.grant.uid == of.grant.uid
        }

    def _remove(self, name: str) -> None:
        container = self.containers.pop(name)
        self._listeners.remove(container)
        if self.scheduler is not None:
            self.scheduler.drop(name)
        container.close()
        self._forget(container)
        self._deadlines.pop(container, None)
        self._resting.pop(container, None)
        attention = self._attention.pop(container)
        if not attention.resting:
            self._poller.unregister(attention.fd)
        attention.close()
        self.refused_before += container.refused
        self.bad_packets_before += container.bad_packets
        self.kills_before += container.kills
        _log.info("grant directory is gone", grant=name)

    def _accept(self, container: ServedContainer) -> None:
        """Accept waiting connections, and read what each has sent already: HELLO comes with the connection."""
        for _ in range(ACCEPTS_A_PIECE):
            connection = self._listeners.next_of(container)
            if connection is None:
                break
            self._folder_changed()  # a grant that was there before the process is read before it is welcomed
            if connection.number not in container.connections:
                break  # the directory was removed meanwhile
            serve = partial(self._serve, container, connection)
            self._attention[container].add(connection.sock.fileno(), serve)
            self._read(container, connection)
        self._settle(container)

    def _serve(self, container: ServedContainer, connection: Connection) -> None:
        if not connection.greeted:
            self._folder_changed()
        self._read(container, connection)
        self._settle(container)

    def _read(self, container: ServedContainer, connection: Connection) -> None:
        was_full = connection.full
        container.serve(connection)
        if connection.full is not was_full and connection.number in container.connections:
            self._attention[container].await_reader(connection.sock.fileno(), full=connection.full)

    def _settle(self, container: ServedContainer) -> None:
        """After any event of a container: remove ended connections, and record its next deadline."""
        self._forget(container)
        deadline_s = container.deadline_s() if container in self._attention else None
        if deadline_s is None:
            self._deadlines.pop(container, None)
        else:
            self._deadlines[container] = deadline_s

    def _forget(self, container: ServedContainer) -> None:
        attention = self._attention.get(container)
        for connection in container.connections.gone():
            if attention is not None:
                attention.remove(connection.sock.fileno())
            connection.close()
        exempt = container.newly_exempt()
        if self.scheduler is not None and exempt is not None:
            self.scheduler.never_suspend(container.folder.name, exempt)
        contexts = container.memory.begun_contexts()
        if self.scheduler is not None and contexts is not None:
            self.scheduler.contexts(container.folder.name, contexts)
        for connection in container.connections.handed_over():
            if attention is not None:
                attention.remove(connection.sock.fileno())
            if self.swapping.take(container, connection):
                continue
            if self.scheduler is not None and container.grant is not None:
                self.scheduler.adopt(
                    container.folder.name, container.grant, container.page, connection, container.burst
                )
            else:
                connection.close()

    def _close(self) -> None:
        with self.lock:
            self.swapping.close()  # first: what is in host memory stays there for the next arbiter
            for name in list(self.containers):
                self._remove(name)
            self._poller.close()
            self._watch.close()
            self._stop_in.close()
            self._stop_out.close()
