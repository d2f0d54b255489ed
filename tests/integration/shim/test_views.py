"""What a program sees of memory: the container's share, by CUDA and by NVML, whichever it calls first."""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import GPUS, MIB, ROUTES, Stage, wait_for

NVML = """
import pynvml
pynvml.nvmlInit()
for n in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(n)
    one = pynvml.nvmlDeviceGetMemoryInfo(handle)
    two = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    print(one.total >> 20, one.used >> 20, one.free >> 20, two.total >> 20, two.used >> 20, two.free >> 20)
"""


@pytest.mark.parametrize("route", ROUTES)
def test_total_is_the_limit_and_free_is_what_is_left_of_it(stage: Stage, route: str) -> None:
    probe = stage.probe(route)
    assert probe.info_mib() == (1000, 1000)
    assert probe.request("total", 0) == [0, 1000 * MIB]
    probe.alloc(300)
    assert probe.info_mib() == (700, 1000)


def test_free_follows_what_siblings_take(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    assert two.alloc(500) == 0
    free, _ = one.info_mib()
    assert 500 - 64 <= free <= 500, "what the sibling leases unused, at most a chunk, does not count as free"


def test_what_a_sibling_has_freed_is_seen_within_seconds(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    _, at = two.request("alloc", 900 * MIB)
    assert two.request("free", at) == [0]
    assert two.info_mib()[0] >= 1000 - 64, (
        "the process that freed it sees it at once; the sibling may have its first chunk leased"
    )
    wait_for(lambda: one.info_mib()[0] >= 1000 - 64)


def test_nvml_reports_the_containers_share_to_a_program_without_cuda(stage: Stage) -> None:
    probe = stage.probe()
    assert probe.alloc(1000) == 0
    first, second = stage.python(NVML).splitlines()
    assert first == "1000 1000 0 1000 1000 0"
    assert second.startswith("16384"), "a GPU that the grant does not name is shown as it is"


def test_nvml_that_was_started_before_cuda_shows_the_share_too(stage: Stage) -> None:
    program = (
        NVML
        + """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, at = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
print(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1001 << 20)))
print(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1000 << 20)))
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used >> 20)
"""
    )
    assert stage.python(program).splitlines()[2:] == ["2", "0", "1000"]


def test_nvidia_smi_in_the_container_shows_its_share(stage: Stage) -> None:
    import subprocess

    program = stage.build / "fake/nvidia-smi"
    done = subprocess.run(
        [program, "--query-gpu=memory.total,uuid", "--format=csv"],
        env=stage.env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert any("1000 MiB" in line and GPUS[0] in line for line in done.stdout.splitlines()), done.stdout
