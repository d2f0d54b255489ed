"""What a GPU is, as NVML reports it. States facts and decides nothing.

What a GPU cannot report (an old driver, a virtual machine) has the neutral value: NUMA -1, no links, no MIG. What it must report and
does not (its UUID, its memory) is an error that names the GPU. A GPU that has no memory of its own has the machine's.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from nvml import handles, links
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.messages import CountReply
from nvml.naming import naming
from vgpu.api.coherent import MemoryFacts, coherent_memory
from vgpu.api.inventory import Gpu, MigInstance

MIB: Final = 2**20
GIB: Final = 2**30
NUMA_WORDS: Final = 16
"""64-bit words of a NUMA node set: 1,024 nodes, as many as Linux can have (CONFIG_NODES_SHIFT <= 10)."""

ARCHITECTURES: Final = {
    2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada-lovelace", 9: "hopper", 10: "blackwell",
}  # fmt: skip
"""NVML_DEVICE_ARCH_*, from nvml.h, as GPU feature discovery writes them. Later ones are not named."""

_PROFILE_IN_NAME = re.compile(r"\bMIG ((?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb(?:[+.-][a-z.]+)*)\s*\Z")
"""The end of a MIG device's name, as drivers from R470 on write it: `NVIDIA H200 MIG 1g.18gb+me`."""

_MEM_TOTAL = re.compile(r"^MemTotal: +([0-9]+) kB$", re.MULTILINE)

T = TypeVar("T")


def count() -> CountReply:
    """How many GPUs there are, and the driver's version. Raises NvmlError."""
    with naming("the number of GPUs"):
        counted, driver = handles.count(), str(nv.nvmlSystemGetDriverVersion())
    return CountReply(counted, driver, _optional(_cuda, ""))


def _cuda() -> str:
    """Newest CUDA version that the driver supports. NVML writes 13.0 as 13000."""
    version = int(nv.nvmlSystemGetCudaDriverVersion_v2())
    return f"{version // 1000}.{version % 1000 // 10}"


def gpu_at(index: int) -> Gpu:
    """The GPU with this index; its links by the PCI bus of the peer. Raises NvmlError."""
    with naming(f"GPU {index}"):
        handle = handles.of_index(index)
        uuid = str(nv.nvmlDeviceGetUUID(handle))
    with naming(f"GPU {index} ({uuid})"):
        own_bytes = _memory_bytes(handle)
        total_bytes = machine_bytes() if own_bytes is None else own_bytes
        model = str(nv.nvmlDeviceGetName(handle))
    mode = _optional(lambda: bool(nv.nvmlDeviceGetMigMode(handle)[0]), None)
    mig = bool(mode)
    return Gpu(
        uuid=uuid,
        index=_optional(lambda: handles.number(handle, index), index),
        model=model,
        mib=total_bytes // MIB,
        minor=_optional(lambda: int(nv.nvmlDeviceGetMinorNumber(handle)), index),
        numa=_optional(lambda: _numa(handle), -1),
        pci=_optional(lambda: str(nv.nvmlDeviceGetPciInfo(handle).busId), ""),
        mig=mig,
        instances=_instances(handle, total_bytes, uuid) if mig else (),
        nvlinks=_nvlinks(handle),
        arch=ARCHITECTURES.get(_optional(lambda: int(nv.nvmlDeviceGetArchitecture(handle)), 0), ""),
        mig_capable=mode is not None,
        coherent=coherent_memory(_memory_facts(handle, own_bytes is not None), platform.machine()),
    )


def _memory_bytes(handle: Any) -> int | None:
    """Of the GPU's own memory; None where it has none, as GB10: NVML does not support the question there."""
    try:
        return int(nv.nvmlDeviceGetMemoryInfo(handle).total)
    except nv.NVMLError_NotSupported:
        return None


def machine_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The machine's memory, which a GPU without memory of its own uses. Raises NvmlError."""
    try:
        found = _MEM_TOTAL.search(meminfo.read_text())
    except OSError as error:
        raise NvmlError(f"the GPU has no memory of its own, and {meminfo} cannot be read: {error}") from None
    if not found:
        raise NvmlError(f"the GPU has no memory of its own, and {meminfo} has no line MemTotal")
    return int(found[1]) * 1024


