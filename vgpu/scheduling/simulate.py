"""Replay a workload through `placement`, and write down how full the GPUs get.

The protocol is the one that the openb figures were published with: nodes empty; pods shuffled by the seed, then pods drawn at
random appended until what arrives requests `arrive` times the capacity; placed one by one, and none leaves. A node is a
candidate when its host has the CPU and memory, as kube-scheduler sees to; GPUs are `placement`'s business alone. A pod without
a GPU goes to the host with least GPU left, then with least CPU left: no policy's choice, and the same for all of them.

It knows no files, no clock and no terminal. Amounts of GPU are memory, in percent of the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.arrays import GpuArrays
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place
from vgpu.scheduling.workload import Host, Job

Progress = Callable[[float], None]
Numbers: TypeAlias = npt.NDArray[np.intp]
Bare: TypeAlias = "Callable[[SimulatedCluster, Job, Numbers], int]"
"""Chooses among hosts that have the CPU and memory, by number."""


@dataclass(frozen=True, slots=True)
class Point:
    """One moment, in percent of the capacity."""

    arrived: int
    allocation: float
    fragmentation: float
    """Idle, and not usable by the next pod, expected over the pods seen so far."""


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One seed."""

    seed: int
    points: tuple[Point, ...]
    """At every whole percent that arrived."""

    def at(self, percent: int) -> Point:
        """The moment when this much had arrived, or the last one before."""
        return max((point for point in self.points if point.arrived <= percent), key=lambda point: point.arrived)


@dataclass
class SimulatedCluster:
    """Hosts and their GPUs, and what is free on both."""

    hosts: Sequence[Host]
    bare: Bare
    """Where a pod without a GPU is placed."""
    fleet: Fleet = field(default_factory=Fleet)

    def __post_init__(self) -> None:
        for host in self.hosts:
            self.fleet.set_node(host.name, host.inventory)
            self.fleet.set_cpu(host.name, host.cpu_milli)
        self.names = np.array([host.name for host in self.hosts], dtype=object)
        self.number = {host.name: at for at, host in enumerate(self.hosts)}
        self.cpu_milli = np.array([host.cpu_milli for host in self.hosts], np.int64)
        self.memory_mib = np.array([host.memory_mib for host in self.hosts], np.int64)
        self.gpu_mib = np.array([sum(gpu.mib for gpu in host.inventory.gpus) for host in self.hosts], np.int64)
        self.capacity_mib = int(self.gpu_mib.sum())

    def candidates(self, job: Job) -> Numbers:
        """Hosts that have the CPU and memory, by number."""
        return np.flatnonzero((self.cpu_milli >= job.cpu_milli) & (self.memory_mib >= job.memory_mib))

    def takes(self, job: Job) -> bool:
        """Does the pod fit some host now?"""
        fit = self.candidates(job)
        return bool(len(fit)) and (
            not job.request or isinstance(place(self.fleet, job.request, tuple(self.names[fit])), Placement)
        )

    def put(self, job: Job) -> bool:
        """Place a pod where it fits. Returns whether it did."""
        fit = self.candidates(job)
        if not len(fit):
            return False
        if job.request:
            found = place(self.fleet, job.request, tuple(self.names[fit]))
            if not isinstance(found, Placement):
                return False
            at = self.number[found.node]
            for assigned in found.assignment.held():
                self.fleet.debit(found.node, assigned)
            self.gpu_mib[at] -= job.gpu_mib
        else:
            at = self.bare(self, job, fit)
        self.cpu_milli[at] -= job.cpu_milli
        self.memory_mib[at] -= job.memory_mib
        self.fleet.set_cpu(self.hosts[at].name, int(self.cpu_milli[at]))
        return True

    def fragmentation(self) -> float:
        """Percent of the capacity that is idle and not usable by the next pod."""
        fleet = self.fleet
        gpus = GpuArrays(fleet.free_mib, fleet.free_percent, fleet.total_mib, fleet.model, fleet.free_cpu_milli)
        return 100 * float(fleet.distribution.unusable(gpus).sum()) / np.count_nonzero(fleet.total_mib)


def least_gpu(cluster: SimulatedCluster, _: Job, fit: Numbers) -> int:
    """The host with least GPU left, then with least CPU left, then the first."""
    return int(fit[np.lexsort((cluster.cpu_milli[fit], cluster.gpu_mib[fit]))[0]])


def arrivals(jobs: Sequence[Job], seed: int, capacity_mib: int, arrive: float) -> list[Job]:
    """The pods in the order of their arrival, until they request `arrive` times the capacity."""
    random = np.random.default_rng(seed)
    order: npt.NDArray[np.int64] = random.permutation(len(jobs))
    waiting: list[Job] = []
    requested = 0
    for number in order.tolist():
        if requested >= arrive * capacity_mib:
            return waiting
        waiting.append(jobs[number])
        requested += jobs[number].gpu_mib
    while requested < arrive * capacity_mib:
        waiting.append(jobs[int(random.integers(len(jobs)))])
        requested += waiting[-1].gpu_mib
    return waiting


def too_large(hosts: Sequence[Host], jobs: Sequence[Job]) -> list[str]:
    """Names of the pods that no host would take if it were empty, in the order of `jobs`."""
    empty, fits = SimulatedCluster(hosts, least_gpu), {}
    for job in jobs:
        size = job.cpu_milli, job.memory_mib, job.request
        if size not in fits:  # many pods are alike
            fits[size] = empty.takes(job)
    return [job.name for job in jobs if not fits[job.cpu_milli, job.memory_mib, job.request]]


def replay(
    hosts: Sequence[Host],
    jobs: Sequence[Job],
    seed: int,
    arrive: float,
    progress: Progress = lambda _: None,
    bare: Bare = least_gpu,
) -> SimulationRun:
    """One seed. `progress` gets the part done, 0 to 1, at every percent."""
    cluster = SimulatedCluster(sorted(hosts, key=lambda host: host.name), bare)
    capacity, points = cluster.capacity_mib, [Point(0, 0.0, 0.0)]
    arrived = placed = 0
    for job in arrivals(jobs, seed, capacity, arrive):
        cluster.fleet.record(job.request)
        arrived += job.gpu_mib
        if cluster.put(job):
            placed += job.gpu_mib
        if 100 * arrived // capacity > points[-1].arrived:
            now = 100 * arrived // capacity
            points.append(Point(now, 100 * placed / capacity, cluster.fragmentation()))
            progress(min(1.0, now / (100 * arrive)))
    return SimulationRun(seed, tuple(points))
