"""A running arbiter, and processes that speak its protocol by hand."""

from __future__ import annotations

import array
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from arbiter.descriptors import _closer
from arbiter.memory.container import ContainerOptions
from arbiter.memory.contexts import NodeMemory
from arbiter.memory.meter import MemoryReading, Meter, SeenProcess
from arbiter.server import ArbiterServer
from arbiter.swap.node import SwapNode
from nvml.errors import NvmlAway
from nvml.messages import AnyReply, AnyRequest
from nvml.queries import Nvml
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol import wire

if TYPE_CHECKING:
    from tests.unit.arbiter.gputime_kit import Driver

GPU = "GPU-00000000-0000-0000-0000-000000000001"
OTHER_GPU = "GPU-00000000-0000-0000-0000-000000000002"
MIB = 2**20


def a_grant(mib: int = 1000, pod: str = "a", uuids: tuple[str, ...] = (GPU,)) -> Grant:
    return Grant("default", pod, f"uid-{pod}", "main", tuple(GrantGpu(uuid, mib) for uuid in uuids))


def open_files() -> int:
    """Of this process, without those that the arbiter's thread closes soon."""
    assert _closer.settled(20)
    return len(list(Path("/proc/self/fd").iterdir()))


@dataclass
class Process:
    """A library's side of one connection."""

    sock: socket.socket
    gpus: tuple[wire.WelcomeGpu, ...] = ()
    promised_mib: int = 0
    page: memoryview | None = None
    _held: list[mmap.mmap] = field(default_factory=list)

    def send(self, message: wire.Message, seq: int = 1) -> None:
        self.sock.send(wire.encode(seq, message))

    def send_bytes(self, packet: bytes) -> None:
        self.sock.send(packet)

    def receive(self) -> wire.Message:
        return self.receive_numbered()[1]

    def receive_numbered(self) -> tuple[int, wire.Message]:
        packet = self.sock.recv(8192)
        assert packet, "the arbiter hung up"
        return wire.decode(packet)

    def hello(self, flags: int = 0) -> Process:
        self.send(wire.Hello(1, flags, "test"))
        return self.welcomed()

    def welcomed(self) -> Process:
        packet, control, _, _ = self.sock.recvmsg(8192, socket.CMSG_SPACE(4))
        _, message = wire.decode(packet)
        assert isinstance(message, wire.Welcome), message
        self.gpus, self.promised_mib = message.gpus, message.promised_mib
        fd = array.array("i", control[0][2])[0]
        self._held.append(mmap.mmap(fd, wire.PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ))
        os.close(fd)
        self.page = memoryview(self._held[0]).cast("Q")
        return self

    def lease(self, need: int, want: int = 0, gpu: int = 0) -> wire.Leased:
        """Uses all that it has leased: a recall meanwhile is answered with nothing."""
        self.send(wire.Lease(gpu, need, want))
        seq, answer = self.receive_numbered()
        while isinstance(answer, wire.Recall):
            self.send(wire.Return(answer.gpu, 0), seq)
            seq, answer = self.receive_numbered()
        assert isinstance(answer, wire.Leased), answer
        return answer

    def hung_up(self) -> bool:
        """Waits for it."""
        try:
            return self.sock.recv(8192) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        if self.page is not None:
            self.page.release()
            self._held[0].close()
            self.page = None
        self.sock.close()


@dataclass
class ArbiterNode:
    """A grants folder with an arbiter."""

    folder: Path
    limits: ContainerOptions
    server: ArbiterServer | None = None
    node_memory: NodeMemory | None = None
    swap_node: SwapNode | None = None
    _thread: threading.Thread | None = None
    _processes: list[Process] = field(default_factory=list, repr=False)

    def start(self) -> ArbiterServer:
        self.server = ArbiterServer(self.folder, self.limits, node_memory=self.node_memory, swap_node=self.swap_node)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        return self.server

    def stop(self) -> None:
        if self.server is not None and self._thread is not None:
            self.server.stop()
            self._thread.join(10)
            assert not self._thread.is_alive()
            self.server = None

    def allocate(self, key: str = "k", grant: Grant | str | None = None) -> Path:
        """A directory as the device plugin makes it."""
        folder = self.folder / key
        folder.mkdir(exist_ok=True)
        if grant is not None:
            self.write(key, grant)
        return folder

    def write(self, key: str, grant: Grant | str) -> None:
        fresh = self.folder / key / ".grant.new"
        fresh.write_text(grant if isinstance(grant, str) else grant_to_text(grant))
        fresh.rename(self.folder / key / "grant")

    def write_burst(self, key: str, limits: BurstLimits) -> None:
        """The limits above the grant."""
        fresh = self.folder / key / ".burst.new"
        fresh.write_text(burst_to_text(limits))
        fresh.rename(self.folder / key / "burst")

    def connect(self, key: str = "k") -> Process:
        path = self.folder / key / "arbiter.sock"
        wait_for(path.exists)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(5)
        sock.connect(str(path))
        self._processes.append(Process(sock))
        return self._processes[-1]

    def process(self, key: str = "k") -> Process:
        return self.connect(key).hello()

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self.stop()


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Polls what has no event to wait for."""
    pause = threading.Event()
    for _ in range(int(seconds * 200)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it did not come about in time")


class Nobody:
    """Carries no request to any NVML."""

    def call_all(self, _: Sequence[AnyRequest]) -> list[AnyReply]:
        raise NvmlAway("there is no NVML")


class HandMeter(Meter):
    """A meter whose readings a test writes."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        """By how much its clock is ahead."""
        super().__init__(Nvml(Nobody()), Path("/grants"), lambda: time.monotonic() + self.ahead_s)
        self.trouble = ""
        self.hurries = 0

    def hurry(self) -> None:
        self.hurries += 1

    def lists(self, key: str = "", /, **held: int) -> None:
        """This process (and others, by `p<pid>`) has so much of GPU, from now on."""
        pids = {os.getpid() if name == "me" else int(name[1:]): mib * MIB for name, mib in held.items()}
        seen = {pid: SeenProcess(0, key or None, 0) for pid in pids}
        self._report(MemoryReading(time.monotonic() + self.ahead_s, {GPU: pids}, seen))

    def is_blind(self) -> None:
        """NVML is gone."""
        self.trouble = "NVML is gone"
        self._report(MemoryReading(time.monotonic()))


@pytest.fixture
def meter(node: ArbiterNode) -> Iterator[HandMeter]:
    """The node's."""
    made = HandMeter()
    node.node_memory = NodeMemory(made)
    yield made
    node.stop()
    made.close()


@pytest.fixture
def node() -> Iterator[ArbiterNode]:
    folder = Path(
        tempfile.mkdtemp(prefix="ta-")
    )  # a socket's path has at most 107 characters: pytest's own folders are longer
    node = ArbiterNode(folder, ContainerOptions(grant_wait_s=0.5, grace_s=0.2))
    yield node
    node.close()
    shutil.rmtree(folder)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The kernel driver, in the place of the real one."""
    from tests.unit.arbiter.gputime_kit import Driver  # the kit stands on this module

    made = Driver()
    monkeypatch.setattr("arbiter.gputime.channels.fcntl.ioctl", made.ioctl)
    return made
