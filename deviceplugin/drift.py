"""Invariant I3: per card, the kubelet's books and the assignments of the pods say the same. Pure.

A difference is no one's loss by itself (the environment or the CDI device decides what a container sees), but the kubelet may then
refuse a pod that the extender placed rightly, so it is measured and told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deviceplugin.allocate import Tenant, assigned
from deviceplugin.podresources import Holding
from vgpu.contract import uuid_of
from vgpu.errors import BadDocument
from vgpu.names import Names

Drift = dict[tuple[str, str], int]
"""(resource, card UUID) -> device IDs that the kubelet counts there beyond what is assigned; negative when fewer."""


def drift(holdings: Iterable[Holding], tenants: Iterable[Tenant], names: Names) -> Drift:
    """Where the books differ. Zeros are left out.

    Pods that we do not know are left out, and pods that the kubelet may not know yet or any longer. One that it has started and does
    not list counts: it lost its checkpoint. Init containers that run to completion are left out on both sides: the kubelet
    does not list what they hold.
    """
    listed = list(holdings)
    known = {(t.namespace, t.name): t for t in tenants}
    difference: Counter[tuple[str, str]] = Counter()
    for held in listed:
        tenant = known.get((held.namespace, held.pod))
        ask = next((a for a in tenant.asks if a.container == held.container), None) if tenant else None
        if tenant is None or ask is None:
            continue
        difference.update((held.resource, _card(one)) for one in held.ids)
        for uuid, count in assigned(tenant, ask, held.resource, names).items():
            difference[held.resource, uuid] -= count
    there = {(held.namespace, held.pod) for held in listed}
    for tenant in known.values():
        if not (tenant.waiting or tenant.leaving or (tenant.namespace, tenant.name) in there):
            difference.subtract(_all_of(tenant, names))
    return {key: count for key, count in difference.items() if count}


def _all_of(tenant: Tenant, names: Names) -> Counter[tuple[str, str]]:
    """What its containers that keep running were assigned."""
    found: Counter[tuple[str, str]] = Counter()
    for ask in tenant.asks:
        for resource in () if ask.init else ask.resources(names):
            for uuid, count in assigned(tenant, ask, resource, names).items():
                found[resource, uuid] += count
    return found


def _card(device_id: str) -> str:
    try:
        return uuid_of(device_id)
    except BadDocument:
        return device_id
