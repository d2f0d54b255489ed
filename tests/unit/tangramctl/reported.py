"""What an arbiter reports of a container, for tests of what `tangramctl` shows of it."""

from __future__ import annotations

from vgpu.protocol.status import (
    ContainerStatus,
    GpuStatus,
    ProcessGpu,
    ProcessStatus,
)

MIB = 2**20
UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000000"


def reported(key: str, pod: str = "default/a") -> ContainerStatus:
    gpu = GpuStatus(UUID, 1024 * MIB, 30, 600 * MIB, 500 * MIB, 80 * MIB, 16 * MIB)
    process = ProcessStatus(7, 7, "python x", (ProcessGpu(UUID, 500 * MIB, 80 * MIB),))
    return ContainerStatus(key, pod, "1", "main", "best-effort", 4, "report", True, (gpu,), (process,))
