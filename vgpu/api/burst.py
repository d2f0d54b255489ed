"""What a container may use above its guarantee: the annotations that request it, and the file that grants it.

    tangram.sh/gpu-mem-burst       memory in all, as gpu-mem is written, or `max`
    tangram.sh/gpu-core-burst      compute time in all, as gpu-core is written
    tangram.sh/gpu-mem-burst-wait  seconds that an allocation above gpu-mem may wait until others give way

Each may name one container (`tangram.sh/gpu-mem-burst.main`), which then does not follow the pod's own. Limits are split evenly over the
container's GPUs, as gpu-mem is: it bursts on all of them or on none. What the GPU can give is decided on the node (`limits_on_gpus`). There
the file `burst` stands beside the grant, in its grammar; without it, the grant is all that the container may use:

    tangram-burst 1
    wait_s <0-3600>
    card <GPU UUID> mib=<limit in all> core_percent=<limit in all, 0 = no cap>
    end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vgpu.api.codec import GRANT_BYTES_LIMIT, VERSION, check_version, field_of_line, gpu_lines
from vgpu.api.errors import BadDocument, BadRequest
from vgpu.api.grant import AssignedGpu, GrantGpu
from vgpu.api.names import DEFAULT, Names
from vgpu.api.quantity import LARGEST_GPU_MIB, MIB, SMALLEST_BYTES, whole_number
from vgpu.api.request import FULL_CORE_PERCENT, GpuRequest, PodRequest

MAX: Final = "max"
"""As much as the GPU can give."""
EVERY: Final = "*"
"""Stands for every namespace that is not named itself. No namespace can have that for its name."""
DEFAULT_WAIT_S: Final = 30
LONGEST_WAIT_S: Final = 3600


@dataclass(frozen=True, slots=True)
class Burst:
    """The limits of one container on each of its GPUs, as its pod requests them."""

    mib: int
    """`LARGEST_GPU_MIB` where as much is requested as the GPU can give."""
    core_percent: int
    """0 = no cap, as in the grant."""
    wait_s: int = DEFAULT_WAIT_S


@dataclass(frozen=True, slots=True)
class BurstBound:
    """The largest memory limit that pods of a namespace may write."""

    namespace: str = ""
    most: str | None = MAX
    """A quantity or `max`; None: they may not burst."""

    @classmethod
    def of(cls, namespace: str, most: Mapping[str, str]) -> BurstBound:
        """Of one namespace. `most`: namespace or `*` -> quantity or `max`; empty = no namespace has a bound."""
        return cls(namespace, most.get(namespace, most.get(EVERY)) if most else MAX)


@dataclass(frozen=True, slots=True)
class BurstLimits:
    """What the file `burst` says."""

    gpus: tuple[GrantGpu, ...]
    """The limits in all on each GPU of the grant."""
    wait_s: int = DEFAULT_WAIT_S


def core_limit_percent(gpu: GrantGpu, burst: BurstLimits | None) -> int:
    """The limit of compute time in all on a GPU of the grant, where the file says `burst`; 0 = no cap."""
    limits = {one.uuid: one.core_percent for one in burst.gpus} if burst is not None else {}
    return max(gpu.core_percent, limits.get(gpu.uuid, 0)) if gpu.core_percent else 0


def amount_mib(text: str, *, unit_mib: int, what: str) -> int | None:
    """A limit in MiB, rounded down; None for `max`. A number of at least 2**20 is bytes, a smaller one units. Raises BadRequest."""
    if text == MAX:
        return None
    try:
        number = whole_number(text, what=what)
    except BadRequest as error:
        raise BadRequest(f"{error}; it may also be {MAX}") from None
    return number // MIB if number >= SMALLEST_BYTES else number * unit_mib


def bursts_of(
    annotations: Mapping[str, str],
    request: PodRequest,
    *,
    names: Names = DEFAULT,
    unit_mib: int = 1024,
    largest_gpu_mib: int = LARGEST_GPU_MIB,
    bound: BurstBound = BurstBound(),
) -> dict[str, Burst]:
    """Container -> its limits, of the containers whose pod requests a burst for them. `request` is the pod's.

    Raises BadRequest with a sentence for the user.
    """
    shares = {part.container: part for part in request.containers if part.kind == "share"}
    for key in annotations:
        if parts := names.burst_annotation(key):
            _check_key(key, *parts, shares, names)
            if bound.most is None:
                raise BadRequest(
                    f"annotation {key}: pods of namespace {bound.namespace} may not burst; leave it out, or have the operator add the namespace to the chart value burst.max"
                )
    found: dict[str, Burst] = {}
    for name, part in shares.items():
        memory, core, wait = (_key_of(annotations, one, name, names) for one in names.burst_annotations)
        mib, core_percent, wait_s = part.mib, part.core_percent, DEFAULT_WAIT_S
        if memory:
            mib = _mib(annotations[memory], f"annotation {memory}", part, unit_mib, largest_gpu_mib, bound)
        if core and part.core_percent:
            core_percent = _core_percent(annotations[core], f"annotation {core}", part)
        if wait:
            wait_s = _seconds(annotations[wait], f"annotation {wait}")
        if memory or core:
            found[name] = Burst(mib, core_percent, wait_s)
    return found


def limits_on_gpus(
    burst: Burst,
    assigned: Sequence[AssignedGpu],
    room_mib: Mapping[str, int],
    settled_mib: Mapping[str, int] | None = None,
) -> tuple[BurstLimits | None, str]:
    """The limits that a container gets, None where it gets no more than its guarantee; and why it gets less than it requests, or "".

    `assigned` are its GPUs with its guarantee on each. `room_mib`: UUID -> MiB of the GPU without the guarantees of others; a GPU that is
    missing gives no more than the guarantee. `settled_mib`: UUID -> the most that the container may have where limits have a bound together
    (`vgpu.api.overcommit`); None = they have none. A limit is never below the guarantee, and above it in memory on all GPUs or on none.
    """
    most_mib = {
        gpu.uuid: min(room_mib.get(gpu.uuid, 0), burst.mib if settled_mib is None else settled_mib.get(gpu.uuid, 0))
        for gpu in assigned
    }
    limits = {gpu.uuid: max(gpu.mib, min(burst.mib, most_mib[gpu.uuid])) for gpu in assigned}
    full = [gpu for gpu in assigned if gpu.mib < burst.mib and limits[gpu.uuid] == gpu.mib]
    cut = [gpu for gpu in assigned if limits[gpu.uuid] < burst.mib < LARGEST_GPU_MIB]
    if full:
        limits = {gpu.uuid: gpu.mib for gpu in assigned}
    why = ""
    for gpu in (full or cut)[:1]:
        if settled_mib is not None and settled_mib.get(gpu.uuid, 0) < room_mib.get(gpu.uuid, 0):
            most = "as much as possible" if burst.mib == LARGEST_GPU_MIB else f"{burst.mib} MiB"
            why = f"{most} is requested of GPU {gpu.uuid}, and {limits[gpu.uuid]} MiB were settled when the pod was placed, so that the limits on the GPU keep to burst.overcommit: that is the limit"
        elif full:
            why = f"GPU {gpu.uuid} has no memory beside the guarantees of its containers, so the memory limit is the guarantee, {gpu.mib} MiB"
        else:
            why = f"{burst.mib} MiB are requested of GPU {gpu.uuid}, which has {limits[gpu.uuid]} MiB beside the guarantees of other containers: that is the limit"
    gpus = tuple(
        GrantGpu(gpu.uuid, limits[gpu.uuid], max(gpu.core_percent, burst.core_percent) if gpu.core_percent else 0)
        for gpu in assigned
    )
    more = any(
        (one.mib, one.core_percent) != (gpu.mib, gpu.core_percent) for one, gpu in zip(gpus, assigned, strict=True)
    )
    return (BurstLimits(gpus, burst.wait_s) if more else None), why


def burst_to_text(limits: BurstLimits) -> str:
    """The file. Raises BadDocument when its reader would refuse it."""
    gpus = [f"card {gpu.uuid} mib={gpu.mib} core_percent={gpu.core_percent}" for gpu in limits.gpus]
    text = "\n".join([f"tangram-burst {VERSION}", f"wait_s {limits.wait_s}", *gpus, "end", ""])
    burst_from_text(text)
    return text


def burst_from_text(text: str) -> BurstLimits:
    """Raises BadDocument that names the line, its text and what was expected; NewerVersion. Whether it fits the grant: `contradiction`."""
    if len(text) > GRANT_BYTES_LIMIT:
        raise BadDocument(f"burst has {len(text)} characters: at most {GRANT_BYTES_LIMIT} are read")
    lines = text.split("\n")
    check_version(lines, "burst")
    wait = field_of_line(lines, 1, "wait_s", "burst")
    try:
        wait_s = _seconds(wait, "burst line 2: wait_s")
    except BadRequest as error:
        raise BadDocument(str(error)) from None
    if wait != str(wait_s):
        raise BadDocument(f"burst line 2: wait_s is {wait!r}: it must have no leading zero")
    return BurstLimits(gpu_lines(lines, 2, "burst"), wait_s)


def contradiction(limits: BurstLimits, granted: Sequence[GrantGpu]) -> str | None:
    """Why these cannot be the limits of a container with this grant, or None. A reader then has the grant alone."""
    guarantees = {gpu.uuid: gpu for gpu in granted}
    for limit in limits.gpus:
        gpu = guarantees.get(limit.uuid)
        if gpu is None:
            return f"burst names GPU {limit.uuid}: it must be one of the grant, {', '.join(guarantees) or 'which has none'}"
        if limit.mib < gpu.mib:
            return f"burst: mib of GPU {limit.uuid} is {limit.mib}: it must be {gpu.mib}, the grant's, or more"
        if limit.core_percent < gpu.core_percent or (limit.core_percent and not gpu.core_percent):
            least = f"{gpu.core_percent} to {FULL_CORE_PERCENT}" if gpu.core_percent else "0, as the grant has no cap"
            return f"burst: core_percent of GPU {limit.uuid} is {limit.core_percent}: it must be {least}"
    return None


def _key_of(annotations: Mapping[str, str], annotation: str, container: str, names: Names) -> str:
    """The key that counts for a container; "" if none is written."""
    own = names.of_container(annotation, container)
    return next((key for key in (own, annotation) if key in annotations), "")


def _check_key(key: str, annotation: str, container: str, shares: Mapping[str, GpuRequest], names: Names) -> None:
    """It must be for a container that can burst in that."""
    if not shares:
        raise BadRequest(
            f"annotation {key}: no container of the pod requests {names.gpu_mem}, and only a share can burst; whole GPUs and MIG instances cannot"
        )
    if container and container not in shares:
        raise BadRequest(
            f"annotation {key} names container {container!r}: it must be one that requests {names.gpu_mem}, {', '.join(shares)}"
        )
    meant = [shares[container]] if container else shares.values()
    if annotation == names.gpu_core_burst and not any(part.core_percent for part in meant):
        raise BadRequest(
            f"annotation {key}: the container requests no {names.gpu_core}, so its compute time has no limit to exceed; leave it out"
        )


def _mib(text: str, what: str, part: GpuRequest, unit_mib: int, largest_gpu_mib: int, bound: BurstBound) -> int:
    """The memory limit on each GPU."""
    mib = amount_mib(text, unit_mib=unit_mib, what=what)
    least, most = part.mib * part.gpus, largest_gpu_mib * part.gpus
    if mib is not None and not least <= mib <= most:
        over = f" over {part.gpus} GPUs" if part.gpus > 1 else ""
        raise BadRequest(
            f"{what} is {text}, which is {mib} MiB: for container {part.container} it must be {least} MiB, its guarantee, to {most} MiB{over}, or {MAX}"
        )
    allowed = amount_mib(bound.most or MAX, unit_mib=unit_mib, what="burst.max")
    if allowed is not None and (mib is None or mib > allowed):
        raise BadRequest(
            f"{what} is {text}: a container of namespace {bound.namespace} may have {bound.most} at most (chart value burst.max)"
        )
    return LARGEST_GPU_MIB if mib is None else mib // part.gpus


def _core_percent(text: str, what: str, part: GpuRequest) -> int:
    """The limit of compute time on each GPU."""
    least, most = part.core_percent * part.gpus, FULL_CORE_PERCENT * part.gpus
    percent = whole_number(text, what=what, at_most=most)
    if percent < least:
        raise BadRequest(
            f"{what} is {percent}: for container {part.container} it must be {least}, its guarantee, to {most}"
        )
    if percent % part.gpus:
        raise BadRequest(
            f"{what} is {percent}: it does not divide over the {part.gpus} GPUs of container {part.container}"
        )
    return percent // part.gpus


def _seconds(text: str, what: str) -> int:
    if not (
        text.isascii() and text.isdigit() and len(text) <= len(str(LONGEST_WAIT_S)) and int(text) <= LONGEST_WAIT_S
    ):
        raise BadRequest(f"{what} is {text[:80]!r}: it must be a whole number of seconds, 0 to {LONGEST_WAIT_S}")
    return int(text)
