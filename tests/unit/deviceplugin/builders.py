"""Small builders for the device plugin's tests: a node, tenants on it, and a kubelet that admits them as the real one does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deviceplugin.allocate import Request, Tenant
from deviceplugin.ledger import Ledger
from vgpu.contract import devices
from vgpu.grant import Assignment, Slice
from vgpu.inventory import Card, Inventory
from vgpu.names import DEFAULT, Names
from vgpu.request import Ask

UNIT_MIB = 1024


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


def inventory(cards: int = 2, mib: int = 16 * 1024, access: str = "cdi") -> Inventory:
    return Inventory(
        tuple(Card(uuid(i), i, "NVIDIA T4", mib, minor=i) for i in range(cards)),
        UNIT_MIB,
        access,  # type: ignore[arg-type]
    )


def share(container: str, units: int, core: int = 0, cards: int = 1, *, init: bool = False) -> Ask:
    return Ask(container, "share", cards, units=units, mib=units // cards * UNIT_MIB, core_percent=core, init=init)


def tenant(name: str, order: int, *asks: Ask, on: Sequence[int] | dict[str, Sequence[int]]) -> Tenant:
    """A waiting pod whose containers were assigned the cards numbered `on`."""
    where = on if isinstance(on, dict) else {ask.container: on for ask in asks}
    containers = {
        ask.container: tuple(
            Slice(uuid(i), i, ask.mib, ask.core_percent, ask.kind, ask.profile) for i in where[ask.container]
        )
        for ask in asks
    }
    init = frozenset(ask.container for ask in asks if ask.init)
    return Tenant(f"uid-{name}", "default", name, (1, f"{order:06d}"), asks, Assignment(containers, init))


@dataclass
class KnownPods:
    """What the watch shows; `show` brings a change."""

    shown: dict[str, Tenant] = field(default_factory=dict)
    change: asyncio.Event = field(default_factory=asyncio.Event)

    def tenants(self) -> Sequence[Tenant]:
        return list(self.shown.values())

    def stranger(self, request: Request) -> str | None:  # noqa: ARG002
        return None

    async def changed(self) -> None:
        await self.change.wait()

    def show(self, one: Tenant) -> None:
        self.shown[one.uid] = one
        self.change.set()
        self.change = asyncio.Event()

    def admitted(self, one: Tenant) -> None:
        self.show(replace(self.shown[one.uid], waiting=False))

    def gone(self, one: Tenant) -> None:
        del self.shown[one.uid]


class ModelKubelet:
    """The kubelet's device manager, as manager.go of Kubernetes 1.36 has it: reuse first, then preferred, then any."""

    def __init__(self, ledger: Ledger, inventory: Inventory, rng: random.Random, names: Names = DEFAULT) -> None:
        self.ledger, self.rng, self.names = ledger, rng, names
        self.all = {resource: {d.id for d in ids} for resource, ids in devices(inventory, names).items()}
        self.used: dict[str, set[str]] = {resource: set() for resource in self.all}
        self.books: dict[str, dict[tuple[str, str], frozenset[str]]] = {}

    async def admit(self, pod: Tenant) -> None:
        """Raises what the plugin raises; what the pod had until then is free again."""
        books = self.books.setdefault(pod.uid, {})
        reusable: dict[str, set[str]] = {}
        try:
            for ask in pod.asks:
                wanted = list(ask.resources(self.names).items())
                self.rng.shuffle(wanted)
                for resource, quantity in wanted:
                    ids = await self._devices(resource, quantity, reusable.get(resource, set()))
                    await self.ledger.allocate(resource, ids)
                    self.used[resource] |= ids
                    books[ask.container, resource] = frozenset(ids)
                for resource, _ in wanted:
                    had = reusable.setdefault(resource, set())
                    if ask.init:
                        had |= books[ask.container, resource]
                    else:
                        had -= books[ask.container, resource]
        except Exception:
            self.remove(pod)
            raise

    def remove(self, pod: Tenant) -> None:
        for (_, resource), ids in self.books.pop(pod.uid, {}).items():
            self.used[resource] -= ids

    async def _devices(self, resource: str, quantity: int, reusable: set[str]) -> set[str]:
        taken = set(self.rng.sample(sorted(reusable), min(quantity, len(reusable))))
        if len(taken) == quantity:
            return taken
        available = self.all[resource] - self.used[resource]
        assert len(available) >= quantity - len(taken), f"the kubelet has no {quantity} {resource} left"
        offered = list(available | taken)
        self.rng.shuffle(offered)
        preferred = await self.ledger.prefer(resource, offered, sorted(taken), quantity)
        rest = [one for one in preferred if one in available and one not in taken]
        rest += [one for one in self.rng.sample(sorted(available), len(available)) if one not in rest]
        return taken | set(rest[: quantity - len(taken)])
