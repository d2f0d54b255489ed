"""The server's part in swapping: it passes readings, connections and decisions between the containers and the part that swaps (`arbiter.swap.node`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Final

import structlog

from arbiter.connection import Connection
from arbiter.memory.container import ServedContainer
from arbiter.memory.giving_way import Excess
from arbiter.memory.meter import MemoryReading
from arbiter.memory.node_share import RequestId
from arbiter.swap.node import SwapNode
from arbiter.swap.results import GpuSwapStatus
from vgpu.memory.capacity import GpuCapacity
from vgpu.memory.swap.actions import OverLimit
from vgpu.protocol.status import SwapStatus

KILL_AGAIN_S: Final = 1.0
"""While a container that was killed is still over its limit. Guessed: its memory is free within a second after it has ended."""
_log = structlog.get_logger()


class NodeSwapping:
    """See the module. `node` None: containers of this node may not burst, and nothing here has an effect. Under the server's lock."""

    def __init__(
        self, node: SwapNode | None, containers: Mapping[str, ServedContainer], clock: Callable[[], float]
    ) -> None:
        self.node = node
        self._containers, self._clock = containers, clock
        self._capacities: dict[str, GpuCapacity] = {}
        self._over_limit: dict[str, float] = {}
        """Containers that did not give way -> when they are killed, or killed again."""
        self.kills = 0
        """Containers that were killed because they did not give way."""

    def throttles(self) -> dict[str, int]:
        """How often each container had to wait because it stated too much. From any thread."""
        return self.node.throttles() if self.node is not None else {}

    @property
    def copier_pids(self) -> frozenset[int]:
        """Processes that use memory of the GPUs to swap."""
        return self.node.copier_pids() if self.node is not None else frozenset()

    @property
    def due_s(self) -> float:
        """When `decide` is to be called, if nothing happens before."""
        due_s = self.node.deadline_s() if self.node is not None else None
        return min(inf if due_s is None else due_s, *self._over_limit.values(), inf)

    def decide(self, settle: Callable[[ServedContainer], None]) -> None:
        """Let the node decide about memory, and pass its decisions to the containers that waited for them."""
        if self.node is None:
            return
        if (due_s := self.node.deadline_s()) is not None and due_s <= self._clock():
            self.node.turn()
        # before anything else of containers: what waits until the limits are known would be decided without them
        if changed := self.node.changed_gpus():
            self._renew(changed, settle)
        for stated in self.node.stated():
            if (container := self._containers.get(stated.name)) is not None:
                container.memory.states_elastic(stated.pid, stated.gpu, stated.elastic_bytes)
                settle(container)
        while decided := self.node.decided():
            for one in decided:
                request = RequestId.of(one.id)
                if (container := self._containers.get(request.name)) is not None:
                    container.memory.node_decided(request, granted=one.granted)
                    settle(container)
        self._end_over_limit(self.node)
        self.node.awake()

    def _end_over_limit(self, node: SwapNode) -> None:
        """Kill those that do not give way, again while they do not: one may have been out of sight, or in a call of the driver that does not end."""
        for notice in node.notices():
            _log.warning("swapping", grant=notice.name, about=type(notice).__name__, reason=notice.reason)
            if isinstance(notice, OverLimit) and node.reasons.actions.over_limit == "kill":
                self._over_limit[notice.name] = self._clock()
        for name, due_s in list(self._over_limit.items()):
            container, reason = self._containers.get(name), node.reasons.over_limit(name)
            if container is None or not reason:
                del self._over_limit[name]
            elif due_s <= self._clock():
                self._over_limit[name] = self._clock() + KILL_AGAIN_S
                worst = max(node.status(name).gpus, key=lambda one: one.excess_bytes)
                before = container.kills
                container.end(Excess(worst.gpu, worst.present_bytes, worst.guarantee_bytes), reason)
                self.kills += container.kills - before

    def _renew(self, gpus: frozenset[str], settle: Callable[[ServedContainer], None]) -> None:
        for container in list(self._containers.values()):
            if container.grant is not None and gpus.intersection(container.memory.uuids):
                container.memory.renew(container.grant, container.burst)
                settle(container)

    def recall(self, name: str, gpu: str, missing_bytes: int) -> None:
        """Other containers lack memory of a GPU: this one's processes return what they lease and do not use."""
        if (container := self._containers.get(name)) is not None:
            container.memory.recall(gpu, missing_bytes)

    def owes(self, name: str, gpu: str) -> bool:
        """Whether one of them has yet to answer that."""
        container = self._containers.get(name)
        return container is not None and container.memory.owes(gpu)

    def take(self, container: ServedContainer, connection: Connection) -> bool:
        """Take ownership of a connection for bursts. Returns whether it is one."""
        if self.node is None or not connection.for_burst:
            return False
        self.node.take(container.folder.name, connection)
        return True

    def measure(self, reading: MemoryReading) -> None:
        """Tell the node how much memory of each GPU is for containers. A GPU whose driver does not report its memory has no bursts."""
        if self.node is None:
            return
        for uuid, usable_bytes in reading.usable.items():
            used_bytes = reading.used.get(uuid)
            listed = [held for pid, held in reading.gpus[uuid].items() if reading.seen[pid].key is not None]
            if used_bytes is not None and None not in listed:
                capacity = self._capacities.setdefault(uuid, GpuCapacity())
                capacity_bytes = capacity.read(usable_bytes, used_bytes, sum(held or 0 for held in listed))
                self.node.add_gpu(uuid, usable_bytes, usable_bytes - capacity_bytes)

    def to_report(self, name: str) -> bool:
        """Whether a container does not give way, its memory cannot come back, or it waits for room in the host pool."""
        if self.node is None or not self.node.knows(name):
            return False
        status = self.node.status(name)
        return bool(status.over_limit or status.stranded or status.pool_full)

    def status(self, name: str) -> tuple[SwapStatus | None, dict[str, GpuSwapStatus]]:
        """What the status document has of a container: as a whole, and of each GPU by UUID."""
        if self.node is None or not self.node.knows(name):
            return None, {}
        status, actions = self.node.status(name), self.node.reasons.actions
        whole = SwapStatus(
            paused=status.paused,
            paused_s=status.paused_s,
            why=status.why,
            direction=status.direction or "",
            waiting=status.waiting,
            unable=status.unable,
            over_limit=status.over_limit,
            over_limit_action=actions.over_limit,
            stranded=status.stranded,
            stranded_action=actions.stranded,
            pool_full=status.pool_full,
            no_pool=self._no_pool(self._containers.get(name), self.node),
        )
        return whole, {one.gpu: one for one in status.gpus}

    def _no_pool(self, container: ServedContainer | None, node: SwapNode) -> str:
        """Why memory above its guarantee cannot be moved now, of the first GPU where that is so; empty: it can, or the container may not burst."""
        if container is None or container.grant is None or container.burst is None:
            return ""
        guarantees = {gpu.uuid: gpu.mib for gpu in container.grant.gpus}
        bursting = [gpu.uuid for gpu in container.burst.gpus if gpu.mib > guarantees[gpu.uuid]]
        return next(filter(None, map(node.missing, bursting)), "")

    def close(self) -> None:
        """The arbiter ends."""
        if self.node is not None:
            self.node.close()
