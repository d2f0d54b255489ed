"""How long kube-scheduler waits for the choice of victims, and how long filter and bind take beside it, over HTTP.

A `tangram-extender` process lists full nodes of 8 GPUs with 8 pods each, which request CPU and memory too, and some empty ones. One connection calls
/preempt for one pod after another; kube-scheduler proposes two pods of each node, as it does by totals. Beside it another connection has pods placed on
the empty nodes and bound, all the time. `idle` is the same without /preempt, on the same machine before. A call is measured from the first byte sent to the last byte read.

`budgets_ms` is what disruption budgets add for one node: which ones its 64 pods count in and what each still allows, of a run of 100.

    python -m bench.extender.preempt [--nodes 100 1000 --calls 100]        writes preempt.csv beside this file
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.calls import Kept, posted
from bench.extender.filter import NAME, ready, start_extender
from bench.process import memory_mib
from extender.preemption.disruption_budgets import DisruptionBudgets
from kube.objects import PodDisruptionBudget
from tests.builders import NodeBuilder, PodBuilder, node, pod, share
from tests.fake_api import FakeApi

HERE = Path(__file__).parent
FILE = HERE / "preempt.csv"
START_LIMIT_S = 240
GPUS = PODS_A_GPU = 8
GPU_MIB = 81_920
POD_MIB = GPU_MIB // PODS_A_GPU
FREE_NODES = 40
NAMESPACES = 20
APPS = 100
"""Of each namespace, one budget for each where there are budgets."""
IDLE_CALLS = 400
EACH_S = 0.01
"""From one pod to the next that is filtered and bound."""
MEETS_S = 0.05
"""For the extender's watch to receive a preemptor, which the call would wait for."""
CLASSES = ("standard", "standard", "standard", "best-effort", "latency-critical")
REQUESTS: dict[str, Callable[[PodBuilder], PodBuilder]] = {
    "share": lambda built: built.asking(mib=2 * POD_MIB, core=20, cpu="4", memory="8Gi"),
    "two GPUs": lambda built: built.asking(mib=4 * POD_MIB, cpu="4").annotated(gpu_count="2"),
    "whole": lambda built: built.asking(gpus=1, cpu="16"),
}
RUNS = (("share", 0), ("two GPUs", 0), ("whole", 0), ("share", 2_000))
"""What is requested, and disruption budgets; those stay."""
SWITCH_S = 0.0005
"""Threads of this process stand for programs of their own."""
SETTLES_S = 2.0
"""For the extender's watch to receive the budgets."""


def full(one: NodeBuilder, number: int, random_: random.Random) -> Iterator[dict[str, Any]]:
    """The pods of a full node."""
    for at in range(GPUS * PODS_A_GPU):
        namespace, app = f"team-{random_.randrange(NAMESPACES)}", f"app-{random_.randrange(APPS)}"
        built = pod(f"old-{number}-{at}", namespace).labelled(app=app).of_priority(random_.randrange(4))
        built = built.asking(mib=POD_MIB, core=12, cpu=random_.choice(("1", "2", "2500m")), memory="4Gi")
        built = built.annotated(**{"class": random_.choice(CLASSES)})
        built = built.on(one.name).assigned(share(one.gpus[at % GPUS], POD_MIB, 12)).with_phase("Running")
        plain = built.plain()
        plain["status"]["startTime"] = f"2026-01-{random_.randint(1, 28):02}T{random_.randrange(24):02}:00:00Z"
        yield plain


def budgets(count: int) -> list[dict[str, Any]]:
    return [
        {
            "metadata": {"name": f"b-{at}", "namespace": f"team-{at % NAMESPACES}", "uid": f"uid-b-{at}"},
            "spec": {"selector": {"matchLabels": {"app": f"app-{at // NAMESPACES % APPS}"}}},
            "status": {"disruptionsAllowed": at % 3},
        }
        for at in range(count)
    ]


def called(kept: Kept, path: str, body: bytes) -> tuple[float, Any]:
    """Milliseconds, and the answer."""
    request = posted(path, body)
    started = time.perf_counter()
    _, answer = kept.send(request)
    return (time.perf_counter() - started) * 1000, json.loads(answer)


