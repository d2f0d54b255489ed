"""The requests of one container that fit into its own limits and need memory of the GPU itself.

On a node where containers may burst, a GPU may have less memory than all limits together. `NodeRoom` decides when it has enough. A request that waits
there counts as promised in the ledger, so that it delays no later request which the GPU has memory for.

A new arbiter does not know at once whether a container's limit is above its guarantee: that is so where memory can be moved from the GPU, which a copier
has to say. What does not fit the guarantee waits until then, unless no limit could fit it: resident memory stays within the guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from vgpu.memory.accounts import GpuAccounts
from vgpu.memory.records import Event, LeaseRequest, NodeAnswer, NodeRoom, Waiting

PENDING_S: Final = 1.0
"""Period of the answer that a request still waits. Specified: protocol.md; a library that hears nothing for 2 s gives up."""
LIMITS_WAIT_S: Final = 10.0
"""How long a new arbiter may not know a container's limits before what does not fit the guarantee is refused. Guessed: it knows them within a second where
NVML answers and the processor is not short."""


class NodeRequests:
    """See the module. `node` None: the sum of all limits fits on each GPU, and nothing waits here. `opens_at_s`: as the ledger has it."""

    def __init__(self, gpus: Sequence[GpuAccounts], node: NodeRoom | None, opens_at_s: float = 0.0) -> None:
        self._gpus, self._node = gpus, node
        self._limits_by_s = opens_at_s + LIMITS_WAIT_S
        self._repeat_at_s = inf

    def awaits_limits(self, gpu: int, request: LeaseRequest, missing_bytes: int, now_s: float) -> bool:
        """Whether a request that does not fit the container's limits waits, because they may rise in a moment so far that it does. The answer that it waits
        is due at once: it may have waited for most of 2 s already."""
        if now_s >= self._limits_by_s or self._knows_limits(gpu):
            return False
        if not self._gpus[gpu].may_fit(missing_bytes, elastic=request.elastic):
            return False
        if not request.awaits_limits:
            request.awaits_limits, self._repeat_at_s = True, now_s
        return True

    def limits_due_s(self, gpu: int) -> float:
        """When such a request is decided at the latest; inf: none waits for that."""
        return inf if self._knows_limits(gpu) else self._limits_by_s

    def decides(self, gpu: int) -> bool:
        """Whether memory of this GPU may have to be taken from other containers first."""
        return self._node is not None and self._node.decides(gpu)

    def read_ceiling(self, gpu: int) -> None:
        """Before a decision: what the host pool and the GPU can ever give."""
        self._gpus[gpu].ceiling = self._node.ceiling(gpu) if self._node is not None and self.decides(gpu) else None

    def request(
        self, gpu: int, request: LeaseRequest, missing_bytes: int, free_bytes: int, now_s: float
    ) -> Event | NodeAnswer:
        """The event that answers a request of which the limits allow `free_bytes`; REFUSED if there will be no memory for it. Nothing waits for a lease
        in advance, nor for shared memory that is charged already (`missing_bytes` 0)."""
        of = self._gpus[gpu]
        if self._node is None or not self._node.decides(gpu):
            return of.grant(gpu, request, free_bytes)
        answer = NodeAnswer.GRANTED
        if any((one.process, one.seq) == (request.process, request.seq) for one in of.at_node):
            return NodeAnswer.REFUSED  # of another kind: what the node decides about one would be taken for both
        if missing_bytes > 0:
            # what the process returned for this request is not the container's any more: with it, the request could be above a limit
            self._node.use(gpu, of.claimed_bytes)
            answer = self._node.request(
                gpu, request.process, request.seq, missing_bytes, elastic=request.elastic, waited_s=request.waited_s
            )
        if answer is NodeAnswer.GRANTED:
            room_bytes = max(0, self._node.free_bytes(gpu))
            return of.grant(gpu, request, min(free_bytes, missing_bytes + room_bytes))
        if answer is NodeAnswer.WAITS:
            self._repeat_at_s = min(self._repeat_at_s, now_s + PENDING_S)
            of.at_node.append(request)
            return Waiting(request.process, gpu, request.seq, missing_bytes)
        return answer

    def remove(self, gpu: int, process: int, seq: int) -> LeaseRequest | None:
        """Remove a request, because the node decided about it; None if it was withdrawn."""
        waiting = self._gpus[gpu].at_node
        found = next((one for one in waiting if (one.process, one.seq) == (process, seq)), None)
        if found is not None:
            waiting.remove(found)
        return found

    def withdraw(self, gpu: int, process: int) -> None:
        """This process is gone."""
        waiting = self._gpus[gpu].at_node
        for request in [one for one in waiting if one.process == process]:
            waiting.remove(request)
            if self._node is not None:
                self._node.withdraw(gpu, process, request.seq)

    def repeat(self, now_s: float) -> list[Event]:
        """The answer that is due to those that wait, and to those behind them: they still wait."""
        if now_s < self._repeat_at_s:
            return []
        events: list[Event] = [
            Waiting(one.process, number, one.seq, one.need_bytes)
            for number, gpu in enumerate(self._gpus)
            if gpu.at_node or not self._knows_limits(number)
            for one in (*gpu.at_node, *gpu.requests)
        ]
        self._repeat_at_s = now_s + PENDING_S if events else inf
        return events

    def due_s(self) -> list[float]:
        """When `repeat` is to be called next; empty if nothing waits."""
        return [self._repeat_at_s] if self._repeat_at_s < inf else []

    def _knows_limits(self, gpu: int) -> bool:
        return self._node is None or self._node.knows_limits(gpu)
