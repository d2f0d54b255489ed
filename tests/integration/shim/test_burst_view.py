"""What NVML shows in a container that may burst: the limit that is in effect, also to a program that uses nothing but NVML."""

from __future__ import annotations

import subprocess

from tests.integration.shim.burst_kit import ANCHOR_MIB, arbiter, worker
from tests.integration.shim.burst_kit import peer_stage as stage
from tests.integration.shim.conftest import MIB, Stage, wait_for
from tests.integration.shim.swap_kit import Swap, swap
from tests.integration.shim.swapping_arbiter import FEATURES
from tests.integration.shim.test_views import NVML
from vgpu.protocol import wire

__all__ = ["stage", "swap"]

AS_IT_IS = "16384"
"""MiB of the other GPU, which the grant does not name."""


def seen(stage: Stage, **env: str) -> list[int]:
    """Total, used and free MiB by both forms of the function, which agree."""
    first, second = stage.python(NVML, **env).splitlines()
    assert second.startswith(AS_IT_IS)
    numbers = [int(word) for word in first.split()]
    assert numbers[:3] == numbers[3:]
    return numbers[:3]


def smi(stage: Stage, fields: str) -> str:
    words = [stage.build / "fake/nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, env=stage.env(), capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()[0]


def test_a_program_that_uses_only_nvml_sees_the_limit_and_what_all_have_of_it(stage: Stage) -> None:
    with arbiter(stage):
        assert seen(stage) == [4000, 0, 4000]
        worker(stage).must("alloc(1500)")
        total, used, free = seen(stage)
        assert total == 4000
        assert 1500 + ANCHOR_MIB <= used <= 1500 + ANCHOR_MIB + 2 * 125, "and at most what is leased in advance"
        assert free == total - used
        assert smi(stage, "memory.total,memory.used,memory.free") == f"4000, {used}, {free}"


def test_more_may_be_free_than_the_gpu_has_because_other_containers_make_room(stage: Stage) -> None:
    with arbiter(stage, limits=(1000, 20000)):
        assert seen(stage) == [20000, 0, 20000]


def test_a_program_without_a_helper_thread_sees_the_containers_limit_too(stage: Stage) -> None:
    with arbiter(stage) as made:
        assert seen(stage, **stage.without_threads) == [4000, 0, 4000]
        assert wire.FOR_BURST not in made.hellos


def test_where_nothing_may_burst_now_the_guarantee_is_shown(stage: Stage) -> None:
    """As long as there is no host pool: BURST states the guarantee then, and the page shows it."""
    with arbiter(stage, limits=(1000, 1000)):
        assert seen(stage) == [1000, 0, 1000]


def test_a_limit_that_fell_below_what_is_used_leaves_nothing_free(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must("alloc(1500)")
        made.limits = (1000, 1000)
        made.burst().send(wire.Burst(0, 1000 * MIB, 1000 * MIB))
        made.show()
        assert seen(stage) == [1000, 1000, 0]
        wait_for(lambda: gpu.request("info()")[1:] == [0, 1000])
        made.limits = (1000, 3000)
        made.show()
        assert seen(stage)[0] == 3000


def test_an_arbiter_whose_page_shows_no_limits_leaves_the_guarantee_of_its_welcome(stage: Stage) -> None:
    with arbiter(stage, features=FEATURES & ~wire.SHOWS_LIMITS):
        assert seen(stage, **stage.without_threads) == [1000, 0, 1000]


def test_memory_that_is_in_host_memory_counts_as_used(swap: Swap) -> None:
    swap.written(600, 1)
    before = seen(swap.stage)
    assert before[1] >= 600
    swap.suspend()
    blocks = swap.away()
    assert sum(block.mib for block in blocks) >= 600
    assert seen(swap.stage) == before
    swap.back(blocks)
    swap.settle()
    swap.suspend(on=False)
    assert seen(swap.stage) == before


def test_cuda_shows_the_limit_to_a_program_that_has_allocated_nothing_yet(stage: Stage) -> None:
    program = """
import ctypes
cuda, total, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0
print(total.value >> 20)
"""
    with arbiter(stage):
        assert stage.python(program, CUDA_VISIBLE_DEVICES="0").strip() == "4000"
