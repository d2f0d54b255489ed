"""What is reported of GPUs and their host pools to the swap policy, and the events that lead to its present state."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from arbiter.swap.container import SwapContainer
from arbiter.swap.coordinator import WaitingRequest
from arbiter.swap.host_pools import HostPools
from arbiter.swap.results import GpuSwapFacts
from vgpu.memory.swap.events import Able, Event, GpuSeen, Joined, PoolSeen, Requested, Used


class GpuReports:
    """What was reported last. `pools`: of the node."""

    def __init__(self, pools: HostPools) -> None:
        self._pools = pools
        self.capacity_bytes: dict[str, int] = {}
        """Of each GPU whose memory was read: what is for containers."""
        self._usable_bytes: dict[str, int] = {}
        """The same, beside what others use."""
        self._seen: dict[str, tuple[int, bool]] = {}
        """GPU -> (bytes for containers that are here, ready)."""

    def gpu(self, gpu: str, usable_bytes: int, others_bytes: int, now_s: float) -> GpuSeen:
        """Report a GPU, and its pool again. The copier's context is kept free while there is no copier."""
        others_bytes = max(others_bytes, self._pools.of(gpu).context_bytes)
        self._usable_bytes[gpu] = usable_bytes
        self.capacity_bytes[gpu] = max(0, usable_bytes - others_bytes)
        self._seen.pop(gpu, None)
        return GpuSeen(now_s, gpu, self.capacity_bytes[gpu])

    def most_bytes(self, gpu: str) -> int | None:
        """What containers could have if nothing but the copier used the GPU; None before it was read."""
        usable_bytes = self._usable_bytes.get(gpu)
        return None if usable_bytes is None else max(0, usable_bytes - self._pools[gpu].context_bytes)

    def changed(self, containers: Collection[SwapContainer], now_s: float) -> Iterator[Event]:
        """What is new of GPUs and their pools."""
        for gpu, usable_bytes in self._usable_bytes.items():
            if self.capacity_bytes[gpu] > usable_bytes - self._pools[gpu].context_bytes:
                yield self.gpu(
                    gpu, usable_bytes, 0, now_s
                )  # a copier stated its context before the next reading of the GPU
            if (seen := self._pool(gpu, containers, now_s)) is not None:
                yield seen

    def _pool(self, gpu: str, containers: Collection[SwapContainer], now_s: float) -> PoolSeen | None:
        """Slots of containers without a grant are of no use to the others."""
        pool = self._pools[gpu]
        others = sum(one.moved_bytes(gpu) for one in containers if one.contract is None)
        seen = pool.pool_bytes - others, pool.ready
        if self._seen.get(gpu) == seen:
            return None
        self._seen[gpu] = seen
        away = sum(one.away_bytes(gpu) for one in containers if one.contract is not None)
        return PoolSeen(now_s, gpu, max(0, seen[0] - away), pool.ready)

    def facts(self) -> list[GpuSwapFacts]:
        """Of each GPU whose capacity is known."""
        return [
            GpuSwapFacts(gpu, capacity_bytes, self._pools[gpu].ready, dict(self._pools[gpu].moved_bytes))
            for gpu, capacity_bytes in self.capacity_bytes.items()
        ]

    def state(
        self,
        now_s: float,
        containers: Collection[SwapContainer],
        requests: Collection[WaitingRequest],
    ) -> Iterator[Event]:
        """Events that bring a policy to the state of this moment, as far as events can."""
        for gpu, size_bytes in self.capacity_bytes.items():
            yield GpuSeen(now_s, gpu, size_bytes)
        for container in containers:
            if container.contract is None:
                continue
            yield Joined(now_s, container.name, container.contract)
            if container.ability.able:
                yield Able(now_s, container.name)
            for gpu in container.contract.gpus:
                yield Used(now_s, container.name, gpu, *container.figures(gpu))
        for gpu in self.capacity_bytes:
            yield PoolSeen(now_s, gpu, max(0, self._seen.get(gpu, (0, False))[0]), self._pools[gpu].ready)
        for one in requests:
            yield Requested(now_s, one.name, one.id, one.gpu, one.bytes, one.elastic, 0.0)