def _memory_facts(handle: Any, reports_memory: bool) -> MemoryFacts:
    node, known = None, True
    try:
        node = int(nv.nvmlDeviceGetNumaNodeId(handle))
    except nv.NVMLError_NotSupported:
        pass
    except nv.NVMLError:
        known = False
    mode_of = getattr(nv, "nvmlDeviceGetAddressingMode", None)
    mode = None if mode_of is None else _optional(lambda: int(mode_of(handle)), None)
    major, minor = map(int, _optional(lambda: nv.nvmlDeviceGetCudaComputeCapability(handle), (0, 0)))
    return MemoryFacts(mode, node, known, reports_memory, (major, minor))


def _numa(handle: Any) -> int:
    """The one NUMA node whose memory is nearest, -1 when there are several.

    nvmlDeviceGetNumaNodeId means the node of the GPU's own memory, which only coherent platforms have: an H200 on x86
    answers NOT_SUPPORTED (measured, driver 580).
    """
    words = nv.nvmlDeviceGetMemoryAffinity(handle, NUMA_WORDS, nv.NVML_AFFINITY_SCOPE_NODE)
    nodes = [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else -1


def _instances(handle: Any, total_bytes: int, uuid: str) -> tuple[MigInstance, ...]:
    found = []
    for at in range(_optional(lambda: int(nv.nvmlDeviceGetMaxMigDeviceCount(handle)), 0)):
        with naming(f"MIG instance {at} of GPU {uuid}"):
            try:
                instance = nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
            except (nv.NVMLError_NotFound, nv.NVMLError_InvalidArgument):
                continue
            found.append(_instance(handle, instance, total_bytes))
    return tuple(found)


def _instance(gpu: Any, instance: Any, total_bytes: int) -> MigInstance:
    return MigInstance(
        uuid=str(nv.nvmlDeviceGetUUID(instance)),
        profile=_profile(gpu, instance, total_bytes),
        mib=int(nv.nvmlDeviceGetMemoryInfo(instance).total) // MIB,
        gpu_instance=int(nv.nvmlDeviceGetGpuInstanceId(instance)),
        compute_instance=int(nv.nvmlDeviceGetComputeInstanceId(instance)),
    )


def _profile(gpu: Any, instance: Any, total_bytes: int) -> str:
    """NVIDIA's name of the instance's profile, `+` written as `.` as Kubernetes resource names need it."""
    found = _PROFILE_IN_NAME.search(_optional(lambda: str(nv.nvmlDeviceGetName(instance)), ""))
    if found:
        return found[1].replace("+", ".")
    attributes = nv.nvmlDeviceGetAttributes_v2(instance)
    compute, slices = int(attributes.computeInstanceSliceCount), int(attributes.gpuInstanceSliceCount)
    head = f"{compute}c.{slices}g" if compute != slices else f"{slices}g"
    size = f"{profile_gb(int(attributes.memorySizeMB) * MIB, total_bytes)}gb"
    return f"{head}.{size}" + (".me" if _media_extensions(gpu, instance) else "")


def profile_gb(instance_bytes: int, total_bytes: int) -> int:
    """The number in a profile's name: the GPU's GiB, rounded up, times the instance's share of it in eighths, rounded up.

    So 4,864 MiB of a 40,536 MiB GPU is `5gb`. As NVIDIA's tools name profiles.
    """
    eighths = -(-instance_bytes * 8 // total_bytes)
    gib = -(-total_bytes // GIB)
    return int(eighths * gib / 8 + 0.5)


def _media_extensions(gpu: Any, instance: Any) -> bool:
    """Is the instance of a `+me` profile? Only its GPU instance's profile number shows it."""

    def requested() -> bool:
        of_gpu = nv.nvmlDeviceGetGpuInstanceById(gpu, nv.nvmlDeviceGetGpuInstanceId(instance))
        wanted = nv.nvmlGpuInstanceGetInfo(of_gpu).profileId
        with_media = (nv.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, nv.NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1)
        numbers = [_optional(partial(_profile_number, gpu, profile), -1) for profile in with_media]
        return wanted in numbers

    return _optional(requested, False)


def _profile_number(gpu: Any, profile: int) -> int:
    return int(nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, profile).id)


def _nvlinks(handle: Any) -> dict[str, int]:
    """PCI bus of the peer -> active links; `inventory` maps buses to UUIDs."""
    peers: dict[str, int] = {}
    states: tuple[bool, ...] = _optional(lambda: links.states(handle), ())
    for link, active in enumerate(states):
        if not active:
            continue
        try:
            peer = str(nv.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except nv.NVMLError:
            continue
        peers[peer] = peers.get(peer, 0) + 1
    return peers


def _optional(request: Callable[[], T], otherwise: T) -> T:
    """What NVML answers, or `otherwise` when this GPU or driver does not know."""
    try:
        return request()
    except nv.NVMLError:
        return otherwise
