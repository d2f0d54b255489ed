"""Options of `run` to the request that placement understands. An error names the option, the value and the range."""

from __future__ import annotations

from typing import Final

from tangramctl.errors import BadOption
from vgpu.api.burst import MAX, amount_mib
from vgpu.api.errors import BadRequest
from vgpu.api.inventory import Inventory
from vgpu.api.names import CLASSES, LEVELS
from vgpu.api.quantity import LARGEST_GPU_MIB, MIB, SMALLEST_BYTES, whole_number
from vgpu.api.request import FULL_CORE_PERCENT, GpuRequest, PodRequest

GIB_MIB: Final = 1024
"""A plain number is GiB, as in a pod."""


def memory_mib(text: str, what: str = "--gpu-mem") -> int:
    """`8Gi`, `512Mi`, or `8` for GiB, to MiB, rounded up. Raises BadOption."""
    try:
        number = whole_number(text, what=what)
    except BadRequest as error:
        raise BadOption(str(error)) from None
    mib = -(-number // MIB) if number >= SMALLEST_BYTES else number * GIB_MIB
    if mib > LARGEST_GPU_MIB:
        raise BadOption(
            f"{what} is {text}, which is {mib} MiB: it must be 1 to {LARGEST_GPU_MIB} MiB{plain_hint(text)}"
        )
    return mib


def host_pool_mib(text: str) -> int:
    """`64Gi`, or `64` for GiB, to MiB, rounded up to an even number: a pool is of pages of 2 MiB. Raises BadOption."""
    return (memory_mib(text, "--host-pool") + 1) // 2 * 2


def burst_mib(text: str, guaranteed_mib: int) -> int:
    """`40Gi`, or `40` for GiB, to MiB, rounded down; `max` to `LARGEST_GPU_MIB`. Raises BadOption."""
    try:
        mib = amount_mib(text, unit_mib=GIB_MIB, what="--gpu-mem-burst")
    except BadRequest as error:
        raise BadOption(str(error)) from None
    if mib is not None and not guaranteed_mib <= mib <= LARGEST_GPU_MIB:
        raise BadOption(
            f"--gpu-mem-burst is {text}, which is {mib} MiB: it must be {guaranteed_mib} MiB, which --gpu-mem guarantees, to {LARGEST_GPU_MIB} MiB, or {MAX}{plain_hint(text)}"
        )
    return LARGEST_GPU_MIB if mib is None else mib


def plain_hint(text: str) -> str:
    """For the end of an error: what a plain number means; empty where a unit was given."""
    return f"; a plain number is GiB: write {text}Mi for MiB" if text.isdigit() and int(text) < SMALLEST_BYTES else ""


def request(mib: int, core_percent: int, service_class: str, level: int, uuids: frozenset[str]) -> PodRequest:
    """One container with a share of one GPU. `core_percent` 0 = no cap."""
    if not 0 <= core_percent <= FULL_CORE_PERCENT:
        raise BadOption(f"--gpu-core is {core_percent}: it must be 1 to {FULL_CORE_PERCENT} percent of one GPU")
    if service_class not in CLASSES:
        raise BadOption(f"--class is {service_class!r}: it must be one of {', '.join(CLASSES)}")
    if level not in LEVELS:
        raise BadOption(f"--level is {level}: it must be {LEVELS.start} to {LEVELS.stop - 1}")
    share = GpuRequest("run", "share", gpus=1, mib=mib, core_percent=core_percent)
    return PodRequest((share,), service_class=service_class, level=level, uuids=uuids)


def gpus_named(text: str, inventory: Inventory, what: str) -> frozenset[str]:
    """UUIDs of the GPUs that a list by comma names by index, UUID or the beginning of one. Raises BadOption."""
    return frozenset(_gpu_named(word.strip(), inventory, what) for word in text.split(","))


def _gpu_named(word: str, inventory: Inventory, what: str) -> str:
    if word.isascii() and word.isdigit():
        found = [gpu for gpu in inventory.gpus if gpu.index == int(word)]
    else:
        found = [gpu for gpu in inventory.gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
    if len(found) != 1:
        there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in inventory.gpus)
        names = "more than one GPU" if found else "no GPU"
        raise BadOption(f"{what} is {word!r}, which names {names}: it must be the index or UUID of one of {there}")
    (gpu,) = found
    if gpu.mig:
        raise BadOption(f"{what} is {word!r}: that GPU is in MIG mode; it must be one that is not")
    return gpu.uuid
