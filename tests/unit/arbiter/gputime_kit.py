"""GPU time without a server and without a driver: socket pairs for processes, and a double of the one call that channel groups make."""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from arbiter.connection import Connection
from arbiter.descriptors import _closer
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.page import ContainerPage
from tests.unit.arbiter.conftest import wait_for
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime import resource_manager as rm
from vgpu.protocol import wire
from vgpu.protocol.status import GpuTimeStatus
from vgpu.protocol.wire import Activity, ActivityKind, Channels

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"
DESCRIPTORS = Path("/proc/self/fd")
_numbers = itertools.count(1)


def open_descriptors() -> int:
    assert _closer.settled(20)
    return len(list(DESCRIPTORS.iterdir()))


@dataclass
class Driver:
    """The kernel driver, which counts disables. It reads the bytes of each call and refuses those that are not as they must be."""

    calls: list[tuple[int, bool]] = field(default_factory=list)
    """Client, disable?"""
    no_channel: int = 0x21
    """Its answer to a channel that does not exist."""
    before: Callable[[int, bool], None] | None = None
    """Called before each call takes effect."""
    _count: Counter[tuple[int, int]] = field(default_factory=Counter)
    _refused: dict[tuple[int, bool], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        os.fstat(fd)
        assert request == rm.CONTROL_REQUEST
        client, subdevice, command, flags, at, length, status = struct.unpack("<4I Q 2I", argument)
        assert (command, flags, length, status) == (rm.DISABLE_CHANNELS, 0, rm.PARAMETERS_BYTES, status)
        assert subdevice
        disable, clients, channels = _read_list(at)
        assert set(clients) == {client}, "no channel of another client"
        if self.before is not None:
            self.before(client, disable)
        with self._lock:
            answer = self._refused.get((client, disable), rm.OK)
            if channels == (rm.NO_CHANNEL,):
                answer, channels = answer or self.no_channel, ()
            self.calls.append((client, disable))
            for channel in channels if answer == rm.OK else ():
                count = self._count[client, channel]
                self._count[client, channel] = count + 1 if disable else max(0, count - 1)
        if answer == -1:
            raise OSError(25, "not a device")
        argument[-4:] = struct.pack("<I", answer)
        return 0

    def refuse(self, container: Container, status: int, *, starts: bool = True) -> None:
        self._refused[container.client, True] = status
        self._refused[container.client, False] = status if starts else rm.OK

    def free(self, container: Container) -> None:
        """The process freed its channels: whatever is asked about them from now on is refused."""
        with self._lock:
            self.refuse(container, self.no_channel)
            self._start(container.client)

    def goes_on_by_itself(self, container: Container, client: int | None = None) -> None:
        """The process enabled its channels."""
        self.enables_its_own(container.client if client is None else client)

    def enables_its_own(self, client: int) -> None:
        with self._lock:
            self._start(client)

    def _start(self, client: int) -> None:
        for of, channel in list(self._count):
            if of == client:
                del self._count[of, channel]

    def stop_behind_its_back(self, container: Container) -> None:
        with self._lock:
            for client, channel in list(self._count):
                if client == container.client:
                    self._count[client, channel] += 1

    def off(self, container: Container, client: int | None = None) -> bool:
        return bool(self.channels_off(container.client if client is None else client))

    def channels_off(self, client: int) -> set[int]:
        with self._lock:
            return {channel for (of, channel), count in self._count.items() if of == client and count}

    def calls_about(self, container: Container) -> list[bool]:
        """Disable? Of each call so far."""
        return [disable for client, disable in list(self.calls) if client == container.client]

    def owed(self) -> int:
        """Enables."""
        with self._lock:
            return sum(self._count.values())


def _read_list(at: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    raw = ctypes.string_at(at, rm.PARAMETERS_BYTES)
    disable, count, only, rewind, event = struct.unpack_from("<B3x I 2B6x Q", raw)
    assert disable in (0, 1)
    assert 1 <= count <= 64
    assert (only, rewind, event) == (0, 0, 0)
    numbers = struct.unpack_from("<128I", raw, 24)
    assert not any(numbers[count:64])
    assert not any(numbers[64 + count :])
    return bool(disable), numbers[:count], numbers[64 : 64 + count]


@dataclass
class Container:
    """A process's side of a connection for GPU time."""

    node: GpuTimeNode
    name: str
    sock: socket.socket
    client: int

    def send(self, message: wire.Message, fd: int | None = None) -> None:
        passed = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.sock.sendmsg([wire.encode(1, message)], passed, socket.MSG_DONTWAIT)

    def reports_channels(
        self,
        compute: tuple[int, ...] = (3, 4),
        fd: int | None = None,
        gpu: int = 0,
        client: int | None = None,
        *,
        unlisted: bool = False,
        fresh: bool = False,
    ) -> None:
        message = Channels(gpu, client or self.client, 2, compute, (), unlisted=unlisted, fresh=fresh)
        self.send(message, (fd or self.node.device) if compute else None)

    def works(self) -> None:
        self.send(Activity(ActivityKind.WORK))

    def idles(self) -> None:
        self.send(Activity(ActivityKind.IDLE))

    def process_budget(self, much: float) -> None:
        self.node.scheduler.containers[self.name].budget.spend(-much)
        self.node.scheduler.containers[self.name].budget._at_once = much

    def refused(self) -> str:
        """The text of ERROR, before the connection closes."""
        try:
            _, message = wire.decode(self.sock.recv(8192))
        except ConnectionResetError:
            return ""
        assert isinstance(message, wire.Error)
        assert self.hung_up()
        return message.text

    def hung_up(self) -> bool:
        try:
            return self.sock.recv(8192) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()


class GpuTimeNode:
    """A `NodeScheduler`, and containers."""

    def __init__(self, **options: object) -> None:
        self.device = os.memfd_create("device")
        self.failed = threading.Event()
        self.scheduler = NodeScheduler(self.failed.set, **options)  # type: ignore[arg-type]
        self.pages: dict[str, ContainerPage] = {}
        self.containers: list[Container] = []

    def container(
        self,
        name: str,
        service_class: str = "standard",
        *,
        core: int = 0,
        gpus: tuple[str, ...] = (A,),
        channels: bool = True,
    ) -> Container:
        grant = Grant(
            "default", name, f"uid-{name}", "main", tuple(GrantGpu(c, 1024, core) for c in gpus), service_class, 2
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.settimeout(5)
        number = next(_numbers)
        page = self.pages.get(name) or self.pages.setdefault(name, ContainerPage())
        self.scheduler.adopt(name, grant, page, Connection(ours, number, os.getpid(), 0.0))
        container = Container(self, name, theirs, 1000 + number)
        self.containers.append(container)
        if channels:
            container.reports_channels()
        return container

    def drop(self, name: str) -> None:
        """As the server does when a grant goes."""
        self.scheduler.drop(name)
        self.pages.pop(name).close()

    def status(self, name: str) -> GpuTimeStatus:
        """Once its channels are known."""
        wait_for(lambda: name in self.scheduler.statuses())
        return self.scheduler.statuses()[name]

    def gate(self, name: str) -> bool:
        return bool(self.pages[name]._numbers[wire.GPU_TIME_AT // 8 + 1] >> 32)

    def channel_groups(self, name: str) -> int:
        with self.scheduler.lock:
            container = self.scheduler.containers.get(name)
            return sum(len(process.channel_groups) for process in container.processes.values()) if container else 0

    def descriptors(self, name: str) -> int:
        """Open in this process, once a container of that name has come and gone."""
        self.container(name).close()
        wait_for(lambda: not self.scheduler.containers[name].processes)
        return open_descriptors()

    def device_descriptors(self) -> int:
        assert _closer.settled(20)
        return sum(
            link.is_symlink() and str(link.readlink()).startswith("/memfd:device") for link in DESCRIPTORS.iterdir()
        )

    def read(self, name: str) -> bool:
        """Has everything been read that its processes sent?"""
        with self.scheduler.lock:
            container = self.scheduler.containers[name]
            return not self.scheduler.suspend_threads.reader_of(container).unread(container)

    def is_quiet(self) -> bool:
        """Everything that was sent has been read."""
        threading.Event().wait(0.05)
        return not self.failed.is_set()

    def close(self) -> None:
        self.scheduler.close()
        for container in self.containers:
            container.close()
        for page in self.pages.values():
            page.close()
        os.close(self.device)


def running_node(driver: Driver, **options: object) -> Iterator[GpuTimeNode]:
    """A node for a fixture. At its end no thread of it has failed, and the driver is owed no enable: every container runs."""
    made = GpuTimeNode(**options)
    yield made
    assert not made.failed.is_set(), "a GPU's thread failed"
    made.close()
    assert driver.owed() == 0, "every container runs after the end"
