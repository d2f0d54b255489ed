"""One function for each invariant of the architecture: its violations in what was seen, as sentences. Pure.

Only tests call these. tests/unit/e2e/test_invariants.py plants a violation of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Final

from tests.e2e.matrix.seen import GpuProcess, Seen, SeenPod
from vgpu.api.contract import devices
from vgpu.api.grant import AssignedGpu
from vgpu.api.names import DEFAULT

PAGE_MIB: Final = 2
"""What the driver may count beyond a limit: it takes whole pages."""
SHARE_OVER: Final = 5.0
"""Percentage points that a share may pass its limit."""
SHARE_PART: Final = 0.5
"""Of its limit, a container with work has at least this. A busy machine starves the program that launches, so this is coarse."""
REST_S: Final = 1.0
"""I7."""
REST_SLACK_S: Final = 0.5
"""Sampling, a frame and a debt of a GPU-time limit. Guessed."""


def i1_no_gpu_is_given_away_twice(seen: Seen) -> Iterator[str]:
    """Memory and core over pods of the API, orphans, and processes that still run."""
    holders: dict[str, tuple[str, tuple[AssignedGpu, ...]]] = {
        pod.uid: (pod.key, pod.assignment.held()) for pod in seen.pods if pod.assignment and not pod.finished
    }
    for orphan in seen.inventory.orphans:
        holders.setdefault(orphan.uid, (orphan.key, orphan.held))
    for process in seen.processes:
        if process.grant is not None and process.uid not in holders:
            gpus = tuple(AssignedGpu(gpu.uuid, 0, gpu.mib, gpu.core_percent) for gpu in process.grant.gpus)
            holders[process.uid] = f"{process.grant.namespace}/{process.grant.pod}", gpus
    mib, core, keys = Counter[str](), Counter[str](), dict[str, list[str]]()
    for key, gpus in holders.values():
        for one in gpus:
            mib[one.uuid] += one.mib
            core[one.uuid] += one.core_percent
            keys.setdefault(one.uuid, []).append(key)
    for gpu in seen.inventory.gpus:
        if mib[gpu.uuid] > gpu.mib or core[gpu.uuid] > 100:
            yield (
                f"{gpu.uuid} has {mib[gpu.uuid]} MiB and {core[gpu.uuid]} % assigned to {', '.join(keys[gpu.uuid])}: it has {gpu.mib} MiB and 100 %"
            )


def i2_containers_see_their_gpus_alone(seen: Seen) -> Iterator[str]:
    """By CUDA's answers inside."""
    assigned = {pod.key: pod.assignment.held() for pod in seen.pods if pod.assignment is not None and not pod.finished}
    for tried in seen.tried:
        ought = {one.uuid.partition("-")[2] for one in assigned[tried.key]}
        if tried.sees != ought:
            yield f"{tried.key} sees {sorted(tried.sees)} and is assigned {sorted(ought)}"


def i3_the_kubelet_counts_as_the_extender(seen: Seen) -> Iterator[str]:
    """Device IDs in its checkpoint against the assignments. A difference that the metric reports is drift, which may be."""
    for pod in _with_assignment(seen):
        ought: Counter[tuple[str, str]] = Counter()
        for gpus in pod.assignment.containers.values() if pod.assignment else ():
            for one in gpus:
                ought[one.uuid, "gpu-mem"] += one.mib // seen.inventory.unit_mib
                ought[one.uuid, "gpu-core"] += one.core_percent
        counted = {(uuid, resource): n for (uid, resource, uuid), n in seen.kubelet.items() if uid == pod.uid}
        for key in counted.keys() | ought.keys() if pod.ready else ():
            if counted.get(key, 0) != ought[key] and (key[1], key[0]) not in seen.drift_metric:
                yield f"{pod.key}: the kubelet counts {counted.get(key, 0)} {key[1]} of {key[0]}, the assignment has {ought[key]}"


def i4_no_capacity_is_lost(seen: Seen) -> Iterator[str]:
    """The node offers all that it has, and pods that fill it to the last unit run."""
    for resource, ids in devices(seen.inventory, DEFAULT).items():
        if seen.allocatable.get(resource, 0) != len(ids):
            yield f"the node offers {seen.allocatable.get(resource, 0)} of {resource}: it has {len(ids)}"
    for gpu in seen.inventory.gpus:
        if not gpu.healthy:
            yield f"{gpu.uuid} is not healthy"
    for key in seen.waiting:
        yield f"{key} does not run, and what it requests is free"


def i5_nobody_is_evicted_in_vain(seen: Seen) -> Iterator[str]:
    """For each victim there is a preemptor that runs."""
    running = {pod.uid for pod in seen.pods if pod.ready}
    for one in seen.preemptions:
        if one.preemptor not in running:
            yield f"{one.victim} was evicted for pod UID {one.preemptor}, which does not run"


