"""Replicas of one size that are to be spread over the GPUs of a node in access mode cdi, through the real kube-scheduler."""

from __future__ import annotations

from collections import Counter

from tests.builders import node, pod
from tests.integration.extender.following import watched
from tests.integration.extender.ledger import AssignmentLedger
from tests.integration.extender.scheduling import Stack, Thing, pod_object

PODS = "/api/v1/namespaces/default/pods"
REPLICAS = 6


class Mixing:
    """Whether the kubelet could ever have mixed two pods up: both bound and not started, with different GPUs."""

    def __init__(self, ledger: AssignmentLedger) -> None:
        self._ledger = ledger
        self.could: list[set[str]] = []

    def report(self, _kind: str, _pod: Thing) -> None:
        starting = [one["metadata"]["uid"] for one in self._ledger.bound() if "startTime" not in one["status"]]
        gpus = set[str]().union(*map(self._ledger.gpus_of, starting))
        if len(gpus) > 1:
            self.could.append(gpus)


def is_refused(one: Thing) -> bool:
    """Was it refused, so that the scheduler has to come back to it?"""
    return any(
        condition["type"] == "PodScheduled" and condition["status"] == "False"
        for condition in one["status"].get("conditions", ())
    )


async def test_replicas_are_spread_over_the_gpus_and_never_start_where_they_could_be_mixed_up(stack: Stack) -> None:
    built = node("n0").with_gpus(2).with_access("cdi")
    async with watched(stack.api, built, runs=False) as cluster:
        follower, ledger, kubelet = cluster.follower, cluster.ledger, cluster.kubelet
        mixing = Mixing(ledger)
        follower.reported.append(mixing.report)
        await stack.pair()
        replicas = [pod(f"r{at}").asking(mib=4096).annotated(placement="spread") for at in range(REPLICAS)]
        await stack.api.create(PODS, map(pod_object, replicas))
        await follower.until(
            lambda: any(map(is_refused, ledger.waiting())), "one has waited for its scheduling cycle in vain"
        )
        follower.reported.append(kubelet.report)
        for one in ledger.bound():
            kubelet.report("MODIFIED", one)
        await follower.until(lambda: len(ledger.held) == REPLICAS, "all of them are bound")
        gpus = Counter(gpu for uid in ledger.held for gpu in ledger.gpus_of(uid))
    assert sorted(gpus.values()) == [REPLICAS // 2, REPLICAS // 2]
    assert mixing.could == []
    assert ledger.wrong == []
