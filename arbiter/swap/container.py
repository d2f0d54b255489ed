"""One container: its processes, the order that it carries out, whether it can be swapped, and when it may run again.

It is blocked from before its first block is chosen until the last one is back. What uses memory of the GPU without having its content comes back whatever the policy
orders: an order that failed in the middle, or an arbiter before this one, may have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final

import structlog

from arbiter.attention import Attention
from arbiter.connection import TOO_MANY, Connection
from arbiter.gputime.blocks import BlockStatus
from arbiter.swap.ability import Ability
from arbiter.swap.container_host import ContainerHost
from arbiter.swap.mover import Mover
from arbiter.swap.orders import InOrder, OutOrder, bring
from arbiter.swap.process import SwapProcess
from vgpu.memory.swap.events import Able, ContainerEvent, Failed, MemoryContract, Progress, Unable, Used
from vgpu.memory.swap_records import SwapRecord

REAP_S: Final = 0.25
"""How often a process without a connection is looked for."""
CROSSED_S: Final = 1.0
"""After which a process's reports to GPU time and to here agree. Guessed: both connections are made within 200 ms."""
PROCESSES_LIMIT: Final = 1024
"""With a connection for bursts, or with memory away. The same as for GPU time."""
_log = structlog.get_logger()


class SwapContainer:
    """See the module. Without a contract it is known only by the records of an earlier arbiter."""

    def __init__(self, name: str, host: ContainerHost) -> None:
        self.name = name
        self.contract: MemoryContract | None = None
        self.gpus: Sequence[str] = ()
        self.order: OutOrder | InOrder | None = None
        self.blocked = False
        self.ability = Ability()
        self.stated_s = 0.0
        """Processor time that its SWAPPABLEs took. They alone are charged: every other message answers an order, and a swap is not to wait."""
        self.attention = Attention(host.clock(), lambda: self.stated_s)
        self._host = host
        self._processes: dict[tuple[int, int], SwapProcess] = {}
        self._used: dict[str, tuple[int, int]] = {}
        self._told: dict[str, tuple[int, int, int]] = {}
        self._reap_at_s = -inf
        self._end_again_at_s = inf
        """A process may have reported to GPU time that memory of it is away just before its last FILLED came: that began a block of which nothing here knows."""

    # What it has

    @property
    def processes(self) -> Iterable[SwapProcess]:
        """Those that live, as far as is known."""
        return self._processes.values()

    def movers(self, gpu: str | None = None) -> list[Mover]:
        """Of all processes, on one GPU or all."""
        return [
            mover
            for process in self._processes.values()
            for mover in process.movers.values()
            if gpu in (None, mover.gpu)
        ]

    def used_bytes(self, gpu: str) -> int:
        """What it has leased of a GPU in all."""
        return sum(self._used.get(gpu, (0, 0)))

    def away_bytes(self, gpu: str) -> int:
        """What is away, as the policy counts it."""
        return sum(mover.blocks.away_bytes for mover in self.movers(gpu))

    def connected_away_bytes(self, gpu: str) -> int:
        """The part of it whose lease is counted: leases end with the connection."""
        return sum(mover.blocks.away_bytes for mover in self.movers(gpu) if mover.connected)

    def process_away_bytes(self, pid: int, gpu: str) -> int:
        """What is away of one process, by its host pid."""
        return sum(
            process.movers[gpu].blocks.away_bytes
            for process in self._processes.values()
            if process.pid == pid and gpu in process.movers
        )

    def process_elastic_bytes(self, pid: int, gpu: str) -> int:
        """Elastic memory of one process, by its host pid, as it last stated."""
        movers = (process.movers.get(gpu) for process in self._processes.values() if process.pid == pid)
        return sum(mover.stated.elastic_bytes for mover in movers if mover is not None and mover.stated is not None)

    def bursts(self, gpu: str) -> bool:
        """Whether its limit is above its guarantee there, or some of its memory is away."""
        if self.contract is None or gpu not in self.contract.gpus:
            return self.moved_bytes(gpu) > 0
        guarantee_bytes, limit_bytes = self.contract.gpus[gpu]
        return limit_bytes > guarantee_bytes or self.used_bytes(gpu) > guarantee_bytes or self.moved_bytes(gpu) > 0

    def moved_bytes(self, gpu: str) -> int:
        """What has a slot in the pool of a GPU, or will have."""
        return sum(mover.blocks.moved_bytes for mover in self.movers(gpu))

    def may_move_bytes(self, gpu: str) -> int:
        """How much more of its memory can be chosen or away."""
        return self.used_bytes(gpu) - self.moved_bytes(gpu)

    @property
    def lost(self) -> str:
        """Why some of its memory can never come back; empty: all can."""
        return next((mover.blocks.lost for mover in self.movers() if mover.blocks.lost), "")

    @property
    def quiet(self) -> bool:
        """Nothing of it waits for anything."""
        if self.order is not None or self.blocked or min(self.ability.deadline_s, self._end_again_at_s) < inf:
            return False
        return all(
            process.connected and process.unable is not None and not any(map(_busy, process.movers.values()))
            for process in self._processes.values()
        )

    def now_s(self) -> float:
        """The time."""
        return self._host.clock()

    # What happens to it

    def adopt(self, record: SwapRecord, gpu: str) -> None:
        """A record of an earlier arbiter. Nothing of it runs until its process has stated more."""
        process = self._processes.get((record.pid, record.started)) or self._new(record.pid, record.started)
        if gpu not in process.movers:
            process.movers[gpu] = self._mover(process, gpu)
        process.movers[gpu].blocks.adopt(record)
        self._block()

    def join(self, contract: MemoryContract, gpus: Sequence[str]) -> None:
        """It has a grant."""
        self.contract, self.gpus = contract, tuple(gpus)
        for process in self._processes.values():
            self._complete(process)
        for gpu in self.gpus:
            if self.movers(gpu):
                self.away_changed(gpu)

    def change(self, contract: MemoryContract) -> None:
        """Other limits."""
        self.contract = contract
        for process in self._processes.values():
            self._limit(process)

    def take(self, connection: Connection) -> None:
        """A process connected."""
        if len(self._processes) >= PROCESSES_LIMIT:
            connection.refuse(TOO_MANY, f"more than {PROCESSES_LIMIT} processes of one container")
            connection.close()
            return
        pid, started = connection.pid, self._host.started_at(connection.pid) if connection.pid > 0 else 0
        if not started:
            pid = -connection.number
        process = self._processes.get((pid, started)) or self._new(pid, started)
        if self._replaced(process):
            self._forget(process)
            process = self._new(pid, started)
        process.image = process.image or self._host.image_of(max(0, pid))
        self._complete(process)
        process.take(connection, self.gpus)
        self._end_again_at_s = self.now_s() + CROSSED_S
        self._limit(process)

    def use(self, gpu: str, resident_bytes: int, elastic_bytes: int) -> None:
        """What its processes have leased. Less: a process may have ended, and what was away of it is not part of the leases of the others; or it returned
        what it had for blocks that it discarded."""
        returned_bytes = self.used_bytes(gpu) - resident_bytes - elastic_bytes
        if returned_bytes > 0:
            for process in list(self._processes.values()):
                if any(mover.blocks.away_bytes for mover in process.movers.values()):
                    process.read()
            for mover in self.movers(gpu):
                returned_bytes -= mover.discards.returned(returned_bytes)
        self._used[gpu] = resident_bytes, elastic_bytes
        self.away_changed(gpu)

    def granted(self, gpu: str, size_bytes: int, *, elastic: bool) -> None:
        """The policy counts this as used already."""
        resident_bytes, elastic_bytes = self._used.get(gpu, (0, 0))
        self._told.pop(gpu, None)
        resident_bytes, elastic_bytes = (
            resident_bytes + size_bytes * (not elastic),
            elastic_bytes + size_bytes * elastic,
        )
        self._used[gpu] = max(0, resident_bytes), max(0, elastic_bytes)

    def leave(self) -> None:
        """Its grant is gone."""
        for process in self._processes.values():
            process.die()
        self._processes.clear()
        self.attention.close()

    def close(self) -> None:
        """The arbiter ends: what is away stays away."""
        for process in self._processes.values():
            process.end()
        self.attention.close()

    # The policy's orders

    def swap_out(self, gpus: dict[str, int]) -> None:
        """Begin to move so much out. It ends an order that brings memory back."""
        self._block()
        self.order = OutOrder(self, gpus)
        self._host.activate(self.name)

    def cancel(self) -> None:
        """What has not left stays."""
        if isinstance(self.order, OutOrder):
            self.order.cancel()
            self._host.activate(self.name)

    def swap_in(self) -> None:
        """Bring back what is away."""
        self.order = InOrder(self, self.gpus)
        self._host.activate(self.name)

    def did_not_give_way(self, reason: str) -> None:
        """The policy counts it as unable from now on."""
        self.ability.refused(reason, self.now_s())
        self._host.activate(self.name)

    # Its turn

    def turn(self, room: Callable[[str], int | None]) -> None:
        """Carry out what can be carried out now. `room` as `InOrder.turn` has it."""
        if self.contract is None:
            self._reap()
            if self.blocked and not self._processes:
                self.blocked = False
                self._host.blocks.end(self.name)
            return
        halted = isinstance(self.order, OutOrder) and self.order.stays_halted(self.status())
        for process in list(self._processes.values()):
            process.turn(halted=halted)
        self._reap()
        if self.blocked:
            self._settle()
        if isinstance(self.order, OutOrder):
            self._turn_out(self.order)
        elif self.order is not None and self.order.turn(room):
            self._end_order(self.order)
        self._judge()
        self._unblock()

    def deadline_s(self) -> float:
        """When `turn` is due."""
        times = [process.deadline_s() for process in self._processes.values()]
        if self.order is not None:
            times.append(self.order.deadline_s())
        times += [self.ability.deadline_s, self._end_again_at_s]
        if not all(process.connected for process in self._processes.values()):
            times.append(self._reap_at_s)
        return min(times, default=inf)

    def _turn_out(self, order: OutOrder) -> None:
        reason = self._reason()
        if reason:
            order.fail(reason)
        if order.turn():
            self._end_order(order)

    def _end_order(self, order: OutOrder | InOrder) -> None:
        self.order = None
        if not order.failure:
            self.ability.succeeded()
            return
        _log.warning("a swap failed", grant=self.name, reason=order.failure, out=isinstance(order, OutOrder))
        for gpu in self.gpus:
            self.tell_used(gpu, anyway=True)
        if isinstance(order, OutOrder):
            self.ability.failed(order.failure, self.now_s(), stuck=order.stuck)
        self._host.apply(Failed(self.now_s(), self.name, self.gpus[0], order.failure))

    def _settle(self) -> None:
        """What uses memory of the GPU anyway comes back, in order or not."""
        for process in self._processes.values():
            for mover in process.movers.values():
                if any(block.charged for block in mover.blocks.unreturned()):
                    bring(self, process, mover, 0)

    def _judge(self) -> None:
        """Report to the policy whether it can be swapped. Not while it moves: an order first ends."""
        reason = self._reason()
        if (reason and self.order is not None) or not self.ability.change(reason):
            return
        event = Unable(self.now_s(), self.name, reason) if reason else Able(self.now_s(), self.name)
        self._host.apply(event)

    def _reason(self) -> str | None:
        return self.ability.reason(self._processes.values(), self.lost, self.now_s())

    def _reap(self) -> None:
        """Forget processes that have ended."""
        now_s = self.now_s()
        if now_s < self._reap_at_s:
            return
        self._reap_at_s = now_s + REAP_S
        for process in list(self._processes.values()):
            if process.connected:
                continue
            lives = process.started and self._host.started_at(process.pid) == process.started
            if not lives or self._replaced(process):
                self._forget(process)

    def _replaced(self, process: SwapProcess) -> bool:
        """Whether it runs another program now: its memory ended with the one before. Not known of a process that did not connect to this arbiter."""
        image = self._host.image_of(process.pid) if process.image else 0
        return image not in (0, process.image)

    def _forget(self, process: SwapProcess) -> None:
        del self._processes[process.pid, process.started]
        process.die()
        for gpu in process.movers:
            self.away_changed(gpu)

    # Its block

    def _block(self) -> None:
        if not self.blocked:
            self.blocked = True
            self._host.blocks.begin(self.name)

    def _unblock(self) -> None:
        if self.now_s() >= self._end_again_at_s:
            stated = all(mover.connected for mover in self.movers())
            self._end_again_at_s = inf if stated else self.now_s() + CROSSED_S
            if stated and not self.blocked:
                self._host.blocks.end(self.name)
        if not self.blocked or self.order is not None or self.lost or self._host.paused(self.name):
            return
        if not any(map(_moves, self.movers())):
            self.blocked = False
            self._host.blocks.end(self.name)

    # To its movers and orders

    def left(self, gpu: str, size_bytes: int) -> None:
        """So much left the GPU."""
        if isinstance(self.order, OutOrder):
            self.order.left(gpu, size_bytes)
            self.apply(Progress(self.now_s(), self.name, gpu, "out", size_bytes))
        else:
            self.away_changed(gpu)

    def away_changed(self, gpu: str) -> None:
        """More or less is away, or used, than was reported."""
        if self.lost or any(mover.blocks.unreturned() for mover in self.movers(gpu)):
            self._block()
        self.tell_used(gpu)
        self._host.activate(self.name)

    def apply(self, event: ContainerEvent) -> None:
        """To the policy."""
        if isinstance(event, Progress):
            self._told.pop(event.gpu, None)  # the policy counts it from now on
        self._host.apply(event)

    def status(self) -> BlockStatus:
        """How far its suspend is."""
        return self._host.blocks.status(self.name)

    def recall(self, gpu: str, size_bytes: int) -> None:
        """Request unused leases."""
        self._host.recall(self.name, gpu, size_bytes)

    def owes(self, gpu: str) -> bool:
        """Whether a process has yet to answer that."""
        return self._host.owes(self.name, gpu)

    def tell_used(self, gpu: str, *, anyway: bool = False) -> None:
        """Report to the policy what it uses, if that changed."""
        if self.contract is None or gpu not in self.contract.gpus:
            return
        told = self.figures(gpu)
        if anyway or self._told.get(gpu) != told:
            self._told[gpu] = told
            self._host.apply(Used(self.now_s(), self.name, gpu, *told))

    def figures(self, gpu: str) -> tuple[int, int, int]:
        """Resident, elastic and away bytes. What is away belongs to what is leased: so leases that ended with a connection are added. After a restart of
        the arbiter all stated leases count as resident: then what the processes state to be elastic is."""
        movers, total_bytes = self.movers(gpu), self.used_bytes(gpu)
        stated_bytes = sum(mover.stated.elastic_bytes for mover in movers if mover.stated is not None)
        elastic_bytes = min(total_bytes, max(self._used.get(gpu, (0, 0))[1], stated_bytes))
        resident_bytes = total_bytes - elastic_bytes
        away_bytes = self.away_bytes(gpu)
        elastic_bytes += away_bytes - self.connected_away_bytes(gpu)
        return resident_bytes, elastic_bytes, min(elastic_bytes, away_bytes)

    def _limit(self, process: SwapProcess) -> None:
        if self.contract is not None:
            for gpu in filter(self._host.knows_limits, self.gpus):
                process.limit(gpu, *self.contract.gpus[gpu])

    def _new(self, pid: int, started: int) -> SwapProcess:
        host = self._host
        process = SwapProcess(
            self.name, pid, started, self.attention, host.clock, lambda: host.activate(self.name),
            lambda process, gpu, elastic_bytes: host.states(self.name, process.pid, gpu, elastic_bytes), self._charge,
        )  # fmt: skip
        self._processes[pid, started] = process
        return process

    def _charge(self, seconds: float) -> None:
        self.stated_s += seconds

    def _complete(self, process: SwapProcess) -> None:
        """A mover for each GPU."""
        for index, gpu in enumerate(self.gpus):
            if gpu not in process.movers:
                process.movers[gpu] = self._mover(process, gpu)
            process.movers[gpu].index = index

    def _mover(self, process: SwapProcess, gpu: str) -> Mover:
        return Mover(self, process.key, gpu, 0, self._host.pool(gpu), self._host.clock)


def _busy(mover: Mover) -> bool:
    return mover.waits or bool(mover.blocks.known) or mover.discards.pending


def _moves(mover: Mover) -> bool:
    """Whether its container must not run. A process that was ordered to choose and does not answer has everything."""
    return bool(mover.blocks.unreturned()) or (mover.leaving and not mover.stalled) or mover.unmapping
