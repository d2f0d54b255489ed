"""How much memory each GPU has, and has left, for one decision of the swap policy. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vgpu.memory.swap.container import ContainerState

MIB: Final = 2**20


@dataclass(slots=True)
class GpuRoom:
    """What was reported of a GPU and its host pool."""

    bytes_per_s: float
    """Expected speed of a swap, one way."""
    capacity: int = 0
    pool: int = 0
    """Slots of the host pool, in use and free."""
    ready: bool = False
    """Whether its copier and its pool can be used."""


@dataclass(slots=True)
class MemoryRequest:
    """A request that waits."""

    id: str
    name: str
    gpu: str
    bytes: int
    elastic: bool
    until_s: float
    """When it is refused, if it is above the guarantee."""
    came_s: float


@dataclass(frozen=True, slots=True)
class PoolWait:
    """A request above the guarantee that waits until the host pool of its GPU has room."""

    gpu: str
    need_bytes: int
    """What it adds above the guarantee."""
    left_bytes: int
    pool_bytes: int

    @property
    def text(self) -> str:
        """Why it waits."""
        return (
            f"the host pool of {self.gpu} is full: {self.need_bytes // MIB} MiB more above the guarantee need room there, and "
            f"{max(0, self.left_bytes) // MIB} of {self.pool_bytes // MIB} MiB are left beside what all containers have above theirs (burst.hostPool)"
        )


class Budget:
    """The memory of the GPUs, as the decision reserves it.

    now         free on the GPU at this moment
    soon        the same when all that leaves has left
    pool        slots that no excess will need
    hard        what stays on the GPU even if everything leaves that can
    guaranteed  the used part of guarantees
    claimed     what requests within guarantees wait for
    """

    def __init__(self, rooms: Mapping[str, GpuRoom], states: Iterable[ContainerState]) -> None:
        self.now = {gpu: room.capacity for gpu, room in rooms.items()}
        self.soon = dict(self.now)
        self.pool = {gpu: room.pool if room.ready else 0 for gpu, room in rooms.items()}
        self.hard = dict.fromkeys(rooms, 0)
        self.guaranteed = dict.fromkeys(rooms, 0)
        self.claimed = dict.fromkeys(rooms, 0)
        self._capacity = dict(self.now)
        for state in states:
            for gpu, one in state.memory.items():
                self.now[gpu] -= one.present
                self.soon[gpu] -= one.present - one.leaving
                self.pool[gpu] -= one.excess
                self.hard[gpu] += _hard(state, gpu)
                self.guaranteed[gpu] += min(one.used, one.guarantee)

    def reserve(self, gpu: str, now_bytes: int, soon_bytes: int) -> None:
        """Memory for the next in the order."""
        self.now[gpu] -= now_bytes
        self.soon[gpu] -= soon_bytes

    def could_fit(self, state: ContainerState, gpu: str, more_bytes: int = 0) -> bool:
        """Whether all memory of a container, and more, is on the GPU once all others have given way as far as they can."""
        others = self.hard[gpu] - _hard(state, gpu) + self.claimed[gpu]
        return state.memory[gpu].used + more_bytes + others <= self._capacity[gpu]

    def guarantees_leave_room(self, state: ContainerState, gpu: str) -> bool:
        """Whether the guarantees that others use leave room for all memory of a container."""
        one = state.memory[gpu]
        others = self.guaranteed[gpu] - min(one.used, one.guarantee) + self.claimed[gpu]
        return one.used + others <= self._capacity[gpu]


def _hard(state: ContainerState, gpu: str) -> int:
    one = state.memory[gpu]
    return one.present - (one.swappable if state.able else 0)
