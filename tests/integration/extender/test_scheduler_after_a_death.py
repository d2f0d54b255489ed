"""An extender that dies in the middle of a preemption, at each of its calls: the pod is placed soon after the next one runs.

Nothing else happens in the cluster meanwhile: no event wakes a pod by chance. kube-scheduler repeats every call but `/preempt`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from tests.builders import PodBuilder, node, pod
from tests.integration.extender.couple import Couple, Moment, couple, waits_for
from tests.integration.extender.following import WatchedCluster, priority_classes, watched
from tests.integration.extender.scheduling import Stack, pod_object

FULL_MIB: Final = 81_920
QUARTER_MIB: Final = FULL_MIB // 4
PODS: Final = "/api/v1/namespaces/default/pods"
WITHIN_S: Final = 30.0
"""As docs/development/faults.md states for an extender that is killed."""

BY_THE_SCHEDULER: Final = (
    Moment("/preempt", "before"),
    Moment("/preempt", "after"),
    Moment("/filter", "before"),
    Moment("/bind", "before"),
    Moment("/binding", "after"),
)
"""Totals are short, so kube-scheduler calls /preempt, and filters once the victim has ended."""

BY_ITSELF: Final = (
    Moment("/filter", "before"),
    Moment("/filter", "after"),
    Moment("/status", "before", method="PATCH"),
    Moment("/status", "after", method="PATCH"),
    Moment("/eviction", "before", about="low"),
    Moment("/eviction", "after", about="low"),
    Moment("/eviction", "after", about="low", nth=2),
    Moment("/filter", "before", nth=2),
    Moment("/bind", "before"),
    Moment("/binding", "after"),
)
"""Totals are enough and no GPU is: two pods of one GPU have to be evicted, and kube-scheduler evicts none."""


class DeathSetup:
    """One node with two GPUs, and the couple before it."""

    def __init__(self, cluster: WatchedCluster) -> None:
        self.api, self.follower, self.ledger = cluster.api, cluster.follower, cluster.ledger

    async def run(self, *built: PodBuilder) -> None:
        made = await self.api.create(PODS, [pod_object(one, "low") for one in built])
        uids = {one["metadata"]["uid"] for one in made}
        await self.follower.until(lambda: uids <= self.ledger.held.keys() and all(map(self._runs, uids)), "they run")

    def _runs(self, uid: str) -> bool:
        return self.ledger.alive[uid]["status"]["phase"] == "Running"

    async def is_placed(self, couple: Couple, urgent: PodBuilder) -> None:
        """In spite of the death, and soon after it."""
        (made,) = await self.api.create(PODS, [pod_object(urgent, "high")])
        uid = made["metadata"]["uid"]
        try:
            async with asyncio.timeout(60):
                await couple.died.wait()  # also where the pod is seen bound first
        except TimeoutError:
            raise AssertionError(f"the moment never came: {couple.passed}") from None
        try:
            await self.follower.until(lambda: uid in self.ledger.held, "it is bound", timeout_s=WITHIN_S)
        except AssertionError:
            left = self.ledger.alive.get(uid)
            raise AssertionError(f"{left and waits_for(left)}\n{couple.passed}") from None
        assert self.ledger.wrong == []


@pytest.fixture
async def setup(stack: Stack) -> AsyncIterator[DeathSetup]:
    async with priority_classes(stack.api, low=1, high=1000), watched(stack.api, node("n1").with_gpus(2)) as cluster:
        yield DeathSetup(cluster)


def _name(moment: Moment) -> str:
    return f"{moment.when}-{moment.ending[1:]}-{moment.nth}"


@pytest.mark.parametrize("moment", BY_THE_SCHEDULER, ids=_name)
async def test_a_pod_for_which_kube_scheduler_evicts_is_placed_whenever_the_extender_dies(
    stack: Stack, setup: DeathSetup, tmp_path: Path, moment: Moment
) -> None:
    async with couple(stack, tmp_path, moment) as both:
        await setup.run(*(pod(f"low-{at}").annotated(placement="spread").asking(mib=FULL_MIB) for at in range(2)))
        await setup.is_placed(both, pod("urgent").asking(mib=FULL_MIB))
        assert len(setup.ledger.leaving) == 1


@pytest.mark.parametrize("moment", BY_ITSELF, ids=_name)
async def test_a_pod_for_which_the_extender_evicts_is_placed_whenever_the_extender_dies(
    stack: Stack, setup: DeathSetup, tmp_path: Path, moment: Moment
) -> None:
    async with couple(stack, tmp_path, moment) as both:
        await setup.run(*(pod(f"low-{at}").annotated(placement="spread").asking(mib=QUARTER_MIB) for at in range(4)))
        await setup.is_placed(both, pod("urgent").asking(mib=FULL_MIB))
        assert len(setup.ledger.leaving) == 2
