"""The state of one container in the swap policy: what `vgpu.memory.swap.policy` stores between two events."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from vgpu.api.names import CLASSES
from vgpu.memory.swap.events import MemoryContract

Late = Literal["guarantee", "excess"]
"""For what a container is to give way and does not: another's guarantee, or only another's excess."""


@dataclass(slots=True)
class GpuMemory:
    """A container's memory on one GPU. Sizes in bytes."""

    guarantee: int
    limit: int
    resident: int = 0
    elastic: int = 0
    away: int = 0
    leaving: int = 0
    """Ordered out and still on the GPU."""
    moved_out: int = 0
    """Moved by the present order."""
    first_out: tuple[float, int] | None = None
    """When its first part had left, and how much that was."""

    @property
    def used(self) -> int:
        """On the GPU and away."""
        return self.resident + self.elastic

    @property
    def present(self) -> int:
        """On the GPU."""
        return self.resident + self.elastic - self.away

    @property
    def excess(self) -> int:
        """Used above the guarantee."""
        return max(0, self.resident + self.elastic - self.guarantee)

    @property
    def swappable(self) -> int:
        """What may leave the GPU, with what is leaving: only excess, and never resident memory."""
        on_gpu = self.elastic - self.away
        return max(0, min(on_gpu, self.resident + on_gpu - self.guarantee))


@dataclass(slots=True)
class ContainerState:
    """See the module. Times are those of the events."""

    name: str
    contract: MemoryContract
    idle_since_s: float
    """When it last had no work, if it has none."""
    memory: dict[str, GpuMemory] = field(default_factory=dict)
    working: bool = False
    announced_from_s: float = inf
    announced_until_s: float = -inf
    pending: int = 0
    """Number of its requests that wait."""
    able: bool | None = None
    """Whether it can swap; None = it has not reported yet."""
    direction: Literal["out", "in"] | None = None
    """Of the order that is being carried out."""
    cancelled: bool = False
    whole: bool = True
    """All that the order named has left, on the GPUs on which it is complete."""
    moving: set[str] = field(default_factory=set)
    """GPUs on which the order is not complete."""
    suspended_at_s: float | None = None
    """When its channels were suspended for the present swap out."""
    retry_at_s: float = -inf
    """Until then it gets no order, because the last one failed."""
    came_in_s: float = -inf
    """When its quantum began."""
    has_turn: bool = False
    """Others give way to it at present, so it stays before them in the order until it has its memory."""
    lent: bool = False
    """It got room that an earlier one in the order could not use yet: it has no quantum of its own against that one."""
    fed: bool = False
    """Its present quantum comes before all others, because it had waited for too long."""
    served: float = 0.0
    """Seconds with work and with all of its memory, above its guarantee, per unit of weight. Orders containers of equal urgency."""
    waits_since_s: float | None = None
    """Since when it has work and lacks memory."""
    late_for: Late | None = None
    late_runs: bool = False
    """Whether its time counts now. It stops while the container is being suspended, and between two tries."""
    late_s: float = 0.0
    """Time that counts until it is over its limit."""
    is_over_limit: bool = False
    """Reported as such; so only once."""
    lacks_room: bool = False
    """Whether the guarantees of others, or their memory that cannot be moved, leave no room for what is away."""
    no_room_s: float = 0.0
    """Time with work in which that was so."""
    is_stranded: bool = False
    service_class: int = field(init=False)
    """A lower value is more urgent."""

    def __post_init__(self) -> None:
        self.become(self.contract)

    def become(self, contract: MemoryContract) -> None:
        """Replace the contract. What is used stays."""
        self.contract, self.service_class = contract, CLASSES.index(contract.service_class)
        for gpu, (guarantee, limit) in contract.gpus.items():
            known = self.memory.setdefault(gpu, GpuMemory(guarantee, limit))
            known.guarantee, known.limit = guarantee, limit

    @property
    def is_away(self) -> bool:
        """Whether any of its memory is in host memory."""
        for one in self.memory.values():  # noqa: SIM110 (the most frequent question of a decision: any() takes twice as long)
            if one.away:
                return True
        return False

    @property
    def paused(self) -> bool:
        """It must not run: some of its memory is away or moves."""
        return self.direction is not None or self.is_away

    @property
    def has_excess(self) -> bool:
        """Whether it is above its guarantee anywhere."""
        return any(one.excess for one in self.memory.values())

    @property
    def within_guarantee(self) -> bool:
        """Whether its guarantee covers all GPUs from which memory is away. It must not be paused then."""
        return all(one.used <= one.guarantee for one in self.memory.values() if one.away or one.leaving)

    def busy(self, now_s: float) -> bool:
        """Whether it has work for its GPUs, or has announced work for now."""
        return self.working or self.announced_from_s <= now_s < self.announced_until_s

    def wants(self, now_s: float) -> bool:
        """Whether it would run, or go on, if it had the memory."""
        return self.pending > 0 or self.busy(now_s)

    def keeps_turn(self, now_s: float) -> bool:
        """Whether its turn, once it has it, goes on: it still lacks memory, and still wants it or is already coming back."""
        return self.direction == "in" or ((self.paused or self.pending > 0) and self.wants(now_s))

    def begin_order(self, direction: Literal["out", "in"], gpus: dict[str, int]) -> None:
        """It is to move memory on these GPUs: GPU -> bytes."""
        self.end_order()
        self.direction, self.moving, self.whole = direction, set(gpus), True
        for gpu, leaving in gpus.items() if direction == "out" else ():
            self.memory[gpu].leaving, self.memory[gpu].moved_out, self.memory[gpu].first_out = leaving, 0, None

    def cancel(self) -> None:
        """What still was to leave stays."""
        self.cancelled = True
        for one in self.memory.values():
            one.leaving = 0

    def end_order(self) -> None:
        """Nothing of it moves any more."""
        self.direction, self.cancelled, self.suspended_at_s = None, False, None
        self.moving.clear()
        for one in self.memory.values():
            one.leaving = 0
