"""Pods a second of a real kube-scheduler, alone and with the extender, and what each pod costs the API server.

etcd (without fsync), kube-apiserver, kube-scheduler as the chart configures it (all nodes are looked at) and the extender are processes
of this machine; nodes with 8 GPUs are objects. All pods are there before kube-scheduler starts, so that nothing but scheduling is
measured: the time is that between its first tenth and its last, by its own metrics, asked four times a second. `alone` is the same
configuration without the extender: pods are placed by the node's totals and no GPU is chosen. `ahead` is with the extender, which
nominates waiting pods early where it finds that faster (`vgpu.scheduling.nominate_pacing`). `floor` is with the least that an extender can do: floor/, in Go, reads a filter call
without a look at it, answers with one node, and binds nothing. No extender can be faster without nominating. All may call the API server as often as they like, where kube-scheduler's default of 50
calls a second would be all that is seen. Processor time is that of the two programs, a pod.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.process import cpu_s
from bench.scheduler.stage import staged
from tests.apiserver import ApiServer, Program, running
from tests.builders import node, pod
from tests.integration.extender.scheduling import ApiCalls, SchedulerPair, Stack, node_object, pod_object
from tests.ports import free_port

GPUS: Final = 8
SIZES_MIB: Final = (4_096, 8_192, 10_240, 16_384, 24_576, 40_960)
NOT_OF_THE_FLOOR: Final = ("bindVerb", "preemptVerb", "prioritizeVerb")
REQUESTED_EACH_S: Final = 0.25
WRITES: Final = ("POST", "PUT", "PATCH", "DELETE")
SCHEDULED: Final = re.compile(r'scheduler_schedule_attempts_total\{.*result="scheduled"\} (\d+)')
REQUESTS: Final = re.compile(r"apiserver_request_total\{(.*)\} ([\d.e+]+)")
LABEL: Final = re.compile(r'(\w+)="([^"]*)"')

Point = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured."""

    mode: str
    nodes: int
    pods: int
    pods_a_second: float
    scheduler_cpu_ms: float
    """A pod."""
    extender_cpu_ms: float
    api_cpu_ms: float
    """Of the API server and etcd, a pod."""
    writes: str
    """API writes a pod, by verb and resource."""
    load: float
    """Of the machine when it began."""


def measure(programs: dict[str, Path], folder: Path, mode: str, nodes: int, pods: int) -> Run:
    """One run, from an empty API server to the last pod."""
    folder.mkdir(parents=True)
    with running(programs, folder) as server:
        return asyncio.run(_measure(programs, server, folder, mode, nodes, pods))


async def _measure(programs: dict[str, Path], server: ApiServer, folder: Path, mode: str, nodes: int, pods: int) -> Run:
    built = (node(f"node-{at:05}").with_gpus(GPUS) for at in range(nodes))
    asking = (pod(f"p{at:05}").asking(mib=SIZES_MIB[at % len(SIZES_MIB)], core=10 * (at % 4)) for at in range(pods))
    with ExitStack() as ends:
        async with staged(programs, server, folder, map(node_object, built), map(pod_object, asking)) as stack:
            load, before = os.getloadavg()[0], await _writes(stack.api)
            if mode == "floor":
                pair, extender = _with_floor(stack, programs["floor"], folder, nodes, ends)
            else:
                pair = await stack.pair(alone=mode == "alone", ahead="auto" if mode == "ahead" else "never")
                extender = [pair.extender.pid] if pair.extender else []
            its = {"scheduler": [pair.pid()], "extender": extender, "api": server.pids()}
            started = {name: sum(map(cpu_s, pids)) for name, pids in its.items()}
            points = await _watch(stack, pair, pods)
            spent = {name: (sum(map(cpu_s, pids)) - started[name]) * 1000 / pods for name, pids in its.items()}
            writes = await _writes(stack.api) - before
    return Run(
        mode, nodes, pods, round(rate(points, pods), 1), *(round(ms, 2) for ms in spent.values()),
        " ".join(f"{what}={count / pods:.2f}" for what, count in writes.most_common() if count >= pods // 20),
        round(load, 1),
    )  # fmt: skip


def _with_floor(
    stack: Stack, executable: Path, folder: Path, nodes: int, ends: ExitStack
) -> tuple[SchedulerPair, list[int]]:
    """kube-scheduler with the program of floor/, and that one's process."""
    port, secure_port = free_port(), free_port()
    command = ["floor", f"--address=127.0.0.1:{port}", f"--nodes={nodes}"]
    floor = ends.enter_context(Program(command, folder / "floor.log", executable))
    assert floor.process is not None
    configuration, _ = stack.configured({})
    extender = configuration["extenders"][0]
    configuration["extenders"] = [extender]
    extender["urlPrefix"] = f"http://127.0.0.1:{port}"
    for verb in NOT_OF_THE_FLOOR:
        extender.pop(verb, None)
    pair = SchedulerPair(stack.scheduler(configuration, secure_port), None, secure_port)
    stack.pairs.append(pair)
    return pair, [floor.process.pid]


async def _watch(stack: Stack, pair: SchedulerPair, pods: int) -> list[Point]:
    """(seconds, pods scheduled) until all are."""
    points: list[Point] = []
    while not points or points[-1][1] < pods:
        try:
            found = SCHEDULED.search(await stack.scheduler_metrics(pair))
        except OSError:  # it does not listen yet
            found = None
        points.append((time.monotonic(), int(found[1]) if found else 0))
        await asyncio.sleep(REQUESTED_EACH_S)
    return points


def rate(points: list[Point], pods: int) -> float:
    """Pods a second between the first point with a tenth of them and the first with all but a tenth."""
    (begin, few), (end, most) = (next(one for one in points if one[1] >= pods * part) for part in (0.1, 0.9))
    return (most - few) / (end - begin) if end > begin else float("inf")


async def _writes(api: ApiCalls) -> Counter[str]:
    """`VERB resource/subresource` -> calls that the API server has had, but for leases."""
    async with api.session.get("/metrics") as answer:
        text = await answer.text()
    counts: Counter[str] = Counter()
    for labels, count in REQUESTS.findall(text):
        one = dict(LABEL.findall(labels))
        if one["verb"] in WRITES and one["resource"] != "leases":
            what = "/".join(filter(None, (one["resource"], one["subresource"])))
            counts[f"{one['verb']}:{what}"] += int(float(count))
    return counts
