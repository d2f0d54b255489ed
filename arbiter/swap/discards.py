"""Blocks of one process on one GPU that are away and that it needs no more: the program freed them.

Each DISCARD is answered when the file of the records no longer has its blocks: a slot is free then, and a process that connects to the next arbiter does
not find them named there. The process repeats what was not answered on its next connection. So a block that is not known was discarded before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from arbiter.swap.block import BlockState, MovedBlock
from arbiter.swap.host_pool import HostPool
from arbiter.swap.moved_blocks import MovedBlocks
from vgpu.api.errors import BadDocument
from vgpu.protocol.messages import Discard, Discarded, SwapMessage

UNANSWERED_LIMIT: Final = 512
"""DISCARDs of one process. A library sends 128 on a new connection at most (specified)."""
AGAIN_S: Final = 0.25
"""After the records could not be written. Guessed: the pool itself tries once a second."""
RETURN_S: Final = 1.0
"""So long after a DISCARDED what was leased for its blocks counts as away, until it is returned. Guessed: a library returns it at once."""


@dataclass
class _Unanswered:
    seq: int
    message: Discard
    waits: set[int]
    """Blocks of it that an unanswered SWAP_IN names."""


class Discards:
    """See the module."""

    def __init__(self, blocks: MovedBlocks, pool: HostPool, clock: Callable[[], float]) -> None:
        self._blocks, self._pool, self._clock = blocks, pool, clock
        self._reply: Callable[[int, SwapMessage], None] | None = None
        self._unanswered: list[_Unanswered] = []
        self._made: dict[int, MovedBlock] = {}
        """Blocks that an unanswered SWAP_IN names, and that are not made."""
        self._again_at_s = self._return_until_s = inf

    @property
    def pending(self) -> bool:
        """Something is not answered, or not returned."""
        return bool(self._unanswered) or self._blocks.unreturned_lease_bytes > 0

    def attach(self, reply: Callable[[int, SwapMessage], None]) -> None:
        """The process connected."""
        self._reply = reply

    def detach(self) -> None:
        """The connection ended. The process sends all of it again. A block that it names then is away, whatever a SWAP_IN of this connection ordered."""
        self._reply = None
        self._unanswered.clear()
        self._made.clear()
        self._blocks.unreturned_lease_bytes = 0
        self._again_at_s = self._return_until_s = inf

    def take(self, seq: int, message: Discard, making: Collection[int]) -> None:
        """`making`: what an unanswered SWAP_IN names. Raises BadDocument for a block that is not away."""
        if len(self._unanswered) >= UNANSWERED_LIMIT:
            raise BadDocument(f"more than {UNANSWERED_LIMIT} DISCARD are not answered")
        if len(set(message.ids)) < len(message.ids):
            raise BadDocument("DISCARD names a block twice")
        waits = set()
        for id_ in message.ids:
            block = self._blocks.known.get(id_)
            if block is None:
                continue
            if block.state is BlockState.MAKING and id_ in making:
                waits.add(id_)
                self._made[id_] = block
            elif block.state is not BlockState.AWAY:
                raise BadDocument(f"DISCARD names block {id_}, which is not away")
        for id_ in message.ids:
            if id_ in self._blocks.known and id_ not in waits:
                self._blocks.discard(self._blocks[id_])
        self._unanswered.append(_Unanswered(seq, message, waits))
        self._again_at_s = -inf

    def check(self, made: Iterable[int]) -> None:
        """These are named in BLOCKS. Raises BadDocument for one that was discarded."""
        again = next((id_ for id_ in made if id_ in self._made), None)
        if again is not None:
            raise BadDocument(f"BLOCKS names block {again}, which was discarded")

    def end_made(self) -> None:
        """The SWAP_IN is answered."""
        for id_, block in self._made.items():
            if self._blocks.known.get(id_) is block and block.state is BlockState.AWAY:
                self._blocks.discard(block)
        self._made.clear()
        for one in self._unanswered:
            one.waits.clear()
        self._again_at_s = -inf

    def returned(self, size_bytes: int) -> int:
        """So much was returned of the container's leases; what of it was for blocks of this process."""
        its = min(size_bytes, self._blocks.unreturned_lease_bytes)
        self._blocks.unreturned_lease_bytes -= its
        return its

    def turn(self) -> bool:
        """Answer what can be answered. Whether less counts as away than before. Raises PeerGone."""
        now_s = self._clock()
        if self._unanswered and now_s >= self._again_at_s:
            self._answer(now_s)
        late = now_s >= self._return_until_s and self._blocks.unreturned_lease_bytes > 0
        if late:
            self._blocks.unreturned_lease_bytes = 0
        if self._blocks.unreturned_lease_bytes == 0:
            self._return_until_s = inf
        return late

    def deadline_s(self) -> float:
        """When `turn` is due."""
        again_s = self._again_at_s if any(not one.waits for one in self._unanswered) else inf
        return min(again_s, self._return_until_s)

    def _answer(self, now_s: float) -> None:
        ready = [one for one in self._unanswered if not one.waits]
        if not ready:
            return
        if not self._pool.write():
            self._again_at_s = now_s + AGAIN_S
            return
        self._return_until_s = min(self._return_until_s, now_s + RETURN_S)  # others do not put it off
        for one in ready:
            self._unanswered.remove(one)
            if self._reply is not None:
                self._reply(one.seq, Discarded(one.message.gpu, one.message.ids))
