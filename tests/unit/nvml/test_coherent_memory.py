"""GPUs with coherent memory, as the fake driver answers for them: what the inventory says, and that they answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvml.errors import NvmlError
from nvml.gpu_facts import machine_bytes
from nvml.messages import ProcessesReply
from tests.unit.nvml.test_nvml import Drivers, Supervisors, fake_driver, probed, supervisor_of

__all__ = ["fake_driver", "supervisor_of"]

MIB = 2**20


@pytest.mark.parametrize(
    ("described", "coherent"),
    [
        ("gpu h200", ""),
        ("gpu h100-96 coherent=numa", "numa"),
        ("gpu h100-96 coherent=cdmm", "driver"),
        ("gpu rtx-pro-6000 coherent=cdmm", "unknown"),
        ("driver 550\ngpu h100-96 coherent=numa", "numa"),
    ],
)
def test_the_inventory_has_how_memory_is_part_of_the_machine(
    fake_driver: Drivers, supervisor_of: Supervisors, described: str, coherent: str
) -> None:
    (gpu,) = probed(supervisor_of(fake_driver(f"{described}\n"))).gpus
    assert gpu.coherent == coherent
    assert gpu.mib > 90_000


def test_a_gpu_without_memory_of_its_own_answers_and_has_that_of_the_machine(
    fake_driver: Drivers, supervisor_of: Supervisors
) -> None:
    supervisor = supervisor_of(fake_driver("gpu rtx-pro-6000 coherent=unified\n"))
    (gpu,) = probed(supervisor).gpus
    assert (gpu.coherent, gpu.mib) == ("unified", machine_bytes() // MIB)
    assert supervisor.nvml.answers(gpu.uuid) is None
    assert supervisor.nvml.held_of([gpu.uuid])[gpu.uuid] == ProcessesReply((), None)


def test_memory_of_the_machine_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    with pytest.raises(NvmlError, match=f"{meminfo} cannot be read"):
        machine_bytes(meminfo)
    meminfo.write_text("MemFree: 12 kB\n")
    with pytest.raises(NvmlError, match="has no line MemTotal"):
        machine_bytes(meminfo)
    meminfo.write_text("MemTotal:       127600748 kB\nMemFree:        1 kB\n")
    assert machine_bytes(meminfo) == 127600748 * 1024
