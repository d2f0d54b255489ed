"""Capacity that comes free because a reservation lapses: pods that wait for it are placed soon, though no event in the API shows it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

import pytest

from tests.builders import PodBuilder, node, pod
from tests.integration.extender.following import watched
from tests.integration.extender.scheduling import Stack, Thing, pod_object
from tests.ports import free_port

FULL_MIB: Final = 81_920
PODS: Final = "/api/v1/namespaces/default/pods"
LIFE_S: Final = 10.0
"""Of a reservation: long enough that the pod is refused before it is over."""

WITHIN_S: Final = 60.0
"""kube-scheduler alone would take five minutes."""


@pytest.mark.timeout(240)
async def test_a_pod_that_waits_is_placed_when_a_reservation_lapses(stack: Stack) -> None:
    async with (
        watched(stack.api, node("n1").with_gpus(1), runs=False) as cluster,
        AsyncExitStack() as open_until_the_end,
    ):
        follower, ledger = cluster.follower, cluster.ledger
        ports = {"port": free_port(), "metricsPort": free_port()}
        values = {"scheduler": {"leaderElect": False, "replicas": 1, "extender": ports}}
        configuration, variables = stack.configured(values)
        variables = {**variables, "TANGRAM_EXTENDER_RESERVATION_S": str(LIFE_S)}
        extender = await stack.extender(variables, ports["port"], ports["metricsPort"])
        open_until_the_end.push_async_callback(extender.kill)
        open_until_the_end.callback(stack.scheduler(configuration, free_port()).kill)
        (first,) = await stack.api.create(PODS, [pod_object(pod("first").asking(mib=FULL_MIB))])
        await follower.until(lambda: first["metadata"]["uid"] in ledger.held, "kube-scheduler places pods")
        await stack.api.delete(first, gracePeriodSeconds=0)
        await extender.comes_to(lambda known: not known.pods)

        (other,) = await stack.api.create(PODS, [of_another_scheduler(pod("other").asking(mib=FULL_MIB))])
        assert (await extender.filter(other, "n1"))["NodeNames"] == ["n1"], "it is never bound"
        (made,) = await stack.api.create(PODS, [pod_object(pod("waits").asking(mib=FULL_MIB))])
        uid = made["metadata"]["uid"]
        await follower.until(lambda: is_refused(ledger.alive.get(uid)), "it fits nowhere")
        await follower.until(lambda: uid in ledger.held, "it is bound", timeout_s=WITHIN_S)
        assert ledger.wrong == []
        assert not ledger.alive[uid]["status"].get("nominatedNodeName")


def of_another_scheduler(built: PodBuilder) -> Thing:
    """A pod that kube-scheduler leaves alone."""
    thing = pod_object(built)
    thing["spec"]["schedulerName"] = "another"
    return thing


def is_refused(thing: Thing | None) -> bool:
    return thing is not None and any(
        one.get("reason") == "Unschedulable" for one in thing["status"].get("conditions", [])
    )
