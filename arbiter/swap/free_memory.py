"""What of a GPU is free, and which requests need no decision of the policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from arbiter.swap.container import SwapContainer
from arbiter.swap.coordinator import Coordinator


class FreeMemory:
    """`capacity_bytes` of GPUs and `containers` by name are the node's own."""

    def __init__(
        self, capacity_bytes: Mapping[str, int], containers: Mapping[str, SwapContainer], coordinator: Coordinator
    ) -> None:
        self._capacity_bytes, self._containers, self._coordinator = capacity_bytes, containers, coordinator

    def of(self, gpu: str) -> int:
        """Bytes; below 0 where more is leased than there is."""
        used_bytes = sum(one.used_bytes(gpu) for one in self._containers.values())
        away_bytes = sum(one.connected_away_bytes(gpu) for one in self._containers.values() if one.blocked)
        return self._capacity_bytes.get(gpu, 0) - used_bytes + away_bytes

    def grants(self, container: SwapContainer, gpu: str, need_bytes: int, active: Collection[str]) -> bool:
        """Whether a request needs no decision: it is within the guarantee, nothing waits or moves on that GPU, and the memory is free."""
        if container.contract is None or gpu not in container.contract.gpus or self._coordinator.undecided:
            return False
        if container.used_bytes(gpu) + need_bytes > container.contract.gpus[gpu][0]:
            return False
        if any(request.gpu == gpu for request in self._coordinator.requests.values()):
            return False
        moving = any(self._containers[name].blocked and gpu in self._containers[name].gpus for name in active)
        return not moving and self.of(gpu) >= need_bytes
