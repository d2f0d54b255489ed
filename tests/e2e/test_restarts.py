"""Processes that start in running containers while the arbiter is killed: they wait, and none fails."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hack.waiting import eventually
from tests.e2e.cluster import Cluster, runs_in_a_container
from tests.e2e.starting import processes_start
from tests.signals import send_signal

KILLS, KILL_WAITS_S = 20, 10.0


def arbiters() -> list[int]:
    """Pids, the one that serves first: its spare was started after it."""
    began: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if runs_in_a_container(folder, "arbiter"):
                began[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
    return sorted(began, key=began.__getitem__)


@pytest.mark.timeout(600)
def test_no_process_fails_or_waits_long_while_the_arbiter_is_killed_twenty_times(
    cluster: Cluster, namespace: str
) -> None:
    chance = random.Random(1)
    (pod,) = cluster.own_pods("node")
    before = cluster.pod("tangram-system", pod)["status"]["containerStatuses"]
    with processes_start(cluster, namespace, pause_s=0.1) as started:
        for _ in range(KILLS):
            time.sleep(1 + chance.random())
            serving = eventually(arbiters, "an arbiter runs")[0]
            send_signal(serving, signal.SIGKILL)
            eventually(lambda serving=serving: serving not in arbiters() and arbiters(), "another arbiter runs")
    started.must_have_waited_at_most(KILL_WAITS_S)
    after = cluster.pod("tangram-system", pod)["status"]["containerStatuses"]
    assert [one["restartCount"] for one in after] == [one["restartCount"] for one in before], "the container lived on"
