"""One container's part in the memory of the node's GPUs, where containers may burst: its guarantee, its limit, what it has, and what it waits for.

It passes these to the part of the arbiter that swaps (`SwapNode`), which decides over all containers of the node. Numbers of GPUs and processes become
names there, and back again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from arbiter.memory.highest_limits import HighestLimits
from vgpu.api.burst import BurstLimits
from vgpu.api.grant import Grant
from vgpu.memory.ceiling import Ceiling
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.events import MemoryContract

MIB: Final = 2**20
FREE_WEIGHT: Final = 100.0
"""Of a container that requests no part of the GPU's time: as in the scheduling of GPU time."""


class Swapping(Protocol):
    """What a container's memory needs of `arbiter.swap.node.SwapNode`. GPUs by UUID, sizes in bytes."""

    def join(self, name: str, contract: MemoryContract, gpus: Sequence[str]) -> None: ...

    def change(self, name: str, contract: MemoryContract) -> None: ...

    def leave(self, name: str) -> None: ...

    def use(self, name: str, gpu: str, resident_bytes: int, elastic_bytes: int) -> None: ...

    def decides(self, gpu: str) -> bool: ...

    def ceiling(self, name: str, gpu: str) -> Ceiling | None: ...

    def request(
        self, id_: str, name: str, gpu: str, need_bytes: int, *, elastic: bool, wait_s: float
    ) -> NodeAnswer: ...

    def withdraw(self, id_: str) -> None: ...

    def free_bytes(self, name: str, gpu: str) -> int: ...

    def process_away_bytes(self, name: str, pid: int, gpu: str) -> int: ...

    def process_elastic_bytes(self, name: str, pid: int, gpu: str) -> int: ...

    def ready(self, gpu: str) -> bool: ...

    def knows_limits(self, gpu: str) -> bool: ...


class RequestId(NamedTuple):
    """Names a request of a container that the node decides about."""

    name: str
    gpu: int
    process: int
    seq: int

    @property
    def id(self) -> str:
        """Its name on the node."""
        return f"{self.gpu}/{self.process}/{self.seq}/{self.name}"

    @classmethod
    def of(cls, id_: str) -> RequestId:
        """The request with this name."""
        gpu, process, seq, name = id_.split("/", 3)
        return cls(name, int(gpu), int(process), int(seq))


