"""The fault matrix on a real node: after any fault of any part, at any step of a pod's life, in the end everything runs.

After each round every invariant is looked at (`tests.e2e.matrix.invariants`). CI runs some of the table's cells; `make faults` runs
all of them, ROUNDS= at most, in the order of SEED=.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.matrix import node
from tests.e2e.matrix.harm import harm
from tests.e2e.matrix.invariants import broken, grant_directories_are_never_reused
from tests.e2e.matrix.life import Stage
from tests.e2e.matrix.look import look
from tests.e2e.matrix.pods import BUSY, priority_class
from tests.e2e.matrix.table import Round, rounds
from tests.e2e.matrix.watch import Watch

EVERYTHING = bool(os.environ.get("TANGRAM_MATRIX_ROUNDS"))
SEED = int(os.environ.get("TANGRAM_FAULT_SEED", "1"))
ROUNDS = rounds(SEED, everything=EVERYTHING)[: int(os.environ.get("TANGRAM_MATRIX_ROUNDS", "1000"))]
AWAY = {("arbiter", "kill"), ("arbiter", "stop"), ("supervisor", "kill")}
"""Rows in which the arbiter is away, and I7 counts."""


@pytest.fixture(scope="module")
def stage(cluster: Cluster) -> Iterator[Stage]:
    made = Stage(cluster, "e2e-matrix", random.Random(SEED))
    made.build()
    yield made
    cluster.drop_namespaces(made.namespace)
    cluster.kubectl("delete", "priorityclass", priority_class()["metadata"]["name"])


@pytest.fixture(scope="module")
def history() -> dict[str, str]:
    """Grant directory -> UID of its pod."""
    return {}


@pytest.mark.parametrize("one", ROUNDS, ids=[one.name for one in ROUNDS])
def test_in_the_end_everything_runs_and_no_invariant_is_violated(
    stage: Stage, history: dict[str, str], one: Round
) -> None:
    stage.begin(one.step)
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    residents = stage.undisturbed()
    watch = Watch(stage.inventory)
    with watch.watching():
        fault = functools.partial(harm, stage.cluster, stage.namespace, one.row)
        if one.row.preempts and one.step == "placing":
            stage.preempt(fault)
        else:
            stage.meet(one.step, fault)
        began_s = time.monotonic()
        stage.settle(one.row.within_s)
    print(f"everything runs {time.monotonic() - began_s:.1f} s after the fault")
    busy = {p.pid for p in node.gpu_processes() if p.grant is not None and p.grant.pod.startswith(f"{BUSY}-")}
    rest_s = max((s for pid, s in watch.longest_rest_s.items() if pid in busy), default=0.0)
    longest = {BUSY: rest_s} if (one.row.part, one.row.fault) in AWAY else {}
    assert stage.undisturbed() == residents or one.row.replaced
    assert sorted(watch.broken) == [], "while the fault lasted"
    assert one.row.reason in {"", *watch.reasons}
    wrong = ["not looked at"]
    until_s = time.monotonic() + one.row.report_s
    while wrong:
        seen = look(stage.cluster, stage.namespace, longest_rest_s=longest, since=since)
        wrong = [*broken(seen), *grant_directories_are_never_reused(seen, history)]
        if time.monotonic() > until_s:
            break
    if one.row.replaced:
        stage.renew()
    assert wrong == []
