"""What a context takes beside allocations is reserved before the call: stacks, heaps, variables of modules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.shim.conftest import OUT_OF_MEMORY, Stage

STACK, PRINTF, HEAP = 0, 1, 2
MIB = 2**20
UNLOADS = {"cuLibraryLoadData": "cuLibraryUnload"}


def test_a_stack_that_does_not_fit_is_refused(stage: Stage) -> None:
    """64 KiB for each thread of the smallest GPU are more than the share."""
    worker = stage.worker()
    before = worker.free_mib()
    assert worker.request(f"set_limit({STACK}, 65536)") == [OUT_OF_MEMORY]
    assert worker.free_mib() == before


def test_a_deeper_stack_is_charged_until_it_is_lowered(stage: Stage) -> None:
    worker = stage.worker()
    before = worker.free_mib()
    worker.must(f"set_limit({STACK}, 2048)")
    deep = worker.free_mib()
    assert deep == before - 80  # 1,024 bytes more for each of the 81,920 threads of this GPU
    worker.must(f"set_limit({STACK}, 2048)")
    assert worker.free_mib() == deep
    worker.must(f"set_limit({STACK}, 512)")
    assert worker.free_mib() == before


def test_a_heap_is_charged_when_it_is_requested(stage: Stage) -> None:
    worker = stage.worker()
    before = worker.free_mib()
    assert worker.request(f"set_limit({HEAP}, {2000 * MIB})") == [OUT_OF_MEMORY]
    worker.must(f"set_limit({HEAP}, {500 * MIB})")
    assert before - 500 <= worker.free_mib() <= before - 490
    worker.must("reset()")
    assert worker.request("use()")[0] == 0
    assert worker.free_mib() == before


def test_the_printf_buffer_takes_no_gpu_memory(stage: Stage) -> None:
    worker = stage.worker()
    before = worker.free_mib()
    worker.must(f"set_limit({PRINTF}, {2000 * MIB})")
    assert worker.free_mib() == before


@pytest.mark.parametrize(
    "way", ["cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuLibraryLoadData"]
)
def test_the_variables_of_a_module_are_charged_until_it_is_unloaded(stage: Stage, way: str) -> None:
    worker = stage.worker()
    before = worker.free_mib()
    assert worker.request(f"module('.b8 large[3221225472]', way='{way}')")[0] == OUT_OF_MEMORY
    assert worker.free_mib() == before
    made = worker.must(f"module('.align 4 .f32 one[100][26215]', '.u8 two', way='{way}')")
    assert worker.free_mib() == before - 12
    worker.must(f"module_end({made}, '{UNLOADS.get(way, 'cuModuleUnload')}')")
    assert worker.free_mib() == before


def test_the_variables_of_a_file_are_charged(stage: Stage, tmp_path: Path) -> None:
    image = tmp_path / "image.ptx"
    image.write_text(".version 8.0\n.target sm_80\n.global .u64 large[1000000000];\n")
    worker = stage.worker()
    assert worker.request(f"module_file({str(image)!r})")[0] == OUT_OF_MEMORY
    image.write_text(".version 8.0\n.target sm_80\n.global .u64 large[1048576];\n")
    before = worker.free_mib()
    worker.must(f"module_file({str(image)!r})")
    assert worker.free_mib() == before - 8


def test_small_modules_share_a_page(stage: Stage) -> None:
    worker = stage.worker()
    before = worker.free_mib()
    made = [worker.must("module('.u32 counter')") for _ in range(200)]
    assert worker.free_mib() == before - 2
    for one in made:
        worker.must(f"module_end({one})")
    assert worker.free_mib() == before


def test_a_launch_that_makes_the_stacks_grow_is_paid_for_or_refused(build: Path) -> None:
    """Also where a call fails half-way: the library's own unit test plays the driver. It reads images as well."""
    done = subprocess.run([build / "tests/unit_code"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


WAYS = ("cuGraphExecUpdate_v2", "cuGraphExecKernelNodeSetParams_v2")


def test_an_explicit_node_of_a_deep_kernel_is_refused_when_the_graph_is_instantiated(stage: Stage) -> None:
    gpu = stage.worker()
    assert gpu.request("__import__('kernels').made(65536)")[0] == OUT_OF_MEMORY
    assert stage.true_mib(gpu) <= 1000
    gpu.must("__import__('kernels').made(64)")


@pytest.mark.parametrize("way", WAYS)
def test_an_executable_graph_is_not_given_a_kernel_whose_stack_does_not_fit(stage: Stage, way: str) -> None:
    gpu = stage.worker()
    assert gpu.request(f"__import__('kernels').updated(64, 65536, {way!r})")[0] == OUT_OF_MEMORY
    assert stage.true_mib(gpu) <= 1000
    gpu.must(f"__import__('kernels').updated(64, 128, {way!r})")


@pytest.mark.parametrize("way", WAYS)
def test_the_stack_of_a_kernel_that_an_executable_graph_is_given_is_charged(stage: Stage, way: str) -> None:
    gpu = stage.worker()
    before = gpu.free_mib()
    gpu.must(f"__import__('kernels').updated(64, 4096, {way!r})")
    assert stage.true_mib(gpu) > 0
    assert before - gpu.free_mib() >= stage.true_mib(gpu)


def test_a_kernel_whose_local_memory_the_driver_does_not_state_is_not_launched(stage: Stage) -> None:
    gpu = stage.bare_worker(TANGRAM_FAKE_FAULTS="fail cuFuncGetAttribute error=999")
    gpu.must("use()")
    assert gpu.request("deep(65536)")[0] == OUT_OF_MEMORY
    assert stage.true_mib(gpu) <= 1000
    gpu.must("alloc(100)")


def test_a_kernel_whose_local_memory_the_driver_states_later_is_launched_then(stage: Stage) -> None:
    gpu = stage.bare_worker(TANGRAM_FAKE_FAULTS="fail cuFuncGetAttribute nth=1 error=999")
    gpu.must("use()")
    gpu.must("deep(64)")
    assert gpu.request("deep(65536)")[0] == OUT_OF_MEMORY
    assert stage.true_mib(gpu) <= 1000