def i6_containers_stay_within_their_grants(seen: Seen) -> Iterator[str]:
    """By the driver's count, by allocations that were tried, and by GPU time."""
    held: Counter[tuple[str, str]] = Counter()
    for process in seen.processes:
        for uuid, mib in process.held_mib.items():
            held[process.grant_folder, uuid] += mib
    limits = {
        (process.grant_folder, gpu.uuid): gpu.mib
        for process in seen.processes
        if process.grant is not None
        for gpu in process.grant.gpus
    }
    for (folder, uuid), mib in held.items():
        if folder and mib > limits.get((folder, uuid), 0) + PAGE_MIB:
            yield f"grant {folder} uses {mib} MiB of {uuid}: its limit is {limits.get((folder, uuid), 0)} MiB"
    for tried in seen.tried:
        if "took" not in tried.within:
            yield f"{tried.key}: an allocation within its limit failed: {tried.within.strip()}"
        if "OUT_OF_MEMORY" not in tried.beyond:
            yield f"{tried.key}: an allocation beyond its limit was not refused: {tried.beyond.strip()}"
    for share in seen.shares:
        if not SHARE_PART * share.limit_percent <= share.percent <= share.limit_percent + SHARE_OVER:
            yield f"{share.key} had {share.percent:.1f} % of the GPU: its limit is {share.limit_percent} %"


def i7_nobody_stays_suspended_without_an_arbiter(seen: Seen) -> Iterator[str]:
    """Within 1 s of its death work goes on, and no memory is over-granted."""
    for key, rest_s in seen.longest_rest_s.items():
        if rest_s > REST_S + REST_SLACK_S:
            yield f"{key} did not run for {rest_s:.2f} s while the arbiter was away: at most {REST_S:g} s"
    for container in seen.status.containers:
        for gpu in container.gpus:
            if gpu.leased_bytes > gpu.limit_bytes:
                yield f"{container.pod} has {gpu.leased_bytes} bytes leased on {gpu.uuid}: its limit is {gpu.limit_bytes}"


def i8_nothing_is_silently_unlimited(seen: Seen) -> Iterator[str]:
    """Each process on a shared GPU is enforced, or its container has the reason: in status, metric and Event."""
    known = {container.uid: container for container in seen.status.containers}
    pods = {pod.uid: pod for pod in seen.pods}
    for process in seen.processes:
        if process.uid:
            yield from _i8_of(process, pods.get(process.uid), {p.pid for p in known[process.uid].processes} if process.uid in known else None)  # fmt: skip
    reported = {(container.pod, one.reason) for container in seen.status.containers for one in container.unenforced}
    if missing := sorted(reported - seen.unenforced_metric):
        yield f"no metric names {missing}, which the status does"
    for container in seen.status.containers:
        if container.unenforced and container.pod not in seen.unenforced_events:
            yield f"{container.pod} is unenforced ({', '.join(one.reason for one in container.unenforced)}) and has no Event"
        states = (container.memory_state, container.gpu_time_state)
        if ("unenforced" in states) != bool(container.unenforced):
            yield f"{container.pod} is {' and '.join(states)} and names {len(container.unenforced)} reasons"


def _i8_of(process: GpuProcess, pod: SeenPod | None, pids: set[int] | None) -> Iterator[str]:
    name = f"process {process.pid} of pod {pod.key if pod else process.uid}"
    if not process.has_library:
        yield f"{name} runs without the library"
    if process.grant is None:
        yield f"{name} has no grant in its file system"
        return
    if process.grant.uid != process.uid:
        yield f"{name} runs under the grant of pod UID {process.grant.uid}"
    if pod is not None and pod.assignment is not None:
        given = {(gpu.uuid, gpu.mib, gpu.core_percent) for gpu in process.grant.gpus}
        ought = {(s.uuid, s.mib, s.core_percent) for s in pod.assignment.containers.get(process.grant.container, ())}
        if given != ought:
            yield f"{name} is granted {sorted(given)} and assigned {sorted(ought)}"
    if pids is None:
        yield f"{name} is of a container that the arbiter does not know"
    elif process.pid not in pids:
        yield f"{name} is not known to the arbiter"


def grant_directories_are_never_reused(seen: Seen, history: MutableMapping[str, str]) -> Iterator[str]:
    """`history`: name -> UID of the pod that it was granted to, over all rounds; this adds to it."""
    for key, grant in seen.grants.items():
        if history.setdefault(key, grant.uid) != grant.uid:
            yield f"grant directory {key} was of pod UID {history[key]} and is of {grant.uid}"


def _with_assignment(seen: Seen) -> list[SeenPod]:
    return [pod for pod in seen.pods if pod.assignment is not None and not pod.finished]


INVARIANTS: Final[Mapping[str, Callable[[Seen], Iterator[str]]]] = {
    "I1": i1_no_gpu_is_given_away_twice,
    "I2": i2_containers_see_their_gpus_alone,
    "I3": i3_the_kubelet_counts_as_the_extender,
    "I4": i4_no_capacity_is_lost,
    "I5": i5_nobody_is_evicted_in_vain,
    "I6": i6_containers_stay_within_their_grants,
    "I7": i7_nobody_stays_suspended_without_an_arbiter,
    "I8": i8_nothing_is_silently_unlimited,
}


def broken(seen: Seen) -> list[str]:
    """Every violated invariant, with the reason."""
    return [f"{name}: {why}" for name, check in INVARIANTS.items() for why in check(seen)]