class Cluster:
    """The API server's objects, to be changed from threads, and the extender's port."""

    def __init__(self, api: FakeApi, loop: asyncio.AbstractEventLoop, port: int, names: list[str]) -> None:
        self._api, self._loop, self.port, self.names = api, loop, port, names
        self._placed = 0

    def reported(self, change: Callable[[dict[str, Any]], object], thing: dict[str, Any]) -> None:
        """The API server carries out a change."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (change(thing), done.set()))
        assert done.wait(10)

    def place_pods(self, goes_on: Callable[[int], bool]) -> tuple[list[float], list[float]]:
        """Filter and bind one pod after the other. Returns how long each call took."""
        filtered, bound, at = list[float](), list[float](), 0
        names = json.dumps(self.names, separators=(",", ":"))
        connection = Kept(self.port)
        connection.open()
        while goes_on(at):
            began, at, self._placed = time.perf_counter(), at + 1, self._placed + 1
            built = pod(f"new-{self._placed}").asking(mib=1024, cpu="100m")
            self.reported(self._api.put, built.plain())
            body = f'{{"Pod":{json.dumps(built.plain())},"Nodes":null,"NodeNames":{names}}}'
            took, answer = called(connection, "/filter", body.encode())
            filtered.append(took)
            assert answer["NodeNames"], answer["Error"]
            known = built.build()
            wanted = {
                "PodName": built.name,
                "PodNamespace": "default",
                "PodUID": known.uid,
                "Node": answer["NodeNames"][0],
            }
            took, answer = called(connection, "/bind", json.dumps(wanted).encode())
            bound.append(took)
            assert not answer["Error"], answer
            time.sleep(max(0.0, began + EACH_S - time.perf_counter()))
        connection.close()
        return filtered, bound

    def preempt(self, calls: list[tuple[dict[str, Any], bytes]]) -> list[float]:
        """One call after the other, each for another pod."""
        took, connection = list[float](), Kept(self.port)
        connection.open()
        for preemptor, body in calls:
            self.reported(self._api.put, preemptor)
            time.sleep(MEETS_S)
            ms, answer = called(connection, "/preempt", body)
            assert len(answer["NodeNameToMetaVictims"]) == 1, answer
            took.append(ms)
            self.reported(self._api.remove, preemptor)
        connection.close()
        return took


def preempting(
    requests: str, count: int, victims: dict[str, list[str]], calls: int, random_: random.Random
) -> list[tuple[dict[str, Any], bytes]]:
    """Pods and the calls for them. Written before anything is measured: this process, too, does one thing at a time."""
    made = []
    for at in range(calls + 1):
        built = REQUESTS[requests](pod(f"urgent-{requests.replace(' ', '-').lower()}-{count}-{at}")).of_priority(1000)
        proposed = {
            name: {"Pods": [{"UID": uid} for uid in random_.sample(uids, 2)], "NumPDBViolations": 0}
            for name, uids in victims.items()
        }
        body = {"Pod": built.plain(), "NodeNameToVictims": None, "NodeNameToMetaVictims": proposed}
        made.append((built.plain(), json.dumps(body, separators=(",", ":")).encode()))
    return made


async def measure(nodes: int, calls: int) -> list[dict[str, object]]:
    random_ = random.Random(7)
    rows = []
    async with FakeApi() as api:
        built = [node(NAME.format(at // 250, at % 250)).with_gpus(GPUS) for at in range(nodes + FREE_NODES)]
        victims: dict[str, list[str]] = {}
        for at, one in enumerate(built):
            api.put(one.plain() | {"status": {"allocatable": {"cpu": "192"}}})
            pods = list(full(one, at, random_)) if at < nodes else []
            for thing in pods:
                api.put(thing)
            if pods:
                victims[one.name] = [thing["metadata"]["uid"] for thing in pods]
        process, port, metrics_port = start_extender(api.port)
        try:
            await asyncio.wait_for(ready(metrics_port), START_LIMIT_S)
            await asyncio.sleep(2)  # budgets are read after the pods
            cluster = Cluster(api, asyncio.get_running_loop(), port, [one.name for one in built])
            idle = await asyncio.to_thread(cluster.place_pods, calls_so_many(IDLE_CALLS))
            for requests, count in RUNS:
                for thing in budgets(count):
                    api.put(thing | {"kind": "PodDisruptionBudget"})
                await asyncio.sleep(SETTLES_S)
                rows.append(await beside_each_other(nodes, calls, cluster, victims, requests, count, idle, random_))
                rows[-1]["rss_mib"] = int(memory_mib(process.pid))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            process.terminate()
            process.wait()
    return rows


def calls_so_many(count: int) -> Callable[[int], bool]:
    return lambda at: at < count


async def beside_each_other(
    nodes: int, calls: int, cluster: Cluster, victims: dict[str, list[str]], requests: str, count: int,
    idle: tuple[list[float], list[float]], random_: random.Random,
) -> dict[str, object]:  # fmt: skip
    """Preempt calls, and filter and bind calls until those have ended."""
    made = preempting(requests, count, victims, calls, random_)
    ended, load = threading.Event(), os.getloadavg()[0]
    placing = asyncio.create_task(asyncio.to_thread(cluster.place_pods, lambda _: not ended.is_set()))
    took = await asyncio.to_thread(cluster.preempt, made)
    ended.set()
    return row(nodes, requests, count, took, idle, await placing, load)


def row(
    nodes: int, requests: str, count: int, took: list[float], idle: tuple[list[float], list[float]],
    beside: tuple[list[float], list[float]], load: float,
) -> dict[str, object]:  # fmt: skip
    first, *others = took
    figures: dict[str, object] = {"first_ms": round(first, 1)}
    for name, of in (
        ("", others), ("filter_", beside[0]), ("bind_", beside[1]), ("idle_filter_", idle[0]), ("idle_bind_", idle[1]),
    ):  # fmt: skip
        figures |= {f"{name}p{q}_ms": round(float(np.percentile(of, q)), 2) for q in (50, 99)}
    return {
        "nodes": nodes, "gpus_a_node": GPUS, "pods_a_gpu": PODS_A_GPU, "requests": requests, "budgets": count, "calls": len(others),
        **figures, "placed_beside": len(beside[0]), "budgets_ms": round(of_one_node(count), 2), "rss_mib": 0,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f} at the start",
        "date": datetime.now(UTC).date().isoformat(), "commit": commit(),
    }  # fmt: skip


def of_one_node(count: int) -> float:
    """Milliseconds for the budgets of one node's pods, the 99th of 100."""
    known, took = DisruptionBudgets(), []
    for plain in budgets(count):
        known.changed(None, msgspec.convert(plain, PodDisruptionBudget))
    random_ = random.Random(7)
    pods = [pod(f"p{at}", f"team-{random_.randrange(NAMESPACES)}").labelled(app=f"app-{random_.randrange(APPS)}").build() for at in range(64)]  # fmt: skip
    for _ in range(100):
        started = time.perf_counter()
        for one in pods:
            known.of(one)
        known.headroom()
        took.append((time.perf_counter() - started) * 1000)
    return float(np.percentile(took, 99))


def commit() -> str:
    reported = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return reported.stdout.strip()


def main() -> int:
    """Measure and write the CSV."""
    sys.setswitchinterval(SWITCH_S)
    parser = argparse.ArgumentParser(prog="bench.extender.preempt", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[100, 1_000])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--no-csv", dest="keep", action="store_false", help="only print")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = [
        row for nodes in arguments.nodes for row in asyncio.run(measure(nodes, arguments.calls))
    ]
    if arguments.keep:
        others = [one for one in written() if int(one["nodes"]) not in arguments.nodes]
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted([*others, *rows], key=lambda one: int(str(one["nodes"]))))
    return 0


def written() -> list[dict[str, str]]:
    """Rows of before: a run for some numbers of nodes leaves the others."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    raise SystemExit(main())
