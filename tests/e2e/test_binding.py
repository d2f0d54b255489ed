"""The one write that binds a pod, interrupted where it hurts most."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gate import gate
from tests.e2e.gpus import UNITS
from tests.e2e.objects import share

EXTENDER = "tangram-extender"


def test_an_extender_killed_between_filter_and_bind_keeps_nothing(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with gate(cluster.kubectl, namespace, "caught", tmp_path) as held:
        cluster.create(namespace, share("caught", UNITS))
        held.wait()
        cluster.signal_program(EXTENDER, signal.SIGKILL)
        held.deny()
        cluster.ready(namespace, "caught", timeout_s=120)
    cluster.run(namespace, share("other", UNITS))
    assert cluster.sees(namespace, "caught") == cluster.assigned(namespace, "caught")
    assert cluster.sees(namespace, "other") == cluster.assigned(namespace, "other")
    assert cluster.sees(namespace, "caught") != cluster.sees(namespace, "other")


@pytest.mark.parametrize("then", ["killed", "late"])
def test_a_binding_whose_reply_is_lost_counts_once(cluster: Cluster, namespace: str, tmp_path: Path, then: str) -> None:
    """The extender is stopped while its write is held. The write happens; the extender dies, or wakes when its caller is gone."""
    with gate(cluster.kubectl, namespace, "lost", tmp_path) as held:
        cluster.create(namespace, share("lost", UNITS))
        held.wait()
        cluster.signal_program(EXTENDER, signal.SIGSTOP)
        held.allow()
        eventually(lambda: cluster.pod(namespace, "lost")["spec"].get("nodeName"), "the write happened")
        if then == "late":
            eventually(
                lambda: any("FailedScheduling" in e for e in cluster.events(namespace, "lost")),
                "the scheduler gave up waiting for the extender",
            )
        cluster.signal_program(EXTENDER, signal.SIGCONT if then == "late" else signal.SIGKILL)
    cluster.ready(namespace, "lost", timeout_s=120)
    cluster.run(namespace, share("other", UNITS), timeout_s=120)
    assert cluster.sees(namespace, "lost") == cluster.assigned(namespace, "lost")
    assert cluster.sees(namespace, "lost") != cluster.sees(namespace, "other")
    cluster.create(namespace, share("third", 1))
    eventually(
        lambda: any("FailedScheduling" in e for e in cluster.events(namespace, "third")), "both GPUs count as full"
    )
