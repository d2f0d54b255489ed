"""Can processes use a GPU's memory without the driver? Decided from what NVML answers, read in NVIDIA's documents and not run on such a machine.

On GH200, GB200 and GB300 the processor and the GPU use each other's memory coherently, over NVLink-C2C. The driver has two modes there (NVIDIA, "Understanding
Memory Management on Hardware-Coherent Platforms", 2025-10):

    NUMA    the GPU's memory is a NUMA node of the kernel: malloc, mmap, mbind and `numactl --membind` allocate it. nvmlDeviceGetNumaNodeId names the node (nvml.h:
            "This only applies to platforms where the GPUs are NUMA nodes")
    CDMM    the driver alone allocates it, and pages of the system allocator do not move there. The kernel module's parameter `NVreg_CoherentGPUMemoryMode=driver`, which
            implies `EnableUserNUMAManagement=0` (kernel-open/nvidia/os-registry.c of the open kernel modules); from R615 on the default

GB10 (DGX Spark) has no memory of its own, and no such mode: nvmlDeviceGetMemoryInfo answers NOT_SUPPORTED (k8s-device-plugin issue 1482, driver 580.95.05; DGX Spark's
known issues, "Guidance for reporting memory resources with unified memory").

Behind PCIe the addressing mode is none or HMM: a page moves to the GPU by the driver's faults only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vgpu.api.inventory import CoherentMemory

ATS: Final = 2
"""NVML_DEVICE_ADDRESSING_MODE_ATS, from nvml.h: the processor and the GPU have one set of page tables."""

WITH_OWN_MEMORY: Final = frozenset({(9, 0), (10, 0), (10, 3)})
"""Compute capabilities of GH200, GB200 and GB300, which have memory of their own. Of any other GPU with ATS, as GB10 (12.1), nobody says what CDMM would be."""

PCIE_ONLY: Final = frozenset({"x86_64"})
"""Machines, as uname names them, that no GPU is coherent with. POWER9 was, too, with NUMA nodes."""

WORDS: Final[dict[str, str]] = {
    "numa": "its memory is a NUMA node of the kernel",
    "unified": "it has no memory of its own",
    "unknown": "the driver does not tell who allocates its memory",
}
"""Why it is given whole only, for a person."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What NVML answers of a GPU. None: it does not support the question."""

    addressing_mode: int | None
    """nvmlDeviceGetAddressingMode, as NVML_DEVICE_ADDRESSING_MODE_*."""
    numa_node: int | None
    """nvmlDeviceGetNumaNodeId."""
    numa_known: bool
    """Has the driver this function, and does it answer? Those of branch R535 have not, those of R550 have (shim/fake/common/branches.def)."""
    reports_memory: bool
    """Does nvmlDeviceGetMemoryInfo answer with anything but NOT_SUPPORTED?"""
    compute: tuple[int, int]
    """Compute capability, (0, 0) where unknown."""


def coherent_memory(facts: MemoryFacts, machine: str) -> CoherentMemory:
    """How the GPU's memory is part of the machine's. What is in doubt is `unknown`: then nothing may count on a limit. `machine`: as uname names it."""
    if not facts.reports_memory:
        return "unified"
    if facts.numa_node is not None:
        return "numa"
    if facts.addressing_mode == ATS:
        return "driver" if facts.numa_known and facts.compute in WITH_OWN_MEMORY else "unknown"
    if facts.addressing_mode is None and not facts.numa_known and machine not in PCIE_ONLY:
        return "unknown"
    return ""


def why_whole_only(coherent: str) -> str:
    """For a person, as the middle of a sentence."""
    return WORDS.get(coherent, f"its memory is coherent in a way that this release does not know ({coherent})")
