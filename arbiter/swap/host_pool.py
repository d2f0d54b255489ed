"""The host pool of one GPU: its slots, its records, and the jobs of its copier.

It knows how blocks are copied and where their content is, and not why. A job without a DONE counts as not done. Its slot is used again only after its DONE, or
after a copier has said that it has no job. A slot whose record is gone is used again once the file of the records says so.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final, Literal

import structlog

from arbiter.swap.block import NEEDS_SLOT, ON_GPU, BlockState, MovedBlock
from arbiter.swap.block_records import BlockRecords
from arbiter.swap.copier import Copier, CopierAway
from arbiter.swap.poller import Poller
from arbiter.swap.pool_job import PoolJob
from arbiter.swap.records_file import RecordsFile
from vgpu.api.errors import Refused
from vgpu.memory.swap_records import SwapRecord
from vgpu.memory.swap_slots import Slot, SwapSlots
from vgpu.protocol.copier import Done, Result, State

DIRECTION_LIMIT: Final = 64
"""Jobs of one direction that the copier has at a time: half of what it takes. With blocks of 2 MiB that is 2.5 ms of copying, several times what the loop takes
to answer (measured: copies at 50 GB/s on an H200; guessed: the loop)."""
RETRY_FIRST_S: Final = 0.05
RETRY_MOST_S: Final = 1.0
"""Between two attempts to connect. Guessed: a copier takes some seconds to start."""
STATE_S: Final = 1.0
STATE_STARTING_S: Final = 0.25
"""How often the copier's state is requested, and while it starts."""
SILENT_S: Final = 5.0
"""A copier that owes a STATE for so long is not ready. Guessed: it answers within a millisecond, whatever it copies."""
AGAIN_S: Final = 0.01
"""After which a job that the copier could not take is sent again, and a copier that ends an earlier arbiter's jobs is requested its state. Specified: at most some
milliseconds."""
ANSWERS_A_TURN: Final = 256
_NOT_BEGUN: Final = frozenset({Result.TOO_MANY_JOBS, Result.NOT_READY, Result.SLOT_IN_USE, Result.ENDING})
_log = structlog.get_logger()


