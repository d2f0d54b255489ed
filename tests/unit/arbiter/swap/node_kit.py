"""A node whose processes, copiers and blocks are simulated: real sockets and descriptors, simulated time.

The memory of a block is a file of 8 bytes. The program writes to it while it may run, and first checks that it has what it wrote before. A copier takes one step
at a time, and so does a process. `SimulatedNode.check` has what must always be true.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from arbiter.connection import Connection
from arbiter.gputime.blocks import BlockStatus
from arbiter.gputime.channels import Halt
from arbiter.swap.node import SwapNode
from arbiter.swap.records_file import RecordsFile
from arbiter.swap.results import Decided
from tests.unit.arbiter.swap.simulated_copier import GRAIN, TOKEN, SimulatedCopier
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.events import MemoryContract
from vgpu.memory.swap.settings import SwapSettings
from vgpu.protocol import wire
from vgpu.protocol.messages import (
    Block,
    Blocks,
    Burst,
    Cancel,
    Discard,
    Discarded,
    Error,
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

GPU = "GPU-a"
BOOT = "boot-1"
RESIDENT, CHOSEN, AWAY, MADE, DISCARDED = "resident", "chosen", "away", "made", "discarded"


def contract(
    guarantee: int, limit: int, service_class: str = "standard", gpus: tuple[str, ...] = (GPU,)
) -> MemoryContract:
    """Sizes in grains."""
    return MemoryContract(dict.fromkeys(gpus, (guarantee * GRAIN, limit * GRAIN)), service_class)


@dataclass
class HeldBlock:
    """As the library has it."""

    bytes: int
    state: str = RESIDENT
    memory: int = -1
    """Descriptor of its physical memory."""
    expected: int = 0
    gpu: int = 0


class SimulatedProcess:
    """A process and its library, one message a step. `deaf`: it does not read."""

    def __init__(self, node: SimulatedNode, name: str, pid: int) -> None:
        self.node, self.name, self.pid = node, name, pid
        self.blocks: dict[int, HeldBlock] = {}
        self.limits: dict[int, tuple[int, int]] = {}
        self.deaf = False
        self.reason = 0
        self.errors: list[Error] = []
        self.most_blocks = 64
        """Of a BLOCKS."""
        self.refuse_makes = False
        self.exported = self.let_go = 0
        """So many blocks of the next UNMAP, which names its first ones, are not away after it: they were exported, or ended, since they were chosen."""
        self.sock: socket.socket | None = None
        self._ids = 0
        self.orders: list[SwapMessage] = []

    def connect(self) -> None:
        self.drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.sock = ours
        self.node.numbers += 1
        connection = Connection(theirs, self.node.numbers, self.pid, 0.0, greeted=True, welcomed=True)
        self.node.swaps.take(self.name, connection)
        self._send_discards()
        self.state()

    def drop(self) -> None:
        """Its connection ends; what was chosen stays."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        self._stay()

    def allocate(self, size_bytes: int, gpu: int = 0) -> int:
        self._ids += 1
        self.blocks[self._ids] = block = HeldBlock(size_bytes, gpu=gpu)
        self.create(block)
        self.write(block)
        self.state(gpu)
        return self._ids

    def state(self, *gpus: int) -> None:
        for gpu in gpus or range(len(self.node.gpus_of(self.name))):
            mine = [block for block in self.blocks.values() if block.gpu == gpu and block.state != DISCARDED]
            away = sum(block.bytes for block in mine if block.state in (AWAY, MADE))
            self.send(Swappable(gpu, self.reason, sum(block.bytes for block in mine), away))

    def send(self, message: SwapMessage, seq: int = 0, fds: tuple[int, ...] = ()) -> None:
        if self.sock is None:
            return
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with suppress(OSError):
            self.sock.sendmsg([wire.encode(seq, message)], passed)

    def discard(self, count: int) -> None:
        """The program frees so many blocks that are away. They are leased until that is answered."""
        for id_ in [id_ for id_, block in self.blocks.items() if block.state == AWAY][:count]:
            self.blocks[id_].state = DISCARDED
            self._send_discards(id_)
        self.state()

    def _send_discards(self, *ids: int) -> None:
        for id_, block in self.blocks.items():
            if block.state == DISCARDED and (not ids or id_ in ids):
                self.send(Discard(block.gpu, (id_,)), id_)

    def run(self) -> None:
        """The program works, if the container may run: it touches all of its memory."""
        if self.node.blocked(self.name):
            return
        for id_, block in self.blocks.items():
            if block.state == DISCARDED:
                continue
            assert block.state != AWAY, f"{self.name} runs and its block {id_} is away"
            assert self.right(block), f"{self.name} runs, and its block {id_}, {block.state}, has another content"
            self.write(block)

    def step(self) -> bool:
        """Read one message. Whether there was one."""
        if self.sock is None or self.deaf:
            return False
        try:
            packet = self.sock.recv(wire.PACKET_LIMIT)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            self.drop()
            return True
        seq, message = wire.decode(packet)
        self._obey(seq, message)
        return True

    def kill(self) -> None:
        self.drop()
        for block in self.blocks.values():
            self.release(block)
        self.blocks.clear()

    def _obey(self, seq: int, message: Any) -> None:
        self.orders.append(message)
        match message:
            case Burst(gpu, guarantee_bytes, limit_bytes):
                self.limits[gpu] = guarantee_bytes, limit_bytes
            case SwapOut(gpu, wanted_bytes):
                self._choose(seq, gpu, wanted_bytes)
            case Cancel():
                self._stay()
            case Unmap(gpu, ids):
                self._unmap(seq, gpu, ids)
            case SwapIn(gpu, ids):
                self._make(seq, gpu, ids)
            case Filled(gpu, ids):
                for id_ in ids:
                    block = self.blocks[id_]
                    if block.state == MADE:
                        assert self.right(block), f"FILLED of block {id_} with another content"
                        block.state = RESIDENT
                self.state(gpu)
            case Discarded(_, ids):
                assert seq == ids[0]
                for id_ in ids:
                    assert self.blocks.pop(id_).state == DISCARDED
                self.node.use(self.name)
            case Error():
                self.errors.append(message)

    def _unmap(self, seq: int, gpu: int, ids: tuple[int, ...]) -> None:
        away = []
        for id_ in ids:
            block = self.blocks[id_]
            assert block.state == CHOSEN, f"UNMAP of a block that is {block.state}"
            assert self.node.blocked(self.name), "UNMAP of a container that may run"
            if self.exported > 0:
                self.exported -= 1
                block.state = RESIDENT
                continue
            self.release(block)
            if self.let_go > 0:
                self.let_go -= 1
                del self.blocks[id_]
            else:
                block.state = AWAY
                away.append(id_)
        self.send(Unmapped(gpu, tuple(away)) if away else Unable(gpu, UnableReason.UNKNOWN_BLOCK), seq)
        self.node.use(self.name)
        self.state(gpu)

    def _choose(self, seq: int, gpu: int, wanted_bytes: int) -> None:
        chosen: list[int] = []
        for id_, block in sorted(self.blocks.items(), key=lambda one: -one[1].bytes):
            if wanted_bytes > 0 and block.state == RESIDENT and block.gpu == gpu:
                chosen.append(id_)
                wanted_bytes -= block.bytes
        for id_ in list(chosen):  # none that could be left out
            if wanted_bytes + self.blocks[id_].bytes <= 0:
                chosen.remove(id_)
                wanted_bytes += self.blocks[id_].bytes
        for id_ in chosen:
            self.blocks[id_].state = CHOSEN
        self._export(seq, gpu, chosen)

    def _make(self, seq: int, gpu: int, ids: tuple[int, ...]) -> None:
        made = []
        for id_ in ids:
            block = self.blocks.get(id_)
            if block is None or block.state not in (AWAY, MADE) or self.refuse_makes:
                continue
            if block.state == AWAY:
                block.state = MADE
                self.create(block)
            made.append(id_)
        unknown = all(id_ not in self.blocks or self.blocks[id_].state not in (AWAY, MADE) for id_ in ids)
        self._export(seq, gpu, made, UnableReason.UNKNOWN_BLOCK if unknown else UnableReason.DRIVER)

    def _export(
        self, seq: int, gpu: int, ids: list[int], reason: UnableReason = UnableReason.NO_ELASTIC_MEMORY
    ) -> None:
        if not ids:
            self.send(Unable(gpu, reason), seq)
        for at in range(0, len(ids), self.most_blocks):
            some = ids[at : at + self.most_blocks]
            blocks = tuple(Block(id_, self.blocks[id_].bytes) for id_ in some)
            more = at + self.most_blocks < len(ids)
            fds = tuple(self.export(self.blocks[id_]) for id_ in some)
            self.send(Blocks(gpu, blocks, more), seq, fds)
            for fd in fds:
                os.close(fd)

    def _stay(self) -> None:
        for block in self.blocks.values():
            if block.state == CHOSEN:
                block.state = RESIDENT

    # The driver

    def create(self, block: HeldBlock) -> None:
        """Physical memory for it."""
        block.memory = os.memfd_create("block")

    def export(self, block: HeldBlock) -> int:
        """A descriptor of it."""
        return os.dup(block.memory)

    def release(self, block: HeldBlock) -> None:
        """Its physical memory."""
        if block.memory >= 0:
            os.close(block.memory)
        block.memory = -1

    def write(self, block: HeldBlock) -> None:
        """The program gives it another content."""
        block.expected = self.node.token()
        os.pwrite(block.memory, TOKEN.pack(block.expected), 0)

    def right(self, block: HeldBlock) -> bool:
        """Whether it has the content that the program gave it."""
        return bool(TOKEN.unpack(os.pread(block.memory, 8, 0))[0] == block.expected)


