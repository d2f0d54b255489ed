"""What moves the blocks of one process on one GPU: the one order that the process carries out at a time, and its answers.

It knows the messages of the protocol, and which answers are possible: everything else a process sends is a BadDocument, which ends its connection. When
something is ordered is decided by the container. Nothing counts as away before UNMAPPED, nothing as back before the copier's DONE.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from math import inf
from typing import Final

import structlog

from arbiter import descriptors
from arbiter.swap.answers import check_descriptors, check_made, check_named, check_needed, check_unmapped
from arbiter.swap.block import BlockState, MovedBlock
from arbiter.swap.discards import Discards
from arbiter.swap.host_pool import HostPool
from arbiter.swap.moved_blocks import MovedBlocks
from arbiter.swap.mover_order import UNABLE_TEXTS, MoverOrder, MoverOwner
from vgpu.api.errors import BadDocument
from vgpu.protocol.copier import Done, Result
from vgpu.protocol.messages import (
    Blocks,
    Cancel,
    Discard,
    Filled,
    SwapIn,
    SwapMessage,
    SwapOut,
    Swappable,
    Unable,
    UnableReason,
    Unmap,
    Unmapped,
)
from vgpu.protocol.swap_wire import BLOCKS_LIMIT

ANSWER_S: Final = 5.0
"""How long a process may take to answer an order. Guessed: 64 blocks take 5 ms (measured, H200: 78 us each), and a process that is not stopped runs within a
second."""
RETRY_S: Final = 0.5
"""After a block could not be made or restored. Guessed."""
MADE_LIMIT: Final = 128
"""Blocks that are made and have no content yet: as many as the copier takes, and each is a descriptor."""
_log = structlog.get_logger()


class Mover:
    """See the module. Its methods may raise PeerGone: then `detach` it."""

    def __init__(
        self, owner: MoverOwner, key: tuple[str, int, int], gpu: str, index: int, pool: HostPool, clock: Callable[[], float]
    ) -> None:  # fmt: skip
        self.key, self.gpu, self.index, self.pool = key, gpu, index, pool
        self.blocks = MovedBlocks(self, pool)
        self.stated: Swappable | None = None
        """What the process last stated on this connection."""
        self.stalled = False
        """It has not answered an order in time, and has not answered it since."""
        self.exhausted = ""
        """Why it had fewer blocks to leave than it was ordered. The container resets it."""
        self.failure = ""
        """Why the last order to move out failed. The container resets it."""
        self.in_failure = ""
        """Why blocks do not come back."""
        self.asked_bytes = self.mean_bytes = 0
        """Of the SWAP_OUT that is not answered yet; of a block of the last answer."""
        self.cancelled = False
        """What can still stay stays."""
        self.discards = Discards(self.blocks, pool, clock)
        self._owner, self._clock = owner, clock
        self._order: MoverOrder | None = None
        self._send: Callable[[SwapMessage], int] | None = None
        self._retry_at_s = -inf
        self._must_cancel = False
        """The process has chosen blocks that will not leave."""

    @property
    def connected(self) -> bool:
        """It can be sent orders."""
        return self._send is not None and self.stated is not None

    @property
    def waits(self) -> bool:
        """An order is not answered yet."""
        return self._order is not None

    @property
    def leaving(self) -> bool:
        """Something of a SWAP_OUT is in progress."""
        out = self._order is not None and not isinstance(self._order.message, SwapIn)
        return out or bool(self.blocks.leaving())

    @property
    def unmapping(self) -> bool:
        """An UNMAP is not answered yet."""
        return self._order is not None and isinstance(self._order.message, Unmap)

    @property
    def leaving_bytes(self) -> int:
        """What is ordered or chosen, and may still leave."""
        return self.asked_bytes + sum(block.bytes for block in self.blocks.leaving())

    @property
    def can_leave_bytes(self) -> int:
        """What the process states to have on the GPU."""
        if self.stated is None or self.stated.reason or self.blocks.lost:
            return 0
        return max(0, self.stated.elastic_bytes - self.stated.away_bytes)

    def deadline_s(self) -> float:
        """When `turn` is due."""
        until_s = self._order.until_s if self._order is not None and not self.stalled else inf
        return min(until_s, self._retry_at_s if self._retry_at_s > self._clock() else inf, self.discards.deadline_s())

    def attach(self, send: Callable[[SwapMessage], int], reply: Callable[[int, SwapMessage], None]) -> None:
        """The process connected. It is sent orders once it has stated what it has. `send` answers the seq of the message, `reply` takes one."""
        self._send = send
        self.discards.attach(reply)

    def detach(self) -> None:
        """The connection ended."""
        self._send = self._order = self.stated = None
        self.stalled = self.cancelled = self._must_cancel = False
        self.asked_bytes = 0
        if self.blocks.leaving():
            self.failure = "its connection ended"
        self.blocks.detach()
        self.discards.detach()
        self._drop_lost()

    def die(self) -> None:
        """The process ended."""
        self.detach()
        for block in list(self.blocks):
            self.blocks.drop(block)
        self.blocks.lost = ""

    # Orders

    def swap_out(self, wanted_bytes: int) -> None:
        """Order it to name blocks. It must not be leaving or waiting, and nothing may be on its way back."""
        if self._must_cancel:
            self._cancel()
        self.cancelled, self.asked_bytes = False, wanted_bytes
        self._give(SwapOut(self.index, wanted_bytes))

    def swap_in(self, chosen: list[MovedBlock]) -> None:
        """Order it to make these blocks, at most 64. It must not be leaving or waiting. They use memory of the GPU from now on."""
        fresh = [block.id for block in chosen if not block.charged]
        for block in chosen:
            block.state, block.charged = BlockState.MAKING, True
            self.pool.record(block)
        if not self.pool.write():
            self._not_made(chosen, fresh, "the swap records cannot be written")
            return
        self._give(SwapIn(self.index, tuple(block.id for block in chosen)), fresh)

    def candidates(self, room_bytes: int) -> list[MovedBlock]:
        """What `swap_in` may name now: first what uses memory anyway, then the largest that `room_bytes` has room for."""
        if not self.connected or self.waits or self.leaving or self._clock() < self._retry_at_s:
            return []
        most = min(BLOCKS_LIMIT, MADE_LIMIT - len(self.blocks.made()))
        away = sorted(self.blocks.in_state(BlockState.AWAY), key=lambda block: (not block.charged, -block.bytes))
        chosen: list[MovedBlock] = []
        for block in away:
            if len(chosen) >= most or (block.alone and chosen):
                break
            if not block.charged:
                if block.bytes > room_bytes:
                    continue
                room_bytes -= block.bytes
            chosen.append(block)
            if block.alone:
                break
        return chosen

    def turn(self, *, halted: bool) -> None:
        """Send what can be sent now. `halted`: nothing of the container runs."""
        if self.discards.turn():
            self._owner.away_changed(self.gpu)
        if self._order is not None:
            self.stalled = self.stalled or self._clock() >= self._order.until_s
            return
        if self._send is None:
            return
        self._tell_filled()
        saved = self.blocks.in_state(BlockState.SAVED)[:BLOCKS_LIMIT]
        if not halted and self.blocks.leaving():
            self.failure = self.failure or "the container was not suspended any more"
        if self.failure or self.cancelled:
            self._cancel()
        elif saved:
            self._unmap(saved)
        elif self._must_cancel and not self.blocks.leaving():
            self._cancel()

    def _unmap(self, blocks: list[MovedBlock]) -> None:
        for block in blocks:
            block.state = BlockState.UNMAPPING
            self.pool.record(block)
        if self.pool.write():
            self._give(Unmap(self.index, tuple(block.id for block in blocks)))
            return
        for block in blocks:
            block.state = BlockState.SAVED
            self.pool.unrecord(block)
        self.failure = "the swap records cannot be written"
        self._cancel()

    def _cancel(self) -> None:
        """What no UNMAP named stays."""
        for block in self.blocks.leaving():
            self.blocks.drop(block)
            self._must_cancel = True
        if self._must_cancel and self._send is not None:
            self._must_cancel = False
            self._send(Cancel(self.index))

    def _tell_filled(self) -> None:
        """The records say so before the process is told: whatever ends then, nothing is copied to these blocks again."""
        back = self.blocks.in_state(BlockState.RESTORED)
        for block in back:
            block.state = BlockState.FILLED
            self.pool.record(block)
        if back and not self.pool.write():
            for block in back:
                block.state = BlockState.RESTORED
            return
        self.pool.moved_bytes["in"] += sum(block.bytes for block in back)
        self._send_filled(back)

    def _send_filled(self, blocks: list[MovedBlock]) -> None:
        rest = iter(blocks)
        while self._send is not None and (some := list(islice(rest, BLOCKS_LIMIT))):
            seq = self._send(Filled(self.index, tuple(block.id for block in some)))
            for block in some:
                block.told_seq = seq

    def _give(self, message: SwapOut | Unmap | SwapIn, fresh: Collection[int] = ()) -> None:
        if self._send is not None:
            self._order = order = MoverOrder(message, self._clock() + ANSWER_S, fresh=fresh)
            order.seq = self._send(message)

    # Answers

    def answer(self, seq: int, message: SwapMessage, fds: list[int], *, short: bool) -> None:
        """A message of the process, whose descriptors are the mover's. `short`: the arbiter had no room for all of them. Raises BadDocument."""
        try:
            if isinstance(message, Swappable):
                self._state(message)
            elif isinstance(message, Discard):
                self._discard(seq, message)
            else:
                self._answer(seq, message, fds, short=short)
        finally:
            descriptors.discard(fds, self.key[0])

    def _state(self, message: Swappable) -> None:
        first, self.stated = self.stated is None, message
        if self._order is not None:
            return  # it may have crossed the order
        self.blocks.compare(message.away_bytes)
        if first:
            self._send_filled(self.blocks.in_state(BlockState.FILLED))
        self._owner.away_changed(self.gpu)

    def _discard(self, seq: int, message: Discard) -> None:
        """Blocks that an unanswered SWAP_IN names are not made: the process sent this before it read the order, so they end with its answer."""
        making = self._order.message.ids if self._order is not None and isinstance(self._order.message, SwapIn) else ()
        self.discards.take(seq, message, making)
        self._owner.away_changed(self.gpu)

    def _answer(self, seq: int, message: SwapMessage, fds: list[int], *, short: bool) -> None:
        order = self._order
        if order is None or seq != order.seq:
            raise BadDocument(f"{type(message).__name__.upper()} of seq {seq}: no such order is unanswered")
        self.blocks.acknowledge(order.seq)
        if isinstance(message, Blocks):
            self.discards.check(block.id for block in message.blocks)
        match order.message, message:
            case SwapOut(), Blocks():
                self._named(order, message, fds, short=short)
            case SwapIn(_, ids), Blocks():
                self._made(order, ids, message, fds, short=short)
            case Unmap(_, ids), Unmapped():
                self._unmapped(ids, message)
            case _, Unable():
                self._unable(order, message.reason)
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} answers no {type(order.message).__name__.upper()}")
        if self._order is None:
            self._drop_lost()
            self.discards.end_made()
            if self.discards.turn():
                self._owner.away_changed(self.gpu)

    def _answered(self) -> None:
        self._order, self.stalled, self.asked_bytes = None, False, 0

    def _named(self, order: MoverOrder, message: Blocks, fds: list[int], *, short: bool) -> None:
        named_bytes = sum(block.bytes for block in message.blocks)
        check_named(message, asked_bytes=self.asked_bytes, before=order.named, known=self.blocks.known.keys())
        if named_bytes > (most_bytes := self._owner.may_move_bytes(self.gpu)):
            raise BadDocument(f"BLOCKS names {named_bytes} bytes: {most_bytes} are leased and not chosen or away yet")
        order.named_bytes += named_bytes
        order.least_bytes = min([order.least_bytes, *(block.bytes for block in message.blocks)])
        check_needed(order.named_bytes, order.least_bytes, self.asked_bytes)
        if not check_descriptors(len(message.blocks), len(fds), short=short):
            self.failure = "the arbiter has no free file descriptor"
        order.named.update(block.id for block in message.blocks)
        for block in message.blocks:
            self._choose(block.id, block.bytes, fds)
        if not message.more:
            if order.named_bytes < self.asked_bytes:
                self.exhausted = self.exhausted or "it has no more blocks that can be moved"
            self.mean_bytes = order.named_bytes // len(order.named)
            self._answered()

    def _choose(self, id_: int, size_bytes: int, fds: list[int]) -> None:
        """Take the descriptor, if the block can leave. Else the process keeps it."""
        slot = None if self.failure or self.cancelled else self.pool.take(size_bytes)
        if slot is not None:
            self.pool.save(self.blocks.add(id_, size_bytes, slot), fds.pop(0))
            return
        self._must_cancel = True
        if not self.failure and not self.cancelled:
            self.exhausted = f"the host pool has no free range of {size_bytes} bytes"
            descriptors.close(fds.pop(0), self.key[0])

    def _unmapped(self, asked: Collection[int], message: Unmapped) -> None:
        """What it does not name is not away: the program exported it or let it go meanwhile, or the driver refused. Others may be ordered instead."""
        check_unmapped(message, asked)
        self._answered()
        left_bytes = 0
        for id_ in message.ids:
            block = self.blocks[id_]
            block.state, block.charged = BlockState.AWAY, False
            left_bytes += block.bytes
        self.pool.moved_bytes["out"] += left_bytes
        self._owner.left(self.gpu, left_bytes)
        self._keep()

    def _keep(self) -> None:
        """What an UNMAP named and its answer did not is on the GPU as it was, or gone. CANCEL ends that it is chosen."""
        for block in self.blocks.in_state(BlockState.UNMAPPING):
            self.blocks.drop(block)
            self._must_cancel = True

    def _made(self, order: MoverOrder, asked: tuple[int, ...], message: Blocks, fds: list[int], *, short: bool) -> None:
        check_made(message, asked, {id_: self.blocks[id_].bytes for id_ in asked}, order.named)
        whole = check_descriptors(len(message.blocks), len(fds), short=short)
        order.named.update(block.id for block in message.blocks)
        for named in message.blocks:
            block = self.blocks[named.id]
            block.doubt = block.alone = False
            if whole and not block.lost:
                block.state = BlockState.MADE
                self.pool.restore(block, fds.pop(0))
        if not message.more:
            self._answered()
            self._not_made([self.blocks[id_] for id_ in asked if id_ not in order.named], order.fresh)
            for block in self.blocks.in_state(BlockState.MAKING):  # no descriptor of it arrived: it is exported again
                block.state, self._retry_at_s = BlockState.AWAY, self._clock() + RETRY_S

    def _not_made(self, blocks: list[MovedBlock], fresh: Collection[int], why: str = "") -> None:
        """Away as before."""
        for block in blocks:
            block.state, block.charged = BlockState.AWAY, block.id not in fresh
            self._retry_at_s = self._clock() + RETRY_S
            self.pool.record(block)
        self.in_failure = why or ("it could not make all blocks" if blocks else "")
        if blocks:
            self._owner.away_changed(self.gpu)

    def _unable(self, order: MoverOrder, reason: UnableReason) -> None:
        self._answered()
        match order.message:
            case SwapOut():
                self.exhausted = UNABLE_TEXTS[reason]
            case Unmap():
                if (
                    reason is not UnableReason.UNKNOWN_BLOCK
                ):  # else the program exported them all or let them go: others may leave
                    self.failure = UNABLE_TEXTS[reason]
                self._keep()
            case SwapIn(_, (alone,)) if reason is UnableReason.UNKNOWN_BLOCK:
                _log.warning("a block is not away, as its process states", pid=self.key[1], block=alone)
                self.blocks.drop(self.blocks[alone])
                self._owner.away_changed(self.gpu)
            case SwapIn(_, ids):
                rest = [self.blocks[id_] for id_ in ids if id_ not in order.named]
                for block in rest:
                    block.alone = block.alone or reason is UnableReason.UNKNOWN_BLOCK
                self._not_made(rest, () if reason is UnableReason.NO_DESCRIPTOR else order.fresh, UNABLE_TEXTS[reason])

    # The pool

    def job_done(self, block: MovedBlock, done: Done) -> None:
        """The copier has ended its job."""
        copied = done.result is Result.COPIED and done.copied_bytes == block.bytes
        why = f"a copy failed: {done.result.name}, CUDA error {done.cuda_error}"
        if block.state is BlockState.SAVING:
            block.state = BlockState.SAVED
            if not copied:
                self.failure = why
        elif copied:
            block.state = BlockState.RESTORED
        else:
            _log.error("a block was not restored, and will be again", gpu=self.gpu, pid=self.key[1], reason=why)
            block.state, self.in_failure, self._retry_at_s = BlockState.AWAY, why, self._clock() + RETRY_S

    def save_lost(self, block: MovedBlock) -> None:
        """The copier ended before it had saved the block."""
        self.failure = f"the copier ended with {block.bytes} bytes that were not saved"

    def slot_lost(self, block: MovedBlock) -> None:
        """The pool with its content is gone, or has no such slot any more. An order that names it is answered first."""
        self.blocks.lost = f"the pool no longer has {block.bytes} bytes of process {self.key[1]}"
        if self._order is None:
            self._drop_lost()

    def _drop_lost(self) -> None:
        if self.blocks.drop_lost():
            self._owner.away_changed(self.gpu)
