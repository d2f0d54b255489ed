"""The library and the arbiter work as specified on every branch of the driver, with the functions which that branch has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, OUT_OF_MEMORY, Stage, a_node, wait_for
from tests.integration.shim.test_guard import unloaded
from tests.integration.shim.test_nvml_view import look
from vgpu.api.enforcement import Reason

LIMIT_MIB = 1000
CUDA = {"535": 12020, "550": 12040, "570": 12080, "580": 13000, "595": 13020, "unknown": 13990}
FIRST = {"cuCtxCreate_v2": 3020, "cuCtxCreate_v3": 11040, "cuCtxCreate_v4": 12050}
WAYS = {
    "linear": "alloc(50)",
    "managed": "managed(50)",
    "stream-ordered": "stream_alloc(50)",
    "pool": "pool_alloc(50, pool)",
    "virtual": "create(50)",
    "array": "array(4096, 3200)",
    "mipmap": "mipmap(4096, 3200, 1)",
    "module": "module('.b8 v[52428800]')",
}
VISIBLE_S = 5.0
"""Specified."""
_keys = itertools.count()


@pytest.fixture(scope="module", params=CUDA)
def branch_node(build: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Stage, int]]:
    """A node with that driver, whose arbiter reads NVML, and the driver's CUDA version."""
    with a_node(build, CONTEXT_MIB, request.param) as made:
        made.start_measuring_arbiter()
        yield made, CUDA[request.param]


@pytest.fixture
def cuda(branch_node: tuple[Stage, int]) -> int:
    return branch_node[1]


@pytest.fixture
def stage(branch_node: tuple[Stage, int]) -> Iterator[Stage]:
    """A container limited to 1000 MiB on that node, whose arbiter has measured what a context takes."""
    node, _ = branch_node
    stage = Stage(node.build, node.folder, f"b{next(_keys)}")
    stage.grant((GPUS[0], LIMIT_MIB))
    stage.worker().kill()
    yield stage
    stage.close()


@pytest.mark.parametrize("way", WAYS)
def test_the_limit_is_enforced_by_every_way_to_memory(stage: Stage, way: str) -> None:
    worker = stage.worker()
    allocate = WAYS[way]
    if "pool" in allocate:
        allocate = allocate.replace("pool)", f"{worker.must('pool_new()')})")
    codes = [worker.request(allocate)[0] for _ in range(LIMIT_MIB // 50)]
    assert set(codes) == {0, OUT_OF_MEMORY}
    assert LIMIT_MIB - 100 < stage.true_mib(worker) <= LIMIT_MIB


def test_the_library_has_no_function_that_the_driver_lacks(stage: Stage, cuda: int) -> None:
    """A program that finds the name assumes that the driver supports it."""
    names = "cuMemGetDefaultMemPool", "cuMemAllocAsync", "cuGreenCtxCreate"
    found = stage.worker().must(f"found({names})")
    assert found == [name for name, first in zip(names, (13000, 11020, 12040), strict=True) if first <= cuda]


@pytest.mark.parametrize("name", FIRST)
def test_every_form_of_a_context_that_the_driver_has_is_charged(stage: Stage, cuda: int, name: str) -> None:
    """By a form that came later a program makes none."""
    worker = stage.bare_worker()
    worker.must("initialise()")
    assert worker.must(f"found(({name!r},))") == ([name] if FIRST[name] <= cuda else [])
    if FIRST[name] <= cuda:
        worker.must(f"context_by({name!r})")
        assert worker.free_mib() == LIMIT_MIB - CONTEXT_MIB


def gpu_time_reasons(stage: Stage) -> set[Reason]:
    return {one.reason for one in stage.status().unenforced} & {Reason.NO_CHANNELS, Reason.CHANNELS_UNLISTED}


def with_channels(stage: Stage) -> dict[str, str]:
    return {"LD_PRELOAD": f"{stage.library}:{stage.build}/fake/libfake-kernel.so"}


def test_the_channels_of_a_context_are_known_to_the_arbiter(stage: Stage) -> None:
    without = stage.worker()
    wait_for(lambda: gpu_time_reasons(stage) == {Reason.NO_CHANNELS}, VISIBLE_S)
    without.kill()
    worker = stage.worker(**with_channels(stage))
    wait_for(lambda: not gpu_time_reasons(stage), VISIBLE_S)
    assert worker.must("info()") == LIMIT_MIB - CONTEXT_MIB
    assert stage.status().gpu_time_state == "enforced"


def test_an_unknown_form_of_the_drivers_objects_is_in_the_status(stage: Stage) -> None:
    """The library cannot read the channels of such a driver, and reports it."""
    stage.driver_ctl("fault", "alloc-form")
    try:
        worker = stage.worker(**with_channels(stage))
    finally:
        stage.driver_ctl("fault", "none")
    wait_for(lambda: gpu_time_reasons(stage) == {Reason.NO_CHANNELS}, VISIBLE_S)
    assert stage.status().gpu_time_state == "unenforced"
    assert worker.request("alloc(1000)")[0] == OUT_OF_MEMORY, "the memory limit needs no channels"


def test_what_goes_around_the_library_is_reported(stage: Stage) -> None:
    worker = stage.worker()
    bypass = unloaded(stage, 1500)
    wait_for(lambda: stage.status().over)
    bypass.close()
    wait_for(lambda: not stage.status().over)
    worker.must("info()")


def test_nvml_lists_the_containers_own_processes_by_every_form(stage: Stage) -> None:
    worker = stage.worker()
    worker.must("alloc(100)")
    wait_for(lambda: look(stage)["compute"] == [[[worker.pid, CONTEXT_MIB + 100]]] * 3, seconds=20)
    total, used = look(stage)["memory"]
    assert total == LIMIT_MIB
    assert CONTEXT_MIB + 100 <= used <= CONTEXT_MIB + 100 + 128, "at most two chunks are leased beside it"