class SimulatedBlocks:
    """The GPU-time scheduler's blocks. They end with the arbiter, but for those that a process reports with its channels."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.halts = True
        self.suspends = 1
        """A resume and another suspend make one more."""
        self.obstacle = ""
        self.ended: Callable[[str], None] = lambda _: None

    def begin(self, name: str) -> None:
        self.names.add(name)

    def end(self, name: str) -> None:
        self.names.discard(name)
        self.ended(name)

    def status(self, name: str) -> BlockStatus:
        return BlockStatus(self.halts and name in self.names, self.obstacle, frozenset({Halt(1, self.suspends)}))


@dataclass
class SimulatedNode:
    """See the module. `capacity` and `pool`: grains."""

    folder: Path
    capacity: int = 16
    pool: int = 64
    settings: SwapSettings = field(default_factory=SwapSettings)
    gpus: tuple[str, ...] = (GPU,)
    trace: Path | None = None
    process_kind: ClassVar[type[SimulatedProcess]] = SimulatedProcess

    def __post_init__(self) -> None:
        self.now_s = 100.0
        self.numbers = self._tokens = 0
        self.copiers = {gpu: SimulatedCopier(self.pool * GRAIN) for gpu in self.gpus}
        self.blocks = SimulatedBlocks()
        self.disk_full = False
        """No record can be written."""
        self.contracts: dict[str, MemoryContract] = {}
        self.processes: dict[int, SimulatedProcess] = {}
        self.recalls: list[tuple[str, str, int]] = []
        self.requests: dict[str, tuple[int, int, int]] = {}
        """ID -> pid, number of the GPU, bytes."""
        self.refusals: list[Decided] = []
        self._pids = 1000
        self.start()

    @property
    def copier(self) -> SimulatedCopier:
        return self.copiers[self.gpus[0]]

    def start(self) -> None:
        """An arbiter starts."""
        self.swaps = SwapNode(
            lambda: self.now_s, self.blocks, self.settings, self.folder, self.folder, BOOT,
            lambda *recall: self.recalls.append(recall), self.trace,
            started_at=lambda pid: 7 if pid in self.processes else 0,
            connect=lambda path: self.copiers[path.stem].connect(path),
        )  # fmt: skip
        for gpu in self.gpus:
            self.swaps.add_gpu(gpu, self.capacity * GRAIN)
        for pool in self.swaps._pools.values():
            self._let_fail(pool._records._file)
        for name, one in self.contracts.items():
            self.swaps.join(name, one, tuple(one.gpus))

    def _let_fail(self, records: RecordsFile) -> None:
        write = records.write
        records.write = lambda *what: not self.disk_full and write(*what)  # type: ignore[method-assign]

    def may_burst(self, name: str) -> bool:
        """Whether a request above its guarantee on the first GPU could be granted."""
        guarantee_bytes, limit_bytes = self.swaps._containers[name].contract.gpus[self.gpus[0]]  # type: ignore[union-attr]
        able = self.swaps._containers[name].ability.able is True
        return limit_bytes > guarantee_bytes and able and self.swaps.ready(self.gpus[0])

    def kill_arbiter(self) -> None:
        """Everything that it has in its memory is gone, and nothing is written or sent."""
        for container in self.swaps._containers.values():
            for process in container.processes:
                if process._connection is not None:
                    process._connection.sock.close()
        for pool in self.swaps._pools.values():
            for job in [*pool._queues[True], *pool._queues[False], *pool._running.values()]:
                os.close(job.fd)
            if pool._link is not None:
                pool._link.close()
        self.swaps.poller.close()
        os.close(self.swaps._wake_fd)
        self.requests.clear()
        self.blocks.names = {
            one.name for one in self.processes.values() if any(b.state in (AWAY, MADE) for b in one.blocks.values())
        }
        self.start()

    def token(self) -> int:
        self._tokens += 1
        return 1000 + self._tokens

    def join(self, name: str, contract_: MemoryContract) -> None:
        self.contracts[name] = contract_
        self.swaps.join(name, contract_, tuple(contract_.gpus))

    def process(self, name: str, *, connected: bool = True) -> SimulatedProcess:
        self._pids += 1
        made = self.processes[self._pids] = self.process_kind(self, name, self._pids)
        if connected:
            made.connect()
            self.swaps.turn()
        return made

    def gpus_of(self, name: str) -> tuple[str, ...]:
        return tuple(self.contracts[name].gpus)

    def blocked(self, name: str) -> bool:
        return name in self.blocks.names

    def leased(self, name: str, gpu: int = 0) -> int:
        of = [p for p in self.processes.values() if p.name == name]
        return sum(block.bytes for p in of for block in p.blocks.values() if block.gpu == gpu)

    def use(self, name: str) -> None:
        """As the ledger reports it."""
        for gpu, uuid in enumerate(self.gpus_of(name)):
            self.swaps.use(name, uuid, 0, self.leased(name, gpu))

    def request(self, process: SimulatedProcess, grains: int, *, wait_s: float = 60.0, gpu: int = 0) -> NodeAnswer:
        """A lease of one block, which is allocated once it is granted."""
        self.numbers += 1
        id_ = f"r{self.numbers}"
        uuid = self.gpus_of(process.name)[gpu]
        decision = self.swaps.request(id_, process.name, uuid, grains * GRAIN, elastic=True, wait_s=wait_s)
        if decision is NodeAnswer.GRANTED:
            self._allocate(process, grains * GRAIN, gpu)
        elif decision is NodeAnswer.WAITS:
            self.requests[id_] = process.pid, gpu, grains * GRAIN
        return decision

    def _allocate(self, process: SimulatedProcess, size_bytes: int, gpu: int) -> None:
        process.allocate(size_bytes, gpu)
        self.use(process.name)

    def kill(self, process: SimulatedProcess) -> None:
        process.kill()
        del self.processes[process.pid]
        for id_ in [id_ for id_, (pid, _, _) in self.requests.items() if pid == process.pid]:
            del self.requests[id_]
            self.swaps.withdraw(id_)
        self.use(process.name)

    def turn(self) -> None:
        self.swaps.turn()
        while decided := self.swaps.decided():
            pid, gpu, size_bytes = self.requests.pop(decided[0].id)
            if decided[0].granted:
                self._allocate(self.processes[pid], size_bytes, gpu)
            else:
                self.refusals.append(decided[0])
        self.check()

    def settle(self, for_s: float = 0.0) -> None:
        """All that happens by itself, until nothing does; then time passes to the next deadline, for so long."""
        until_s = self.now_s + for_s
        for _ in range(20_000):
            self.turn()
            busy = [one.step() for one in self.processes.values()] + [one.step() for one in self.copiers.values()]
            if any(busy):
                continue
            for one in self.processes.values():
                one.run()
            deadline_s = self.swaps.deadline_s()
            if deadline_s is None or deadline_s > until_s:
                self.now_s = max(self.now_s, until_s)
                return
            self.now_s = max(self.now_s + 1e-6, deadline_s)
        raise AssertionError("it does not come to rest")

    def check(self) -> None:
        for number, gpu in enumerate(self.gpus):
            present = sum(
                block.bytes
                for process in self.processes.values()
                for block in process.blocks.values()
                if block.state not in (AWAY, DISCARDED) and self.gpus_of(process.name)[block.gpu] == gpu
            )
            assert present <= self.capacity * GRAIN, f"{present // GRAIN} grains on GPU {number} of {self.capacity}"

    def check_all_back(self) -> None:
        for process in self.processes.values():
            for id_, block in process.blocks.items():
                assert block.state == RESIDENT, f"block {id_} of {process.name} is {block.state}"
                assert process.right(block)
        assert not self.blocks.names, f"still blocked: {self.blocks.names}"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        self.swaps.close()
