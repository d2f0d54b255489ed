"""One process of a container: its connection for bursts, and its blocks on each GPU, which outlive the connection.

What it sends is not trusted. A packet that it may not send, or too many, end the connection with ERROR 1; the process counts as unable from then on, and
what is away still comes back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Final

import structlog

from arbiter import descriptors
from arbiter.attention import Attention
from arbiter.connection import BAD_PACKET, Connection, PeerGone
from arbiter.open_files import is_spare
from arbiter.swap.mover import Mover
from vgpu.api.errors import BadDocument
from vgpu.protocol import wire
from vgpu.protocol.messages import Blocks, Burst, Discard, SwapMessage, Swappable, Unable, Unmapped

MESSAGES_A_TURN: Final = 32
PIECE_S: Final = 0.0005
"""After this time nothing more is read from the process in this turn. As a piece of the arbiter's loop (`arbiter.attention`)."""
STATED_A_SECOND: Final = 400
"""SWAPPABLE and DISCARD of one GPU in a second. Specified: one every 100 ms; the rest is for a process that was stopped."""
STATED_WITHIN_S: Final = 5.0
"""A connected process that has stated nothing for so long counts as unable. Guessed: it states it at once."""
NOT_SEEN: Final = "the process cannot be identified on the node (node.hostPID is false)"
REASONS: Final = {
    1: "the library's helper thread could not be started",
    2: "the process sees a GPU that its container's grant does not name",
    3: "the container has an RDMA device (/dev/infiniband)",
    4: "the program requested a handle for an address range (cuMemGetHandleForAddressRange)",
    5: "the program requested P2P tokens (CU_POINTER_ATTRIBUTE_P2P_TOKENS)",
    6: "the program set CU_POINTER_ATTRIBUTE_SYNC_MEMOPS",
    7: "the driver refused memory of cuMemCreate that can be exported",
}
"""Of SWAPPABLE, as shim/src/elastic/elastic.h numbers them."""
_log = structlog.get_logger()