class NodeShare:
    """See the module; `vgpu.memory.records.NodeRoom` for the ledger. `node` None: no container of this node may burst, and all is as without it."""

    def __init__(self, name: str, node: Swapping | None, highest: HighestLimits | None = None) -> None:
        self._name, self._node = name, node
        self._uuids: tuple[str, ...] = ()
        self._wait_s = 0.0
        self._bursts: set[str] = set()
        """GPUs from which memory could be moved at some time since `begin`."""
        self._above: set[str] = set()
        """GPUs on which a limit above the guarantee is set."""
        self._highest = highest if highest is not None else HighestLimits()
        self._had_grant = False

    def begin(self, grant: Grant, burst: BurstLimits | None) -> None:
        """The grant directory has a grant now, or that of another container."""
        self.end()
        self._bursts.clear()
        if self._had_grant:
            self._highest.forget(self._name)
        self._had_grant = True
        self._uuids = tuple(gpu.uuid for gpu in grant.gpus)
        if self._node is not None:
            self._node.join(self._name, self._contract(grant, burst), self._uuids)

    def change(self, grant: Grant, burst: BurstLimits | None) -> None:
        """The same container and GPUs with other limits."""
        if self._node is not None:
            self._node.change(self._name, self._contract(grant, burst))

    def end(self) -> None:
        """The container is gone, with its memory and its requests."""
        if self._node is not None and self._uuids:
            self._node.leave(self._name)
        self._uuids = ()

    def highest_bytes(self, grant: Grant, burst: BurstLimits | None) -> list[int]:
        """The highest limit in all that was set on each GPU until now, whether it applied or not."""
        most = self._requested_mib(burst)
        for gpu in grant.gpus:
            if most.get(gpu.uuid, 0) > gpu.mib:
                self._highest.set(self._name, gpu.uuid, most[gpu.uuid] * MIB)
        return [max(gpu.mib * MIB, self._highest.of(self._name, gpu.uuid)) for gpu in grant.gpus]

    def limits_bytes(self, grant: Grant, burst: BurstLimits | None) -> list[int]:
        """The limit in all on each GPU. It is the guarantee if containers of this node may not burst, and until memory can be moved from that GPU.
        A pool that ends later lowers no limit: the program has planned with it, and what it requests above its guarantee waits."""
        if self._node is not None:
            self._bursts.update(filter(self._node.ready, self._uuids))
        most = self._requested_mib(burst)
        self._above = {gpu.uuid for gpu in grant.gpus if most.get(gpu.uuid, 0) > gpu.mib}
        return [max(gpu.mib, most.get(gpu.uuid, 0) * (gpu.uuid in self._bursts)) * MIB for gpu in grant.gpus]

    def lawful_bytes(
        self, grant: Grant, burst: BurstLimits | None, claimed_bytes: Sequence[tuple[int, int]]
    ) -> list[int]:
        """What the container may have on each GPU without being over its limit: the limit that is set for it, also while that does not apply, or what it
        leased under a higher one, by this arbiter or one before it. `claimed_bytes`: as `use` has it, of each GPU. No more than a limit that was set: processes
        state their leases. Where containers may not burst any more, nothing tells which of them are elastic: all count."""
        most, highest, off = self._requested_mib(burst), self.highest_bytes(grant, burst), self._node is None
        return [
            max(
                gpu.mib * MIB,
                most.get(gpu.uuid, 0) * MIB,
                min(highest_bytes, (resident if off else min(resident, gpu.mib * MIB)) + elastic),
            )
            for gpu, highest_bytes, (resident, elastic) in zip(grant.gpus, highest, claimed_bytes, strict=True)
        ]

    def _requested_mib(self, burst: BurstLimits | None) -> dict[str, int]:
        return {gpu.uuid: gpu.mib for gpu in burst.gpus} if burst is not None and self._node is not None else {}

    def use(self, gpu: int, claimed_bytes: tuple[int, int]) -> None:
        """What the container has: memory that cannot be swapped, and elastic leases."""
        if self._node is not None:
            self._node.use(self._name, self._uuids[gpu], *claimed_bytes)

    def away_bytes(self, pid: int, gpu: int) -> int:
        """Memory of one process that is in host memory now."""
        return self._node.process_away_bytes(self._name, pid, self._uuids[gpu]) if self._node is not None else 0

    def elastic_bytes(self, pid: int, gpu: int) -> int:
        """Elastic memory of one process, as it last stated."""
        if self._node is None or gpu >= len(self._uuids):
            return 0
        return self._node.process_elastic_bytes(self._name, pid, self._uuids[gpu])

    def knows_limits(self, gpu: int) -> bool:
        """Whether it is known if memory can be moved from this GPU: until then a new arbiter has only the guarantee for the limit."""
        uuid = self._uuids[gpu] if gpu < len(self._uuids) else ""
        return self._node is None or uuid not in self._above or self._node.knows_limits(uuid)

    def decides(self, gpu: int) -> bool:
        """Whether requests need the node's decision."""
        return self._node is not None and gpu < len(self._uuids) and self._node.decides(self._uuids[gpu])

    def ceiling(self, gpu: int) -> Ceiling | None:
        """See `NodeRoom`."""
        return self._node.ceiling(self._name, self._uuids[gpu]) if self._node is not None else None

    def request(
        self, gpu: int, process: int, seq: int, need_bytes: int, *, elastic: bool, waited_s: float
    ) -> NodeAnswer:
        """See `NodeRoom`. An allocation waits for at most the container's wait, in however many requests."""
        if self._node is None:
            return NodeAnswer.GRANTED
        request = RequestId(self._name, gpu, process, seq)
        wait_s = max(0.0, self._wait_s - waited_s)
        return self._node.request(request.id, self._name, self._uuids[gpu], need_bytes, elastic=elastic, wait_s=wait_s)

    def withdraw(self, gpu: int, process: int, seq: int) -> None:
        """See `NodeRoom`."""
        if self._node is not None:
            self._node.withdraw(RequestId(self._name, gpu, process, seq).id)

    def free_bytes(self, gpu: int) -> int:
        """See `NodeRoom`."""
        return self._node.free_bytes(self._name, self._uuids[gpu]) if self._node is not None else 0

    def _contract(self, grant: Grant, burst: BurstLimits | None) -> MemoryContract:
        self._wait_s = float(burst.wait_s) if burst is not None else 0.0
        limits = self.limits_bytes(grant, burst)
        gpus = {gpu.uuid: (gpu.mib * MIB, limit) for gpu, limit in zip(grant.gpus, limits, strict=True)}
        weight = float(max(gpu.core_percent for gpu in grant.gpus)) or FREE_WEIGHT
        return MemoryContract(gpus, grant.service_class, grant.level, weight)
