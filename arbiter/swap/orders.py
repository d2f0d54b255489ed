"""The orders of the swap policy to one container, carried out over its processes and GPUs.

    out   suspend and recall unused leases ─▶ SWAP_OUT to processes, a batch at a time ─▶ each saved block leaves at once
    in    SWAP_IN within the room that the policy has reserved ─▶ restore ─▶ FILLED

An order ends when nothing of it moves any more. One that fails, or is cancelled, first takes back what has not left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Final, Protocol

from arbiter.gputime.blocks import BlockStatus
from arbiter.gputime.channels import Halt
from arbiter.swap.mover import Mover
from arbiter.swap.process import SwapProcess
from vgpu.memory.swap.events import ContainerEvent, Progress, Suspended, SwappedIn, SwappedOut

SUSPEND_S: Final = 5.0
"""How long it may take to suspend a container. Guessed: it takes milliseconds where it succeeds."""
RECALL_S: Final = 0.02
"""How long unused leases have to come back, so that less is copied. Specified: at most 50 ms; guessed: a library answers within one."""
LOOK_S: Final = 0.001
"""How often it is checked whether the container is suspended and its processes have answered: no event says so. Guessed; a suspend takes half a millisecond a
process (measured, H200)."""
BATCH_BYTES: Final = 2**30
BATCH_BLOCKS: Final = 256
"""The least that one SWAP_OUT requests, if so much is to leave, or so many blocks as large as before. Each block is a descriptor, and between two batches the
copier waits for some milliseconds: 1 GiB is copied in 21 (measured, H200)."""
PROGRESS_S: Final = 10.0
"""An order that moves nothing for so long fails."""


class OrderHost(Protocol):
    """The container, to its orders."""

    name: str

    @property
    def processes(self) -> Iterable[SwapProcess]:
        """Those that live."""

    def used_bytes(self, gpu: str) -> int:
        """What it has leased of a GPU."""

    def apply(self, event: ContainerEvent) -> None:
        """To the policy."""

    def status(self) -> BlockStatus:
        """How far its suspend is."""

    def recall(self, gpu: str, size_bytes: int) -> None:
        """Request unused leases."""

    def owes(self, gpu: str) -> bool:
        """Whether a process has yet to answer that."""

    def now_s(self) -> float:
        """The time."""


class OutOrder:
    """A swap out of GPU -> bytes. `failure`: why it failed, once it has ended."""

    def __init__(self, host: OrderHost, gpus: Mapping[str, int]) -> None:
        self.failure = ""
        self.stuck = False
        """A process does not answer, or the container cannot be suspended: trying again at once is no use."""
        self._host, self._gpus = host, dict(gpus)
        self._used = {gpu: host.used_bytes(gpu) for gpu in gpus}
        self._moved = dict.fromkeys(gpus, 0)
        self._done: set[str] = set()
        self._cancelled = False
        self._begun = False
        self._halts: frozenset[Halt] | None = None
        """Of the suspend that it began with; None = it is not suspended yet."""
        self._recall_until_s = host.now_s() + RECALL_S
        self._until_s = host.now_s() + SUSPEND_S
        self._look_at_s = host.now_s()
        for mover in self._movers():
            mover.exhausted = ""
            if not mover.leaving:
                mover.failure = ""
        for gpu, wanted_bytes in gpus.items():
            host.recall(gpu, wanted_bytes)

    def cancel(self) -> None:
        """What has not left stays."""
        self._cancelled = True

    def fail(self, reason: str, *, stuck: bool = False) -> None:
        """The same, because of this."""
        self.failure = self.failure or reason
        self.stuck = self.stuck or stuck

    def left(self, gpu: str, size_bytes: int) -> None:
        """A part of it has left."""
        if gpu in self._moved:
            self._moved[gpu] += size_bytes
        self._until_s = self._host.now_s() + PROGRESS_S

    def deadline_s(self) -> float:
        """When `turn` is due. One that ends waits for answers, which have deadlines of their own."""
        if self._ending:
            return inf
        return self._until_s if self._begun else self._look_at_s

    def turn(self) -> bool:
        """Whether it has ended."""
        if not (self._ending or self._suspended):
            self._suspend()
        self._begun = self._begun or (self._suspended and self._recalled())
        self._look_at_s = self._host.now_s() + LOOK_S
        if not self._ending and self._begun:
            for gpu in self._gpus:
                if gpu not in self._done:
                    self._move(gpu)
            if not self._ending and self._host.now_s() >= self._until_s:
                self.fail(f"nothing left the GPU for {PROGRESS_S:g} s", stuck=True)
        if self._ending:
            self._stay()
        return self._ended()

    def stays_halted(self, status: BlockStatus) -> bool:
        """Whether nothing of the container runs, nor has run since the order began to move memory. If something has, what was saved may be old: the order
        fails. While something runs, what is leaving fails by itself (`Mover.turn`)."""
        if self._halts is None or not status.halted:
            return status.halted
        if not status.since(self._halts):
            self.fail("the container was resumed while its memory moved")
            return False
        return True

    @property
    def _suspended(self) -> bool:
        return self._halts is not None

    @property
    def _ending(self) -> bool:
        return self._cancelled or bool(self.failure)

    def _suspend(self) -> None:
        status, now_s = self._host.status(), self._host.now_s()
        if status.halted:
            self._halts, self._until_s = status.halts, now_s + PROGRESS_S
            self._host.apply(Suspended(now_s, self._host.name))
        elif now_s >= self._until_s:
            self.fail(status.obstacle or f"it could not be suspended within {SUSPEND_S:g} s", stuck=True)

    def _recalled(self) -> bool:
        return self._host.now_s() >= self._recall_until_s or not any(map(self._host.owes, self._gpus))

    def _left_to_move(self, gpu: str) -> int:
        returned = max(0, self._used[gpu] - self._host.used_bytes(gpu))
        return self._gpus[gpu] - self._moved[gpu] - returned

    def _move(self, gpu: str) -> None:
        """Order more blocks of a GPU to be named, or note that all has left that will."""
        movers = [(process, process.movers[gpu]) for process in self._host.processes if gpu in process.movers]
        for process, mover in movers:
            if mover.failure:
                self.fail(f"process {process.pid}: {mover.failure}")
                return
            if mover.stalled:
                self.fail(f"process {process.pid} does not answer", stuck=True)
                return
        rest = self._left_to_move(gpu) - sum(mover.leaving_bytes for _, mover in movers)
        usable = [(process, mover) for process, mover in movers if _may_leave(process, mover)]
        for process, mover in sorted(usable, key=lambda one: -one[1].can_leave_bytes):
            if rest <= 0:
                break
            if not _is_idle(mover):
                continue
            batch = max(BATCH_BYTES, BATCH_BLOCKS * mover.mean_bytes)
            wanted_bytes = min(rest, mover.can_leave_bytes, batch)
            process.order(partial(mover.swap_out, wanted_bytes))
            rest -= wanted_bytes
        if any(mover.leaving for _, mover in movers):
            return
        if rest > 0 and usable:
            return  # something of it comes back first
        if rest > 0 and self._moved[gpu] == 0 and rest >= self._gpus[gpu]:
            why = next((f"process {p.pid}: {mover.exhausted}" for p, mover in movers if mover.exhausted), "")
            self.fail(why or "no process has memory that can be moved")
            return
        self._finish(gpu)

    def _finish(self, gpu: str) -> None:
        self._done.add(gpu)
        self._host.apply(SwappedOut(self._host.now_s(), self._host.name, gpu))

    def _stay(self) -> None:
        for mover in self._movers():
            if mover.leaving:
                mover.cancelled = True

    def _ended(self) -> bool:
        if self._ending and any(mover.leaving and not mover.stalled for mover in self._movers()):
            return False
        if self._cancelled and not self.failure:
            for gpu in self._gpus.keys() - self._done:
                self._finish(gpu)
        return bool(self.failure) or self._done == self._gpus.keys()

    def _movers(self) -> list[Mover]:
        return [mover for process in self._host.processes for mover in process.movers.values()]


class InOrder:
    """All that is away comes back. `failure` as of the other."""

    def __init__(self, host: OrderHost, gpus: Iterable[str]) -> None:
        self.failure = ""
        self._host, self._gpus = host, tuple(gpus)
        self._done: set[str] = set()
        self._unreturned = -1
        self._until_s = host.now_s() + PROGRESS_S

    def deadline_s(self) -> float:
        """When `turn` is due."""
        return self._until_s

    def turn(self, room: Callable[[str], int | None]) -> bool:
        """Whether it has ended. `room`: GPU -> what may be made there now; None: that is to be decided first."""
        for gpu in self._gpus:
            movers = [(process, process.movers[gpu]) for process in self._host.processes if gpu in process.movers]
            for process, mover in movers:
                self._bring(process, mover, room)
            if gpu not in self._done and not any(mover.blocks.unreturned() or mover.leaving for _, mover in movers):
                self._done.add(gpu)
                self._host.apply(SwappedIn(self._host.now_s(), self._host.name, gpu))
        if len(self._done) == len(self._gpus):
            return True
        self._watch(room)
        return bool(self.failure)

    def _bring(self, process: SwapProcess, mover: Mover, room: Callable[[str], int | None]) -> None:
        room_bytes = room(mover.gpu) if mover.connected else None
        if room_bytes is not None:
            bring(self._host, process, mover, room_bytes)

    def _watch(self, room: Callable[[str], int | None]) -> None:
        """It fails if nothing comes back although there is a copier and room."""
        now_s = self._host.now_s()
        movers = [(p, mover) for p in self._host.processes for mover in p.movers.values() if mover.blocks.unreturned()]
        count = sum(len(mover.blocks.unreturned()) for _, mover in movers)
        may = any(
            mover.pool.ready and (room(mover.gpu) or any(block.charged for block in mover.blocks.unreturned()))
            for _, mover in movers
        )
        if count != self._unreturned or not may:
            self._unreturned, self._until_s = count, now_s + PROGRESS_S
        elif now_s >= self._until_s:
            process, mover = movers[0]
            why = mover.in_failure or ("it does not answer" if process.connected else "it is not connected")
            self.failure = f"process {process.pid}: {why}"


def bring(host: OrderHost, process: SwapProcess, mover: Mover, room_bytes: int) -> None:
    """Order blocks to be made: those that use memory of the GPU anyway, and others within the room."""
    chosen = mover.candidates(room_bytes)
    if not chosen:
        return
    fresh_bytes = sum(block.bytes for block in chosen if not block.charged)
    if fresh_bytes:
        host.apply(Progress(host.now_s(), host.name, mover.gpu, "in", fresh_bytes))
    process.order(partial(mover.swap_in, chosen))


def _may_leave(process: SwapProcess, mover: Mover) -> bool:
    return not process.broken and mover.connected and not mover.exhausted and mover.can_leave_bytes > 0


def _is_idle(mover: Mover) -> bool:
    """It may be ordered to name blocks: what uses memory of the GPU and has no content comes back first."""
    return not mover.waits and not mover.leaving and not any(block.charged for block in mover.blocks.unreturned())
