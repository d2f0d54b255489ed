"""Processes that start in running containers while the arbiter is killed, and while Tangram is upgraded: they wait, and none fails."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hack.waiting import eventually
from tests.e2e.cluster import Cluster, runs_in_a_container
from tests.e2e.objects import share
from tests.signals import send_signal

PROCESSES, CONTAINERS = 200, 4
KILLS, KILL_WAITS_S = 20, 10.0
UPGRADES, UPGRADE_WAITS_S = 3, 30.0
STARTER = """
import json, pathlib, subprocess, time
least, took = {least}, []
while len(took) < least or not pathlib.Path("/tmp/over").exists():
    began = time.monotonic()
    ended = subprocess.run(["gpuview", "grab", "1Gi"], capture_output=True, text=True)
    took.append([ended.returncode, time.monotonic() - began, ended.stdout + ended.stderr if ended.returncode else ""])
    time.sleep({pause_s})
print(json.dumps(took))
"""
"""In a container: processes one after the other, so many at least and until there is the file. How each ended, and after how long."""


class Started:
    """What the processes of all containers came to."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float, str]] = []

    def must_have_waited_at_most(self, seconds: float) -> None:
        waits = sorted(took for _, took, _ in self.ends)
        print(f"{len(waits)} processes: p50 {waits[len(waits) // 2]:.2f} s, most {waits[-1]:.2f} s")
        assert len(waits) >= PROCESSES
        assert [end for end in self.ends if end[0]] == []
        assert waits[-1] <= seconds


@contextmanager
def processes_start(cluster: Cluster, namespace: str, *, pause_s: float) -> Iterator[Started]:
    """Meanwhile, in four containers."""
    names, started = [f"busy{at}" for at in range(CONTAINERS)], Started()
    cluster.run(namespace, *(share(name, 2) for name in names))
    code = STARTER.format(least=PROCESSES // CONTAINERS, pause_s=pause_s)
    printed: dict[str, str] = {}

    def run(name: str) -> None:
        printed[name] = cluster.exec(namespace, name, "python3", "-c", code)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield started
    finally:
        for name in names:
            cluster.exec(namespace, name, "touch", "/tmp/over")
        for thread in threads:
            thread.join()
    assert sorted(printed) == names
    started.ends = [(code, took, output) for name in names for code, took, output in json.loads(printed[name])]


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


@pytest.mark.timeout(900)
def test_no_process_fails_or_waits_long_while_tangram_is_upgraded_three_times(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("steady", 2))
    (before,) = cluster.pod(namespace, "steady")["status"]["containerStatuses"]
    with processes_start(cluster, namespace, pause_s=0.3) as started:
        for at in range(UPGRADES):
            cluster.upgrade({"podAnnotations": {"upgraded": f"time-{at}"}})
    started.must_have_waited_at_most(UPGRADE_WAITS_S)
    (after,) = cluster.pod(namespace, "steady")["status"]["containerStatuses"]
    assert (after["state"]["running"], after["restartCount"]) == (before["state"]["running"], 0)
    cluster.run(namespace, share("next", 2))
    assert cluster.sees(namespace, "next") == cluster.assigned(namespace, "next")
