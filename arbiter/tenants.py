"""Which containers have a connection for GPU time, by name and by the GPU threads that they depend on.

What other parts of the arbiter know of a container's processes may come before its first connection here, and is kept for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from arbiter.identity import Identity
from arbiter.seat import Seat
from arbiter.tenant import TenantTurns

Known = TypeVar("Known", Mapping[int, str], Mapping[tuple[Identity, int], float])


class Tenants(dict[str, TenantTurns]):
    """By the name of the grant directory; changed by `add` and `remove` only. Under the lock of `Turns`."""

    def __init__(self) -> None:
        super().__init__()
        self._depending: dict[str, list[TenantTurns]] = {}
        self._spared: dict[str, Mapping[int, str]] = {}
        self._contexts: dict[str, Mapping[tuple[Identity, int], float]] = {}

    def add(self, tenant: TenantTurns) -> None:
        """Its first connection came."""
        self[tenant.name] = tenant
        tenant.obstacles.spared = self._spared.get(tenant.name, {})
        tenant.obstacles.contexts_s = dict(self._contexts.get(tenant.name, {}))
        self.moved()

    def remove(self, name: str) -> TenantTurns | None:
        """Its grant is gone, with all that was known of its processes."""
        self._spared.pop(name, None)
        self._contexts.pop(name, None)
        self.moved()
        return self.pop(name, None)

    def moved(self) -> None:
        """One of them depends on other threads than before."""
        self._depending.clear()

    def depending(self, card: str) -> Sequence[TenantTurns]:
        """Those that the thread of a GPU reads or switches; it asks several times in each round."""
        found = self._depending.get(card)
        if found is None:
            found = self._depending[card] = [one for one in self.values() if card in one.depends_on()]
        return found

    def spare(self, name: str, pids: Mapping[int, str]) -> TenantTurns | None:
        """These of its processes are never suspended, for these reasons. Returns it, where it has come already."""
        _keep(self._spared, name, pids)
        tenant = self.get(name)
        if tenant is not None:
            tenant.obstacles.spare(pids)
        return tenant

    def contexts(self, name: str, begun_s: Mapping[tuple[Identity, int], float]) -> None:
        """Since when each of its processes has had a context on each GPU of its grant."""
        _keep(self._contexts, name, begun_s)
        if name in self:
            self[name].obstacles.contexts_s = dict(begun_s)

    def to_report(self, at_s: float) -> set[str]:
        """Names of those that compute without a word, or are stopped by another."""
        return {name for name, one in self.items() if one.word.suspicion.proven or one.healing.stopped(at_s)}

    def seats(self) -> list[tuple[TenantTurns, Seat]]:
        """The channels of all their processes."""
        return [
            (tenant, seat)
            for tenant in self.values()
            for process in tenant.processes.values()
            for seat in process.seats.values()
        ]


def _keep(kept: dict[str, Known], name: str, known: Known) -> None:
    """Nothing is kept of a container without such processes: its grant directory may be gone."""
    if known:
        kept[name] = known
    else:
        kept.pop(name, None)
