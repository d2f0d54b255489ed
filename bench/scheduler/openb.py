"""The openb trace through the real kube-scheduler and the extender, beside the same arrivals in the simulation.

Nodes are objects with the trace's processors, memory and GPUs; a thousandth of a GPU is one unit of gpu-mem. The pods that a seed draws
are all created before kube-scheduler starts, named in the order of their arrival, which is the order in which it takes them. It has
them all tried when each is bound or reported to fit nowhere; none ends.

Pods that request no GPU make a difference: by itself kube-scheduler puts them where most processors and memory are, so that GPUs
elsewhere run out of processors; the published protocol has them go where the fewest GPUs are left, and so has the extender, as far as the
chart's `spareWeight` lets it. The simulation is made the same way as the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from bench.scheduler.stage import PODS, staged
from tests.apiserver import ApiServer, running
from tests.builders import NodeBuilder, pod, uuid_of
from tests.integration.extender.scheduling import ApiCalls, Thing, node_object, pod_object
from vgpu.api.inventory import Gpu
from vgpu.scheduling.simulate import Bare, Numbers, SimulatedCluster, arrivals, least_gpu, replay
from vgpu.scheduling.workload import Host, Job, read_nodes, read_pods

UNIT_MIB: Final = 1024
LOOK_S: Final = 5.0
"""Between looks at what is bound: one takes a second of the API server's time."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one seed."""

    pods_list: str
    policy: str
    seed: int
    nodes: int
    pods: int
    without_gpu: int
    """Of those."""
    bound: int
    allocation: float
    """Percent of the GPUs, when the pods that arrived request all of them."""
    spare_weight: int | None
    """The chart's `scheduler.extender.spareWeight`; None: its default."""
    simulated: float
    """With pods without a GPU where the fewest GPUs are left; without a weight, as kube-scheduler places them."""
    took_s: float


def measure(
    programs: dict[str, Path],
    folder: Path,
    data: Path,
    pods_list: str,
    policy: str,
    seed: int,
    *,
    gpu_only: bool,
    spare_weight: int | None = None,
) -> Run:
    """One seed, from an empty API server on. `gpu_only`: the list's pods without a GPU are left out, in the simulation too."""
    folder.mkdir(parents=True)
    hosts = read_nodes((data / "openb_node_list_gpu_node.csv").read_text(), "nodes")
    jobs = read_pods((data / f"openb_pod_list_{pods_list}.csv").read_text(), pods_list, policy)
    if gpu_only:
        jobs = [job for job in jobs if job.request]
    capacity = sum(gpu.mib for host in hosts for gpu in host.inventory.gpus)
    come = arrivals(jobs, seed, capacity, 1.0)
    with running(programs, folder) as server:
        bound, took_s = asyncio.run(_schedule(programs, server, folder, hosts, come, spare_weight))
    placed = sum(come[number].gpu_mib for number in bound)
    bare = least_allocated(hosts) if spare_weight == 0 else least_gpu
    simulated = replay(hosts, jobs, seed, 1.0, bare=bare).at(100).allocation
    return Run(
        pods_list, policy, seed, len(hosts), len(come), sum(not job.request for job in come), len(bound),
        round(100 * placed / capacity, 2), spare_weight, round(simulated, 2), round(took_s, 1),
    )  # fmt: skip


def least_allocated(hosts: Sequence[Host]) -> Bare:
    """The host with most left, processors and memory weighing the same: NodeResourcesFit's default (Kubernetes 1.36, least_allocated.go)."""
    has = {host.name: (host.cpu_milli, host.memory_mib) for host in hosts}

    def choose(cluster: SimulatedCluster, job: Job, fit: Numbers) -> int:
        cpu_milli, memory_mib = np.array([has[name] for name in cluster.names[fit]]).T
        left = (cluster.cpu_milli[fit] - job.cpu_milli) / cpu_milli
        left += (cluster.memory_mib[fit] - job.memory_mib) / memory_mib
        return int(fit[np.argmax(left)])

    return choose


async def _schedule(
    programs: dict[str, Path],
    server: ApiServer,
    folder: Path,
    hosts: Sequence[Host],
    come: Sequence[Job],
    spare_weight: int | None,
) -> tuple[list[int], float]:
    """Numbers of the pods that are bound in the end; seconds."""
    pods = (as_pod(job, at) for at, job in enumerate(come))
    async with staged(programs, server, folder, map(as_node, hosts), pods) as stack:
        started = time.monotonic()
        await stack.pair(spare_weight=spare_weight)
        return await _all_tried(stack.api, len(come)), time.monotonic() - started


async def _all_tried(api: ApiCalls, count: int) -> list[int]:
    with Progress() as progress:
        tried = progress.add_task("pods tried", total=count)
        while True:
            await asyncio.sleep(LOOK_S)
            pods = (await api.call("GET", f"{PODS}?resourceVersion=0"))["items"]
            bound = [int(one["metadata"]["name"][1:]) for one in pods if one["spec"].get("nodeName")]
            refused = sum(_is_refused(one) for one in pods)
            progress.update(tried, completed=len(bound) + refused)
            if len(bound) + refused == count:
                return bound


def _is_refused(one: dict[str, Any]) -> bool:
    """Was it reported to fit nowhere?"""
    conditions = one["status"].get("conditions", [])
    return "nodeName" not in one["spec"] and any(
        c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions
    )


def as_node(host: Host) -> Thing:
    """A host of the trace."""
    gpus = tuple(Gpu(uuid_of(c.uuid), c.index, c.model, c.mib * UNIT_MIB, minor=c.index) for c in host.inventory.gpus)
    made = node_object(replace(NodeBuilder(host.name), gpus=gpus, unit_mib=UNIT_MIB))
    made["status"]["allocatable"] |= {"cpu": f"{host.cpu_milli}m", "memory": f"{host.memory_mib}Mi"}
    made["status"]["capacity"] = made["status"]["allocatable"]
    return made


def as_pod(job: Job, at: int) -> Thing:
    """A pod of the trace, as the webhook would leave it."""
    built = pod(f"p{at:05}").annotated(placement=job.request.policy)
    if job.request:
        (part,) = job.request.containers
        built = built.asking(mib=job.gpu_mib * UNIT_MIB).annotated(gpu_count=str(part.gpus))
    if job.request.models:
        built = built.annotated(gpu_model=",".join(sorted(job.request.models)))
    made = pod_object(built if job.request else replace(built, annotations={}))
    (main,) = made["spec"]["containers"]
    resources = main.setdefault("resources", {})
    resources["requests"] = resources.get("requests", {}) | {
        "cpu": f"{job.cpu_milli}m",
        "memory": f"{job.memory_mib}Mi",
    }
    return made