class SwapProcess:
    """See the module. `movers`: by GPU, in the order of the wire. `changed` is called when something happened, `states` when the process stated how
    many bytes of elastic memory it has on a GPU. `attention`: its container's. `charge`: called with the processor time of a SWAPPABLE or DISCARD, in seconds."""

    def __init__(
        self, name: str, pid: int, started: int, attention: Attention, clock: Callable[[], float], changed: Callable[[], None],
        states: Callable[[SwapProcess, str, int], None] = lambda *_: None, charge: Callable[[float], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.name, self.pid, self.started = name, pid, started
        self.movers: dict[str, Mover] = {}
        self.image = 0
        """Of the program that it ran when it connected, as `arbiter.host.image_of`; 0 = not known."""
        self.broken = "" if pid > 0 and started > 0 else NOT_SEEN
        """Why it is sent no further orders to move out."""
        self.since_s = clock()
        """When its connection began or ended."""
        self._attention, self._clock, self._changed, self._states, self._charge = (
            attention,
            clock,
            changed,
            states,
            charge,
        )
        self._connection: Connection | None = None
        self._gpus: Sequence[str] = ()
        self._seqs = itertools.count(1)
        self._stated, self._stated_since_s = 0, -inf

    @property
    def key(self) -> tuple[str, int, int]:
        """Of its records."""
        return self.name, self.pid, self.started

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def unable(self) -> str | None:
        """Why it cannot be swapped; empty: it can. None: it has not stated it yet."""
        if self.broken:
            return self.broken
        for mover in self.movers.values():
            if mover.blocks.lost:
                return mover.blocks.lost
            if mover.stalled:
                return f"process {self.pid} does not answer"
            if mover.stated is not None and mover.stated.reason:
                return REASONS.get(mover.stated.reason, f"unknown reason {mover.stated.reason}")
        if any(mover.stated is None for mover in self.movers.values()):
            late = self._clock() >= self.since_s + STATED_WITHIN_S
            return f"process {self.pid} does not state what it has" if late else None
        return ""

    def take(self, connection: Connection, gpus: Sequence[str]) -> None:
        """Serve this connection, in place of an earlier one."""
        self.end()
        connection.sock.setblocking(False)
        self._connection, self._gpus, self.since_s = connection, gpus, self._clock()
        self._attention.add(connection.sock.fileno(), self.read)
        for index, gpu in enumerate(gpus):
            self.movers[gpu].index = index
            self.movers[gpu].attach(self._send, self._reply)

    def limit(self, gpu: str, guarantee_bytes: int, limit_bytes: int) -> None:
        """Send it its container's limits on a GPU."""
        if self._connection is not None:
            self._attempt(lambda: self._send(Burst(self._gpus.index(gpu), guarantee_bytes, limit_bytes)))

    def turn(self, *, halted: bool) -> None:
        """Send what can be sent now."""
        for mover in self.movers.values():
            self._attempt(partial(mover.turn, halted=halted))

    def order(self, give: Callable[[], None]) -> None:
        """Call a mover of it. If the connection ends meanwhile, the mover knows."""
        self._attempt(give)

    def read(self) -> None:
        """What it sent."""
        self._changed()
        until_s = time.monotonic() + PIECE_S
        for _ in range(MESSAGES_A_TURN):
            if self._connection is None or not self._attempt(self._read_one) or time.monotonic() >= until_s:
                return

    def end(self) -> None:
        """Close the connection."""
        if self._connection is None:
            return
        self._attention.remove(self._connection.sock.fileno())
        with suppress(OSError):
            self._connection.close()
        self._connection, self.since_s = None, self._clock()
        for mover in self.movers.values():
            mover.detach()
        self._changed()

    def die(self) -> None:
        """The process ended, or its container."""
        self.end()
        for mover in self.movers.values():
            mover.die()

    def deadline_s(self) -> float:
        """When `turn` is due."""
        movers = min((mover.deadline_s() for mover in self.movers.values()), default=inf)
        return min(movers, self.since_s + STATED_WITHIN_S if self.connected and self.unable is None else inf)

    def _send(self, message: SwapMessage) -> int:
        if self._connection is None:
            raise PeerGone("not connected")
        seq = next(self._seqs) & 0x7FFFFFFF
        self._connection.send(seq, message)
        return seq

    def _reply(self, seq: int, message: SwapMessage) -> None:
        if self._connection is None:
            raise PeerGone("not connected")
        self._connection.send(seq, message)

    def _attempt(self, step: Callable[[], object]) -> bool:
        """Whether more may follow. What fails ends this connection and affects no other."""
        try:
            return step() is not False
        except PeerGone as gone:
            _log.debug("a connection for bursts ended", grant=self.name, pid=self.pid, reason=str(gone))
        except BadDocument as error:
            _log.warning("bad packet", grant=self.name, pid=self.pid, reason=str(error))
            self.broken = f"process {self.pid} broke the protocol: {error}"
            if self._connection is not None:
                self._connection.refuse(BAD_PACKET, str(error))
        self.end()
        return False

    def _read_one(self) -> bool:
        """One packet; False: there is none now. Raises PeerGone, BadDocument."""
        if self._connection is None:
            return False
        began_s = time.thread_time()
        try:
            packet, fds, short = descriptors.receive(self._connection.sock, wire.REQUEST_LIMIT + 1, self.name)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerGone(str(error)) from None
        if any(is_spare(fd) for fd in fds):
            short = True
            self._close(fds)
        try:
            if not packet:
                raise PeerGone("closed the connection")
            seq, message = wire.decode(packet)
            mover = self._mover(message, fds)
        except (PeerGone, BadDocument):
            self._close(fds)
            raise
        mover.answer(seq, message, fds, short=short)  # type: ignore[arg-type]
        if isinstance(message, Swappable):
            self._states(self, mover.gpu, message.elastic_bytes)
        if isinstance(message, Swappable | Discard):
            self._charge(time.thread_time() - began_s)
        return True

    def _mover(self, message: wire.Message, fds: list[int]) -> Mover:
        kind = type(message).__name__.upper()
        if not isinstance(message, Swappable | Blocks | Unmapped | Unable | Discard):
            raise BadDocument(f"{kind} on a connection for bursts")
        if fds and not isinstance(message, Blocks):
            raise BadDocument(f"{kind} with {len(fds)} descriptors: it has none")
        if message.gpu >= len(self._gpus):
            raise BadDocument(f"{kind} of GPU {message.gpu}: the container has {len(self._gpus)}")
        if isinstance(message, Swappable | Discard):
            self._count_stated()
        return self.movers[self._gpus[message.gpu]]

    def _count_stated(self) -> None:
        now_s = self._clock()
        if now_s >= self._stated_since_s + 1:
            self._stated, self._stated_since_s = 0, now_s
        self._stated += 1
        if self._stated > (most := STATED_A_SECOND * len(self._gpus)):
            raise BadDocument(f"more than {most} SWAPPABLE and DISCARD within a second")

    def _close(self, fds: list[int]) -> None:
        descriptors.discard(fds, self.name)
        fds.clear()
