"""The threads of a node's GPUs: which there are, which of them a container depends on, and how long one has been silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbiter.lane import Lane
from arbiter.tenant import TenantTurns

if TYPE_CHECKING:
    from arbiter.turns import Turns


class Lanes:
    """By GPU. All but `stuck` are called under the lock of `turns`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._lanes: dict[str, Lane] = {}

    def of(self, uuid: str) -> Lane:
        """The thread of a GPU, which is started when it is asked for first."""
        if uuid not in self._lanes:
            self._turns.pulse.start()
            self._lanes[uuid] = Lane(uuid, self._turns)
            self._lanes[uuid].start()
        return self._lanes[uuid]

    def reader_of(self, tenant: TenantTurns) -> Lane:
        """The thread that reads a container's messages."""
        return self.of(tenant.grant.cards[0].uuid)

    def all(self) -> list[Lane]:
        """Those that were started."""
        return list(self._lanes.values())

    def wake(self, tenant: TenantTurns) -> None:
        """There is something to do on its GPUs."""
        for uuid in tenant.cards:
            self.of(uuid).wake()

    def beat_soon(self, tenant: TenantTurns) -> None:
        """It is off or waits from now on."""
        for uuid in tenant.depends_on():
            self.of(uuid).beat_soon()

    def stay_awake(self, tenant: TenantTurns, until_s: float) -> None:
        """Who has a request has the next one soon: what it needs is to be done at once."""
        for uuid in tenant.depends_on():
            self.of(uuid).awake_until_s = until_s

    def alive_ms(self, tenant: TenantTurns) -> int:
        """When the thread that has been silent for longest, of those that read or switch this container, came round last."""
        return int(self._alive_at_s(tenant) * 1000)

    def silent_s(self, tenant: TenantTurns, at_s: float) -> float:
        """How long a thread that a container depends on has not come round."""
        return max(0.0, at_s - self._alive_at_s(tenant)) if tenant.joined is not None else 0.0

    def stuck(self, at_s: float) -> tuple[str, float]:
        """The GPU whose thread has not come round for longest, and for how long; without the lock, which that may hold."""
        ages = {uuid: at_s - lane.alive_at_s for uuid, lane in self._lanes.copy().items()}
        return max(ages.items(), key=lambda of: of[1], default=("", 0.0))

    def _alive_at_s(self, tenant: TenantTurns) -> float:
        at_s = self._turns.clock()
        ours = (self._lanes[uuid].lived_s(at_s) for uuid in tenant.depends_on() if uuid in self._lanes)
        return min(ours, default=at_s)
