"""The test's own arbiter of a container that may burst: it grants leases by kind, and a test orders the swaps itself.

It serves the three connections of one process. Everything that the process states is kept in lists; what it must not do is in `wrong`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.integration.shim.conftest import GPUS, MIB
from vgpu.protocol import wire
from vgpu.protocol.messages import SwapMessage

WAIT_S = 60
FEATURES = (
    wire.UNDERSTANDS_REPORT
    | wire.UNDERSTANDS_GROW
    | wire.UNDERSTANDS_RESUMED
    | wire.UNDERSTANDS_BURST
    | wire.SHOWS_LIMITS
)
RECALLS = 0x80000000
UUID = bytes.fromhex(GPUS[0].removeprefix("GPU-").replace("-", ""))
RESIDENT, ELASTIC = wire.LeaseKind.RESIDENT, wire.LeaseKind.ELASTIC


@dataclass(frozen=True)
class Lent:
    """A block of the process, with its descriptor."""

    id: int
    bytes: int
    fd: int

    @property
    def mib(self) -> int:
        return self.bytes // MIB


class BurstPeer:
    """One connection for bursts, after its WELCOME."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seq = 100
        self.swappable: list[wire.Swappable] = []

    def send(self, message: wire.Message) -> int:
        """Its seq."""
        self._seq += 1
        self._sock.send(wire.encode(self._seq, message))
        return self._seq

    def send_raw(self, number: int, body: bytes) -> int:
        """A packet of any content."""
        self._seq += 1
        self._sock.send(struct.pack("<IHHII", wire.MAGIC, wire.VERSION, number, self._seq, len(body)) + body)
        return self._seq

    def receive(self, seq: int = 0) -> tuple[wire.Message, list[int]]:
        """The next answer and its descriptors; SWAPPABLE is kept on the way."""
        while True:
            packet, fds, _, _ = socket.recv_fds(self._sock, wire.PACKET_LIMIT, 80)
            assert packet, "the process closed the connection"
            answered, message = wire.decode(packet)
            if isinstance(message, wire.Swappable):
                self.swappable.append(message)
                continue
            assert seq in (0, answered)
            return message, fds

    def state(self, matches: Callable[[wire.Swappable], bool]) -> wire.Swappable:
        """The first SWAPPABLE from now on that matches, or the last one."""
        while not (self.swappable and matches(self.swappable[-1])):
            packet = self._sock.recv(wire.PACKET_LIMIT)
            assert packet, "the process closed the connection"
            message = wire.decode(packet)[1]
            assert isinstance(message, wire.Swappable)
            self.swappable.append(message)
        return self.swappable[-1]

    def drain(self) -> None:
        """Reads what has come: a connection that is closed with unread packets loses what was sent on it."""
        while select.select([self._sock], [], [], 0)[0]:
            self.swappable.append(wire.decode(self._sock.recv(wire.PACKET_LIMIT))[1])  # type: ignore[arg-type]

    def ends(self) -> bool:
        """Waits until the process closes the connection; what comes before is dropped."""
        with contextlib.suppress(ConnectionResetError):
            while self._sock.recv(wire.PACKET_LIMIT):
                pass
        return True

    def order(self, message: SwapMessage) -> wire.Message:
        """The answer to one that brings no descriptors."""
        answer, fds = self.receive(self.send(message))
        assert not fds
        return answer

    def lent(self, message: SwapMessage) -> list[Lent]:
        """The blocks of the answer. Raises AssertionError if there are none."""
        seq, blocks, more = self.send(message), list[Lent](), True
        while more:
            answer, fds = self.receive(seq)
            assert isinstance(answer, wire.Blocks), answer
            assert len(answer.blocks) == len(fds) <= 64
            blocks += [Lent(block.id, block.bytes, fd) for block, fd in zip(answer.blocks, fds, strict=True)]
            more = answer.more
        return blocks

    def discard(self) -> tuple[int, wire.Discard]:
        """The next DISCARD, and its seq. It comes before the SWAPPABLE that does not count its blocks."""
        while True:
            seq, message = wire.decode(self._sock.recv(wire.PACKET_LIMIT))
            if isinstance(message, wire.Discard):
                return seq, message
            assert isinstance(message, wire.Swappable)
            self.swappable.append(message)

    def discarded(self, seq: int, message: wire.Discard) -> None:
        """Answer it."""
        self._sock.send(wire.encode(seq, wire.Discarded(message.gpu, message.ids)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@dataclass
class SwappingArbiter:
    """Listens in a grant directory. `limits`: guarantee and limit in MiB that BURST states; None: it sends none."""

    folder: Path
    limits: tuple[int, int] | None = (1000, 4000)
    features: int = FEATURES
    strict: bool = False
    """CONTEXT GROW and HOLD are refused beyond what no process leases; else they are granted, and count for nothing."""
    pending: bool = False
    """Elastic leases get PENDING, and no answer, until it is False."""
    leased: dict[wire.LeaseKind, int] = field(default_factory=lambda: {RESIDENT: 0, ELASTIC: 0})
    leases: list[tuple[wire.LeaseKind, int, bool]] = field(default_factory=list)
    """Kind, needed bytes, granted."""
    converts: list[tuple[int, bool]] = field(default_factory=list)
    """MiB, granted; only of an arbiter whose features have UNDERSTANDS_OPEN."""
    convert_after_s: float = 0
    """So long CONVERT is not read, nor anything behind it. One that the process ended meanwhile is not carried out."""
    restated: list[int] = field(default_factory=list)
    """Leased bytes that a process stated on a new connection, beside what an earlier one had."""
    returns: list[wire.Return] = field(default_factory=list)
    usages: list[wire.Usage] = field(default_factory=list)
    channels: list[wire.Channels] = field(default_factory=list)
    works: int = 0
    idle: bool = False
    """The last that was reported is IDLE."""
    resumed: list[wire.Activity] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    bursts: queue.Queue[BurstPeer] = field(default_factory=queue.Queue)
    recalled: queue.Queue[wire.Return] = field(default_factory=queue.Queue)
    hellos: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._page = os.memfd_create("page")
        os.ftruncate(self._page, wire.PAGE_BYTES)
        os.pwrite(self._page, struct.pack("<I", self.features), wire.WORDS_AT)
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._memory: socket.socket | None = None
        self._ended = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path = self.folder / "arbiter.sock"
        self._listener.bind(str(self.path))
        self._listener.listen()
        self.show()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As the kernel does after SIGKILL: every socket is closed at once."""
        self._ended.set()
        with self._lock:
            for sock in (self._listener, *self._socks):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._socks = []
        self.path.unlink(missing_ok=True)

    def burst(self) -> BurstPeer:
        """The next connection for bursts."""
        return self.bursts.get(timeout=WAIT_S)

    def recall(self, mib: int) -> wire.Return:
        """The answer to a RECALL."""
        assert self._memory is not None
        self._memory.send(wire.encode(RECALLS | 7, wire.Recall(0, mib * MIB)))
        return self.recalled.get(timeout=WAIT_S)

    def show(self) -> None:
        _, limit = self.limits or (1000, 1000)
        os.pwrite(self._page, struct.pack("<Q", max(0, limit * MIB - sum(self.leased.values()))), 0)
        if self.features & wire.SHOWS_LIMITS:
            os.pwrite(self._page, struct.pack("<Q", limit * MIB), wire.LIMITS_AT)

    def suspend(self, *, off: bool) -> None:
        """What the page shows of the container."""
        os.pwrite(self._page, struct.pack("<QII", int.from_bytes(os.urandom(4)) + 1, int(off), 0), wire.GPU_TIME_AT)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._ended.is_set():  # it was killed meanwhile, and closes nothing more
                    sock.close()
                    return
                self._socks.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if not (first := sock.recv(wire.PACKET_LIMIT)):
                return  # the process ended before it said anything
            _, hello = wire.decode(first)
            assert isinstance(hello, wire.Hello)
            self.hellos.append(hello.flags)
            if hello.flags & wire.FOR_BURST and not self.features & wire.UNDERSTANDS_BURST:
                self.wrong.append("a connection for bursts")
            guarantee, _ = self.limits or (1000, 1000)
            welcome = wire.encode(0, wire.Welcome((wire.WelcomeGpu(UUID, guarantee * MIB, 0, 1),)))
            socket.send_fds(sock, [welcome], [self._page])
            if hello.flags & wire.FOR_BURST:
                peer = BurstPeer(sock)
                sock.settimeout(WAIT_S)
                if self.limits is not None:
                    peer.send(wire.Burst(0, self.limits[0] * MIB, self.limits[1] * MIB))
                self.bursts.put(peer)
                return
            if hello.flags & wire.FOR_GPU_TIME:
                self._serve_time(sock)
                return
            if self._memory is not None:
                self.leased = {RESIDENT: 0, ELASTIC: 0}
            again, self._memory = self._memory is not None, sock
            while packet := sock.recv(wire.PACKET_LIMIT):
                seq, message = wire.decode(packet)
                if again and isinstance(message, wire.Usage):
                    self.restated.append(message.leased_bytes)
                self._memory_packet(sock, seq, message)

    def _serve_time(self, sock: socket.socket) -> None:
        while True:
            packet, fds, _, _ = socket.recv_fds(sock, wire.PACKET_LIMIT, 4)
            for fd in fds:
                os.close(fd)
            if not packet:
                return
            message = wire.decode(packet)[1]
            if isinstance(message, wire.Channels):
                self.channels.append(message)
            elif isinstance(message, wire.Activity) and message.what is wire.ActivityKind.WORK:
                self.works += 1
                self.idle = False
            elif isinstance(message, wire.Activity) and message.what is wire.ActivityKind.IDLE:
                self.idle = True
            elif isinstance(message, wire.Activity) and message.what is wire.ActivityKind.RESUMED:
                self.resumed.append(message)

    def _memory_packet(self, sock: socket.socket, seq: int, message: wire.Message) -> None:
        match message:
            case wire.Lease(_, need, want, kind):
                self._lease(sock, seq, kind, need, max(need, want))
            case wire.Return(_, amount, kind):
                self._take_back(kind, amount)
                self.returns.append(message)
                if seq & RECALLS:
                    self.recalled.put(message)
                else:
                    sock.send(wire.encode(seq, wire.Leased(0, False, 0, 0)))
            case wire.Convert(_, amount):
                self._convert(sock, seq, amount)
            case wire.Usage():
                self.usages.append(message)
                if not any(self.leased.values()):
                    self.leased[RESIDENT] = message.leased_bytes
            case wire.Context(_, wire.Step.BEGIN, amount):
                sock.send(wire.encode(seq, wire.Leased(0, False, max(1, amount), 0)))
            case wire.Context(_, wire.Step.GROW, amount) | wire.Hold(_, wire.HoldState.OPENED, _, amount, _):
                good = not self.strict or amount <= self._left()
                self.leases.append((RESIDENT, amount, good))
                sock.send(wire.encode(seq, wire.Leased(0, not good, max(1, amount) * good, 0)))
            case wire.Drop():
                sock.send(wire.encode(seq, wire.Leased(0, False, 0, 0)))
            case wire.Context(_, wire.Step.DONE | wire.Step.GONE):
                sock.send(wire.encode(seq, wire.Measured(0, True, 0, 0)))

    def _convert(self, sock: socket.socket, seq: int, amount: int) -> None:
        if self.convert_after_s and select.select([sock], [], [], self.convert_after_s)[0]:
            return
        guarantee, _ = self.limits or (1000, 1000)
        good = self.leased[RESIDENT] + amount <= guarantee * MIB
        self.converts.append((amount // MIB, good))
        if good:
            self._take_back(ELASTIC, amount)
            self.leased[RESIDENT] += amount
            self.show()
        sock.send(wire.encode(seq, wire.Leased(0, not good, amount * good, 0)))

    def _take_back(self, kind: wire.LeaseKind, amount: int) -> None:
        self.leased[kind] -= amount
        if self.leased[kind] < 0:
            self.wrong.append(f"RETURN of {amount} bytes of {kind.name}")
        self.show()

    def _left(self) -> int:
        _, limit = self.limits or (1000, 1000)
        return limit * MIB - sum(self.leased.values())

    def _lease(self, sock: socket.socket, seq: int, kind: wire.LeaseKind, need: int, want: int) -> None:
        if self.pending and kind is ELASTIC:
            threading.Thread(target=self._wait, args=(sock, seq, need), daemon=True).start()
            return
        guarantee, _ = self.limits or (1000, 1000)
        left = self._left()
        if kind is RESIDENT:
            left = min(left, guarantee * MIB - self.leased[RESIDENT])
        granted = min(want, need + max(0, left - need) // 4)
        good = need <= left
        self.leases.append((kind, need, good))
        self.leased[kind] += granted * good
        self.show()
        sock.send(wire.encode(seq, wire.Leased(0, not good, granted * good, 0)))

    def _wait(self, sock: socket.socket, seq: int, need: int) -> None:
        with contextlib.suppress(OSError):
            while self.pending and not self._ended.wait(0.5):
                sock.send(wire.encode(seq, wire.Pending(0, need)))
            self.leases.append((ELASTIC, need, True))
            self.leased[ELASTIC] += need
            self.show()
            sock.send(wire.encode(seq, wire.Leased(0, False, need, 0)))


@contextlib.contextmanager
def swapping_arbiter(folder: Path, **how: object) -> Iterator[SwappingArbiter]:
    """In the end it is gone, and the process did nothing that it must not."""
    with SwappingArbiter(folder, **how) as made:  # type: ignore[arg-type]
        yield made
        assert made.wrong == []
