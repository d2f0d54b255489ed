"""A gang with the real kube-scheduler: its objects, and its state in the extender."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from tests.builders import NodeBuilder, PodBuilder, node, pod
from tests.integration.extender.conftest import GANG_GATES
from tests.integration.extender.following import WatchedCluster, watched
from tests.integration.extender.harness import allocated_pods
from tests.integration.extender.scheduling import SchedulerPair, Stack, Thing, node_object, pod_object
from vgpu.api.inventory import AccessMode
from vgpu.scheduling.gangs import QUIET_S
from vgpu.scheduling.snapshot import Snapshot

PODS: Final = "/api/v1/namespaces/default/pods"
GROUPS: Final = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"
BACK_S: Final = 4.0
"""From the last filter call, or from the moment in which others request it, until the capacity of a failed gang is free. Specified."""

GPUS: Final = 4
FULL_MIB: Final = 81_920
TAINT: Final = {"key": "reserved", "value": "batch", "effect": "NoSchedule"}


class GangSetup:
    """A node with four GPUs, a kubelet that runs what is bound, and a count of it all."""

    def __init__(self, cluster: WatchedCluster, pair: SchedulerPair) -> None:
        self.api, self.follower, self.ledger = cluster.api, cluster.follower, cluster.ledger
        assert pair.extender is not None
        self.extender = pair.extender

    async def group(self, name: str, min_count: int | None) -> None:
        """A PodGroup: a gang, or without minCount one of policy Basic."""
        policy: Thing = {"basic": {}} if min_count is None else {"gang": {"minCount": min_count}}
        spec = {"schedulingPolicy": policy}
        await self.api.call("POST", GROUPS, {"metadata": {"name": name}, "spec": spec})

    async def create(self, *built: PodBuilder, tolerating: bool = True) -> list[str]:
        """Pods; their UIDs."""
        return await self.add([pod_object(one) for one in built], tolerating=tolerating)

    async def add(self, things: list[Thing], *, tolerating: bool = True) -> list[str]:
        """The same, of pods as the API has them."""
        for thing in things if tolerating else ():
            thing["spec"]["tolerations"] = [{"key": TAINT["key"], "operator": "Exists"}]
        return [one["metadata"]["uid"] for one in await self.api.create(PODS, things)]

    async def no_groups(self) -> None:
        """No PodGroup is left for the next test. No controller runs that would remove their finalizers."""
        for group in (await self.api.call("GET", GROUPS))["items"]:
            path = f"{GROUPS}/{group['metadata']['name']}"
            await self.api.patch(path, {"metadata": {"finalizers": None}})
            await self.api.call("DELETE", path)

    async def delete(self, uids: list[str]) -> None:
        for uid in uids:
            await self.api.delete(self.ledger.alive[uid], gracePeriodSeconds=0)

    async def bound(self, uids: list[str], what: str = "they are bound", *, timeout_s: float = 90) -> None:
        await self.follower.until(lambda: self.count(uids) == len(uids), what, timeout_s=timeout_s)

    def count(self, uids: list[str]) -> int:
        """How many of them are bound."""
        return sum("nodeName" in self.ledger.alive[uid]["spec"] for uid in uids if uid in self.ledger.alive)

    async def refused(self, uids: list[str]) -> None:
        """Return when kube-scheduler reports that none of them can be scheduled."""
        await self.follower.until(lambda: all(map(self._is_refused, uids)), "they are refused")

    def _is_refused(self, uid: str) -> bool:
        conditions = self.ledger.alive.get(uid, {"status": {}})["status"].get("conditions", [])
        return any(one.get("reason") == "Unschedulable" for one in conditions)

    async def calls(self) -> int:
        """Filter calls until now."""
        found = re.findall(r'requests_total{outcome="[a-z_]+",verb="filter"} ([0-9]+)', await self.extender.metrics())
        return sum(map(int, found))

    async def fails(self, reserved: int) -> None:
        """Return when capacity was reserved for so many pods of a gang, and is free again soon after the last filter call."""
        await self.extender.comes_to(lambda known: len(in_gang(known)) == reserved)
        loop = asyncio.get_running_loop()
        calls, called_s = await self.calls(), loop.time()
        while in_gang(await self.extender.snapshot()) or loop.time() - called_s < QUIET_S:
            before, calls = calls, await self.calls()
            if calls != before:
                called_s = loop.time()
            assert loop.time() - called_s < BACK_S
            await asyncio.sleep(0.05)  # another process: no event comes from it


def in_gang(known: Snapshot) -> set[str]:
    """Pods of gangs for which capacity is reserved."""
    return {name for name, stage in allocated_pods(known).items() if stage == "in gang"}


def members(group: str, *, mib: int = FULL_MIB, count: int = GPUS, **more: str) -> list[PodBuilder]:
    """Pods of a group, each with a GPU."""
    return [pod(f"{group}-{at}").in_group(group).asking(mib=mib, **more) for at in range(count)]


def tainted(built: NodeBuilder) -> Thing:
    """A node that only pods that tolerate this go to."""
    return node_object(built) | {"spec": {"taints": [TAINT]}}


@asynccontextmanager
async def running(
    stack: Stack, *, popped_at_once: bool, before: Sequence[Thing] = (), access: AccessMode = "nvidia"
) -> AsyncIterator[GangSetup]:
    """`popped_at_once`: kube-scheduler tries a gang again at once where nothing else waits. `before`: extenders that it calls before ours. `access`: how
    the node's containers get their devices."""
    stack.flags = (f"--feature-gates={GANG_GATES},SchedulerPopFromBackoffQ={popped_at_once}",)
    async with watched(stack.api, node("n1").with_gpus(GPUS).with_access(access), made=tainted) as cluster:
        made = GangSetup(cluster, await stack.pair(before=before))
        yield made
        await made.no_groups()
    assert cluster.ledger.wrong == []