class HostPool:
    """See the module."""

    def __init__(
        self, gpu: str, path: Path, records: RecordsFile, poller: Poller, clock: Callable[[], float], connect: Callable[[Path], Copier] = Copier,
    ) -> None:  # fmt: skip
        self.gpu = gpu
        self.slots: SwapSlots | None = None
        """None: no copier has stated the size yet."""
        self.reason = "no copier was there yet"
        """Why it is not ready."""
        self.answered = False
        """Whether a copier has stated once whether it is ready, or there was none."""
        self.moved_bytes: Counter[Literal["out", "in"]] = Counter()
        """What has left the GPU, and what is back with its content."""
        self.context_bytes = 0
        """What the context of the last copier took of the GPU."""
        self._path, self._poller, self._clock, self._connect = path, poller, clock, connect
        self._link: Copier | None = None
        self._ready = False
        self._numbers = itertools.count(1)
        self._queues: dict[bool, deque[PoolJob]] = {True: deque(), False: deque()}
        self._running: dict[int, PoolJob] = {}
        self._orphans: list[PoolJob] = []
        """Jobs of an ended connection: their slots may still be copied to or from."""
        self._busy: dict[int, PoolJob] = {}
        """By offset of their slots: what the copier may have."""
        self._held: set[Slot] = set()
        self._blocks: dict[MovedBlock, None] = {}
        """With a slot that may have their content, or is to have it."""
        self._records = BlockRecords(records, clock)
        self._releasing: list[Slot] = []
        """Of blocks whose records are gone by the next write."""
        self._connect_at_s = self._state_at_s = self._jobs_at_s = -inf
        self._retry_s = RETRY_FIRST_S
        self._owes_since_s: float | None = None

    @property
    def copier_pid(self) -> int:
        """On the host; 0 = none is connected."""
        return self._link.pid if self._link is not None else 0

    @property
    def ready(self) -> bool:
        """Whether the copier takes jobs."""
        return self._ready

    @property
    def pool_bytes(self) -> int:
        """Of all slots; 0 = unknown."""
        return self.slots.pool_bytes if self.slots is not None else 0

    def stored(self) -> Sequence[SwapRecord]:
        """The records of an earlier arbiter."""
        return self._records.stored()

    def adopt(self, block: MovedBlock) -> None:
        """A block of the records file."""
        self._held.add(block.slot)
        self._blocks[block] = None
        self._records.adopt(block)

    def take(self, size_bytes: int) -> Slot | None:
        """A slot of that size, or None."""
        if self.slots is None:
            return None
        slot = self.slots.take(size_bytes)
        if slot is None and self._releasing and self.write():
            slot = self.slots.take(size_bytes)
        if slot is not None:
            self._held.add(slot)
        return slot

    def free(self, block: MovedBlock) -> None:
        """The content of its slot is needed no more, and nobody waits for its job."""
        self.forget(block)
        if block.lost:
            return  # its slot is another's
        self._blocks.pop(block, None)
        if block in self._records:
            self._records.remove(block)
        if block.slot not in self._held:
            return  # it is outside the pool
        if (job := self._busy.get(block.slot.offset)) is not None:
            job.frees = True
        else:
            self._releasing.append(block.slot)

    def save(self, block: MovedBlock, fd: int) -> None:
        """Copy the block to its slot. The descriptor is the pool's from now on."""
        self._blocks[block] = None
        self._queue(block, fd, saves=True)

    def restore(self, block: MovedBlock, fd: int) -> None:
        """Copy its slot to the block."""
        self._queue(block, fd, saves=False)

    def forget(self, block: MovedBlock) -> None:
        """Nobody waits for the block's job. It may go on for some milliseconds."""
        for queue in self._queues.values():
            for job in [job for job in queue if job.block is block]:
                queue.remove(job)
                job.close()
        for number, job in self._running.items():
            if job.block is block:
                job.block = None
                if self._link is not None:
                    with suppress(CopierAway):  # it is found out when it is read
                        self._link.forget(number)

    def record(self, block: MovedBlock) -> None:
        """The block may be away from the next successful `write` on; again: its stage changed."""
        self._records.put(block)

    def unrecord(self, block: MovedBlock) -> None:
        """It was not ordered away after all."""
        self._records.remove(block)

    def write(self) -> bool:
        """Whether the file has the present records. Slots whose records are gone become free."""
        if not self._records.write():
            return False
        if self.slots is not None:
            for slot in self._releasing:
                self._held.discard(slot)
                self.slots.release(slot)
            self._releasing.clear()
        return True

    def turn(self) -> None:
        """What is due: connect, request the state, start jobs, write the records."""
        now_s = self._clock()
        if self._link is None and now_s >= self._connect_at_s:
            self._open(now_s)
        try:
            self._request_state(now_s)
            self._start(now_s)
        except CopierAway as away:
            self._lost(str(away))
        if self._records.unwritten or self._releasing:
            self.write()

    def read(self) -> None:
        """The copier's answers."""
        try:
            for _ in range(ANSWERS_A_TURN if self._link is not None else 0):
                answer = self._link.receive() if self._link is not None else None
                if answer is None:
                    return
                if isinstance(answer, State):
                    self._state(answer)
                else:
                    self._done(answer)
        except CopierAway as away:
            self._lost(str(away))

    def deadline_s(self) -> float:
        """When `turn` is due."""
        times = [self._state_at_s if self._link is not None else self._connect_at_s, self._records.deadline_s()]
        if self._owes_since_s is not None and self._ready:
            times.append(self._owes_since_s + SILENT_S)
        if any(self._queues.values()) and self._jobs_at_s > self._clock():
            times.append(self._jobs_at_s)
        return min(times)

    def close(self) -> None:
        """End the connection. The copier forgets its jobs; the records say what is where."""
        if self._link is not None:
            self._poller.remove(self._link.fd)
            self._link.close()
            self._link = None
        for job in [*self._queues[True], *self._queues[False], *self._running.values()]:
            job.close()

    def _queue(self, block: MovedBlock, fd: int, *, saves: bool) -> None:
        self._queues[saves].append(PoolJob(saves, block.slot, block.bytes, fd, block, block.owner.key[0]))

    def _open(self, now_s: float) -> None:
        try:
            self._link = self._connect(self._path)
        except CopierAway as away:
            self.reason, self.answered = str(away), True
            self._connect_at_s = now_s + self._retry_s
            self._retry_s = min(RETRY_MOST_S, 2 * self._retry_s)
            return
        self._poller.add(self._link.fd, self.read)
        self._state_at_s, self._owes_since_s = now_s, None
        self.reason = "the copier starts"

    def _request_state(self, now_s: float) -> None:
        if self._link is None:
            return
        if self._owes_since_s is not None and now_s >= self._owes_since_s + SILENT_S and self._ready:
            self._ready, self.reason = False, f"the copier has not answered for {SILENT_S:g} s"
            _log.error("the copier does not answer", gpu=self.gpu)
        if now_s < self._state_at_s:
            return
        if self._owes_since_s is None:
            self._link.request_state()
            self._owes_since_s = now_s
        waits_s = AGAIN_S if self._orphans else STATE_S if self._ready else STATE_STARTING_S
        self._state_at_s = now_s + waits_s

    def _state(self, state: State) -> None:
        self._owes_since_s, self.answered = None, True
        self.context_bytes = (state.context_mib << 20) or self.context_bytes
        if state.jobs == 0 and not self._running:
            for job in self._orphans:
                self._ended(job)
            self._orphans.clear()
        try:
            if state.ready:
                self._identify(state)
            if state.pool_bytes and state.pool_bytes != self.pool_bytes:
                self._size(state.pool_bytes)
        except (ValueError, Refused) as error:
            state_ready, self.reason = False, str(error)
        else:
            state_ready = state.ready
        if state_ready and not self._ready:
            self._retry_s = RETRY_FIRST_S
            _log.info("the copier is ready", gpu=self.gpu, pool_bytes=state.pool_bytes, pages=state.pages.name)
        elif not state.ready:
            self.reason = f"the copier has prepared {min(state.allocated_bytes, state.registered_bytes)} of {state.pool_bytes} bytes"
        self._ready = state_ready and self.slots is not None
        if self._ready:
            self.reason = ""

    def _size(self, pool_bytes: int) -> None:
        """The pool has that size from now on. What it had stays where it is."""
        slots = SwapSlots(pool_bytes)
        lost = set()
        for slot in sorted(self._held):
            try:
                slots.take_at(slot)
            except Refused:
                lost.add(slot)
        self.slots = slots
        self._lose([block for block in self._blocks if block.slot in lost], "their slots are outside the pool")
        self._held.difference_update(lost)
        self._releasing = [slot for slot in self._releasing if slot in self._held]

    def _identify(self, state: State) -> None:
        """A copier has prepared this file. In another one than before is nothing of what was saved. Raises Refused for a copier that does not state it."""
        if state.file is None:
            raise Refused("the copier does not state which file its pool is: it is of an earlier release")
        before, self._records.pool = self._records.pool, str(state.file)
        if before not in ("", self._records.pool):
            self._records.unwritten = True
            self._lose(
                [block for block in self._blocks if block.state in NEEDS_SLOT], "the pool is another file", free=True
            )

    def _lose(self, blocks: list[MovedBlock], why: str, *, free: bool = False) -> None:
        """Forget them and their slots before this is reported to their owners: what follows from that may take slots. What is whole on the GPU stays there. `free`:
        the pool has their slots, for others."""
        gone = [block for block in blocks if block.state not in ON_GPU]
        for block in gone:
            self.forget(block)
            del self._blocks[block]
            self._records.remove(block)
            self._held.discard(block.slot)
            if self.slots is not None and free:
                self.slots.release(block.slot)
            block.lost = True
        if gone:
            _log.error("memory that is away is lost", gpu=self.gpu, reason=why, bytes=sum(block.bytes for block in gone))  # fmt: skip
        for block in blocks:
            if block.lost:
                block.owner.slot_lost(block)
            elif block.leaving:
                block.owner.save_lost(block)

    def _start(self, now_s: float) -> None:
        if self._link is None or not self._ready or self._orphans or now_s < self._jobs_at_s:
            return
        running = sum(job.saves for job in self._running.values())
        free = {True: DIRECTION_LIMIT - running, False: DIRECTION_LIMIT - (len(self._running) - running)}
        for saves, queue in self._queues.items():
            for _ in range(len(queue)):
                if free[saves] <= 0 or self._link.room <= 0:
                    break
                job = queue.popleft()
                if job.slot.offset in self._busy:
                    queue.append(job)  # an earlier job for that slot has not ended yet
                    continue
                free[saves] -= 1
                self._send(self._link, job)

    def _send(self, link: Copier, job: PoolJob) -> None:
        number = next(self._numbers)
        try:
            order = link.save if job.saves else link.restore
            order(number, job.slot.offset, job.size_bytes, job.fd)
        except CopierAway:
            self._queues[job.saves].appendleft(job)
            raise
        self._running[number] = self._busy[job.slot.offset] = job
        if job.block is not None:
            job.block.state = BlockState.SAVING if job.saves else BlockState.RESTORING

    def _done(self, done: Done) -> None:
        job = self._running.pop(done.job)
        self._ended(job)
        if job.block is not None and done.result in _NOT_BEGUN:
            if done.result is Result.ENDING:
                self._ready, self.reason = False, "the copier ends"
            self._jobs_at_s = self._clock() + AGAIN_S
            self._queues[job.saves].appendleft(job)
            return
        job.close()
        if job.block is not None:
            job.block.owner.job_done(job.block, done)

    def _ended(self, job: PoolJob) -> None:
        """The copier no longer has it."""
        if self._busy.get(job.slot.offset) is job:
            del self._busy[job.slot.offset]
        if job.frees:
            self._releasing.append(job.slot)

    def _lost(self, reason: str) -> None:
        """The connection ended. What was to be restored is restored again."""
        if self._link is None:
            return
        _log.error("the copier is away", gpu=self.gpu, reason=reason, jobs=len(self._running))
        self._poller.remove(self._link.fd)
        self._link.close()
        self._link, self._ready, self.reason, self._owes_since_s = None, False, reason, None
        self._connect_at_s = self._clock() + self._retry_s
        self._retry_s = min(RETRY_MOST_S, 2 * self._retry_s)
        running, self._running = list(self._running.values()), {}
        lost = []
        for job in reversed(running):
            block, job.block = job.block, None
            self._orphans.append(job)
            if block is None or job.saves:
                job.close()
                lost += [block] if block is not None else []
                continue
            block.state = BlockState.MADE
            self._queues[False].appendleft(PoolJob(False, job.slot, job.size_bytes, job.fd, block, job.container))
        for block in lost:
            block.owner.save_lost(block)
