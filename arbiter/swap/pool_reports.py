"""What is reported of host pools to the swap policy, and the events that lead to its present state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from arbiter.swap.container import SwapContainer
from arbiter.swap.coordinator import WaitingRequest
from arbiter.swap.host_pool import HostPool
from vgpu.memory.swap.events import Able, Event, GpuSeen, Joined, PoolSeen, Requested, Used


class PoolReports:
    """What was reported last. `pools`: by GPU."""

    def __init__(self, pools: Mapping[str, HostPool]) -> None:
        self._pools = pools
        self._seen: dict[str, tuple[int, bool]] = {}
        """GPU -> (bytes for containers that are here, ready)."""

    def forget(self, gpu: str) -> None:
        """Report it again."""
        self._seen.pop(gpu, None)

    def changed(self, gpu: str, containers: Collection[SwapContainer], now_s: float) -> PoolSeen | None:
        """What is to be reported of a GPU's pool; None: nothing new. Slots of containers without a grant are of no use to the others."""
        pool = self._pools[gpu]
        others = sum(one.moved_bytes(gpu) for one in containers if one.contract is None)
        seen = pool.pool_bytes - others, pool.ready
        if self._seen.get(gpu) == seen:
            return None
        self._seen[gpu] = seen
        away = sum(one.away_bytes(gpu) for one in containers if one.contract is not None)
        return PoolSeen(now_s, gpu, max(0, seen[0] - away), pool.ready)

    def state(
        self,
        now_s: float,
        capacity_bytes: Mapping[str, int],
        containers: Collection[SwapContainer],
        requests: Collection[WaitingRequest],
    ) -> Iterator[Event]:
        """Events that bring a policy to the state of this moment, as far as events can."""
        for gpu, size_bytes in capacity_bytes.items():
            yield GpuSeen(now_s, gpu, size_bytes)
        for container in containers:
            if container.contract is None:
                continue
            yield Joined(now_s, container.name, container.contract)
            if container.ability.able:
                yield Able(now_s, container.name)
            for gpu in container.contract.gpus:
                yield Used(now_s, container.name, gpu, *container.figures(gpu))
        for gpu in capacity_bytes:
            yield PoolSeen(now_s, gpu, max(0, self._seen.get(gpu, (0, False))[0]), self._pools[gpu].ready)
        for one in requests:
            yield Requested(now_s, one.name, one.id, one.gpu, one.bytes, one.elastic, 0.0)
