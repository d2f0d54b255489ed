"""A double of `arbiter.swap.node.SwapNode`, which the test decides for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from arbiter.connection import Connection
from arbiter.swap.results import Notice, Stated
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU
from vgpu.memory.ceiling import Ceiling
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.events import MemoryContract


class Decided(NamedTuple):
    id: str
    granted: bool
    reason: str = ""


class NodeDouble:
    """Grants what is free, and notes everything else. Its calls come from the arbiter's thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.free = 10_000 * MIB
        self.contracts: dict[str, MemoryContract] = {}
        self.used: dict[tuple[str, str], tuple[int, int]] = {}
        self.waiting: dict[str, float] = {}
        self.taken: list[tuple[str, Connection]] = []
        self.said: list[str] = []
        self.pools = {GPU, OTHER_GPU}
        self.changes: list[str] = []
        self.unknown: set[str] = set()
        """GPUs of which it is not known whether memory can be moved from them."""
        self.elastic: dict[int, int] = {}
        self.statements: list[Stated] = []
        self.most: Ceiling | None = None
        self._decided: list[Decided] = []

    def decide(self, *, granted: bool) -> None:
        """What waits gets its answer. By the test's thread."""
        self._decided += [Decided(id_, granted) for id_ in self.waiting]
        self.waiting.clear()
        os.eventfd_write(self.fd, 1)

    def turn(self) -> None:
        os.eventfd_read(self.fd)

    def deadline_s(self) -> float | None:
        return None

    def awake(self) -> None: ...

    def notices(self) -> list[Notice]:
        return []

    def knows(self, _: str) -> bool:
        return False

    def copier_pids(self) -> frozenset[int]:
        return frozenset()

    def decided(self) -> list[Decided]:
        decided, self._decided = self._decided, []
        return decided

    def join(self, name: str, contract: MemoryContract, gpus: Sequence[str]) -> None:
        assert list(gpus) == list(contract.gpus)
        self.contracts[name] = contract

    def change(self, name: str, contract: MemoryContract) -> None:
        self.contracts[name] = contract

    def leave(self, name: str) -> None:
        self.said.append(f"leave {name}")

    def take(self, name: str, connection: Connection) -> None:
        self.taken.append((name, connection))

    def use(self, name: str, gpu: str, resident_bytes: int, elastic_bytes: int) -> None:
        self.used[name, gpu] = resident_bytes // MIB, elastic_bytes // MIB

    def ceiling(self, *_: str) -> Ceiling | None:
        return self.most

    def decides(self, _: str) -> bool:
        return True

    def request(self, id_: str, _: str, gpu: str, need_bytes: int, *, wait_s: float, **__: bool) -> NodeAnswer:
        assert gpu == GPU
        if need_bytes <= self.free:
            return NodeAnswer.GRANTED
        self.waiting[id_] = wait_s
        return NodeAnswer.WAITS

    def withdraw(self, id_: str) -> None:
        del self.waiting[id_]

    def free_bytes(self, *_: str) -> int:
        return 0

    def process_elastic_bytes(self, _: str, pid: int, __: str) -> int:
        return self.elastic.get(pid, 0)

    def ready(self, gpu: str) -> bool:
        return gpu in self.pools

    def knows_limits(self, gpu: str) -> bool:
        return gpu not in self.unknown

    def stated(self) -> list[Stated]:
        statements, self.statements = self.statements, []
        return statements

    def changed_gpus(self) -> frozenset[str]:
        changes, self.changes = frozenset(self.changes), []
        return changes

    def state(self, name: str, mib: int) -> None:
        """The test's process states how much elastic memory it has."""
        self.elastic[os.getpid()] = mib * MIB
        self.statements.append(Stated(name, os.getpid(), GPU, mib * MIB))
        os.eventfd_write(self.fd, 1)

    def change_pool(self, gpu: str) -> None:
        """It begins, or ends."""
        self.pools ^= {gpu}
        self.changes.append(gpu)
        os.eventfd_write(self.fd, 1)

    def process_away_bytes(self, *_: object) -> int:
        return 0

    def close(self) -> None:
        self.said.append("close")
        os.close(self.fd)
        for _, connection in self.taken:
            connection.sock.close()
