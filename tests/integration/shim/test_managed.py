"""Managed memory, which NVML lists for no process: each process states how much it has on each GPU, and its contexts are charged what they use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, ROOT, Stage, Worker, wait_for

GROWTH = """
#include "client.h"
#include "page.h"
static struct client client[8]; /* that stay open */
static unsigned calls;
int grow(const char *socket, unsigned unit, unsigned mib)
{
    struct client *of = &client[calls++ % 8];
    return client_open_at(of, FAKE_CUDA, socket) != 0 || !page_take(of->page, of->slot, unit, mib * FAKE_MIB, false);
}
"""
"""Takes memory that NVML lists for this process, and that no call of the driver's was made for: as contexts do that grow without a bound."""


@pytest.fixture(scope="session")
def growth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for a program of gpu.py."""
    folder = tmp_path_factory.mktemp("growth")
    (folder / "grow.c").write_text(GROWTH)
    fake = ROOT / "shim/fake"
    sources = ["grow.c", str(fake / "common/client.c"), str(fake / "common/page.c")]
    paths = ["-I", str(fake), "-I", str(fake / "common")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-pthread", *paths, "-o", "grow.so", *sources], cwd=folder, check=True)
    return folder / "grow.so"


def grow(stage: Stage, worker: Worker, growth: Path, mib: int, unit: int = 0) -> None:
    worker.must(f"[ctypes.CDLL({str(growth)!r}).grow({str(stage.folder / 'driver.sock')!r}.encode(), {unit}, {mib})]")


def stated(stage: Stage, worker: Worker) -> list[tuple[float, float]]:
    """By GPU: the memory in use and the managed memory that a process reports. MiB."""
    (process,) = (one for one in stage.status().processes if one.pid == worker.pid)
    return [(gpu.used_bytes / MIB, gpu.managed_bytes / MIB) for gpu in process.gpus]


def charged(stage: Stage) -> list[float]:
    """By GPU: what all contexts take. MiB."""
    return [gpu.context_bytes / MIB for gpu in stage.status().gpus]


def test_a_free_takes_off_exactly_its_own(stage: Stage) -> None:
    worker = stage.worker()
    large, small, other = (worker.must(f"managed({mib})") for mib in (100, 0.25, 0.25))
    worker.must("alloc(200)")
    plain = worker.must("alloc(50)")
    wait_for(lambda: stated(stage, worker) == [(352, 102)])
    worker.must(f"max(free({plain}), free({small}))")
    wait_for(lambda: stated(stage, worker) == [(302, 102)])
    worker.must(f"free({large})")
    wait_for(lambda: stated(stage, worker) == [(202, 2)])
    worker.must(f"free({other})")
    wait_for(lambda: stated(stage, worker) == [(200, 0)])


def test_managed_memory_that_takes_the_place_of_as_much_plain_memory_is_stated(stage: Stage) -> None:
    worker = stage.worker()
    at = worker.must("alloc(50)")
    wait_for(lambda: stated(stage, worker) == [(50, 0)])
    worker.must(f"max(free({at}), managed(50))")
    wait_for(lambda: stated(stage, worker) == [(50, 50)])


def test_a_free_that_the_driver_refuses_takes_nothing_off(stage: Stage) -> None:
    worker = stage.worker()
    at = worker.must("managed(100)")
    assert worker.request(f"stream_free({at})")[0] != 0
    worker.must("alloc(10)")
    wait_for(lambda: stated(stage, worker) == [(110, 100)])


def test_managed_memory_ends_with_its_context(stage: Stage) -> None:
    worker = stage.worker()
    worker.must("[max(managed(mib)[0] for mib in (100, 0.5, 30))]")
    wait_for(lambda: stated(stage, worker) == [(132, 132)])
    worker.must("reset()")
    wait_for(lambda: stated(stage, worker) == [(0, 0)])


POOLS = {
    "of the program": ("pool_new(0, 2)", 300),
    "default, of a device": ("pool_default(1, 2)", 300),
    "default, without a place": ("pool_default(0, 2)", 300),
    "of the program, not managed": ("pool_new()", 0),
    "default, not managed": ("pool_of()", 0),
}


@pytest.mark.parametrize(("pool", "mib"), POOLS.values(), ids=POOLS.keys())
def test_what_a_managed_pool_keeps_is_stated(stage: Stage, pool: str, mib: int) -> None:
    worker = stage.worker()
    handle = worker.must(pool)
    at = worker.must(f"pool_alloc(300, {handle})")
    wait_for(lambda: stated(stage, worker) == [(300, mib)])
    worker.must(f"stream_free({at})")
    worker.must("context_sync()")
    worker.must(f"pool_trim({handle})")
    wait_for(lambda: stated(stage, worker) == [(0, 0)])


def test_a_managed_pool_that_is_destroyed_is_stated_until_its_memory_is_gone(stage: Stage) -> None:
    worker = stage.worker()
    handle = worker.must("pool_new(0, 2)")
    at = worker.must(f"pool_alloc(300, {handle})")
    worker.must(f"pool_end({handle})")
    wait_for(lambda: stated(stage, worker) == [(300, 300)])
    worker.must(f"free({at})")
    worker.must("context_sync()")
    wait_for(lambda: stated(stage, worker) == [(0, 0)])


def test_each_gpu_has_a_statement_of_its_own(stage: Stage) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 1000))
    worker = stage.worker()
    first = worker.must("managed(100)")
    worker.must("use(1)")
    second = worker.must("managed(30)")
    wait_for(lambda: stated(stage, worker) == [(100, 100), (30, 30)])
    worker.must(f"free({first})")
    wait_for(lambda: stated(stage, worker) == [(0, 0), (30, 30)])
    worker.must(f"free({second})")
    wait_for(lambda: stated(stage, worker) == [(0, 0), (0, 0)])


def test_it_is_stated_to_an_arbiter_that_comes_back(own_stage: Stage) -> None:
    worker = own_stage.worker()
    worker.must("managed(100)")
    own_stage.stop_arbiter(another=True)
    own_stage.start_arbiter("--grace-ms", "0")
    wait_for(lambda: own_stage.status().processes)
    wait_for(lambda: stated(own_stage, worker) == [(100, 100)])


def test_contexts_that_grow_beside_managed_memory_are_charged(measured: Stage, growth: Path) -> None:
    worker = measured.worker()
    worker.must("managed(400)")
    grow(measured, worker, growth, 100)
    wait_for(lambda: charged(measured) == [CONTEXT_MIB + 100])


def test_contexts_that_grow_beside_a_managed_pool_are_charged(measured: Stage, growth: Path) -> None:
    worker = measured.worker()
    worker.must(f"pool_alloc(300, {worker.must('pool_new(0, 2)')})")
    grow(measured, worker, growth, 100)
    wait_for(lambda: charged(measured) == [CONTEXT_MIB + 100])


def test_managed_memory_that_was_freed_is_not_taken_for_plain_memory(measured: Stage, growth: Path) -> None:
    worker = measured.worker()
    at = worker.must("managed(300)")
    grow(measured, worker, growth, 50)
    wait_for(lambda: charged(measured) == [CONTEXT_MIB + 50])
    worker.must(f"free({at})")
    worker.must("alloc(300)")
    grow(measured, worker, growth, 30)
    wait_for(lambda: charged(measured) != [CONTEXT_MIB + 50])
    assert charged(measured) == [CONTEXT_MIB + 80]


def test_a_stack_that_is_raised_beside_managed_memory_is_charged_once(measured: Stage, growth: Path) -> None:
    """It is charged to the lease; what grows beside that is the process's contexts'."""
    worker = measured.worker()
    worker.must("managed(100)")
    wait_for(lambda: stated(measured, worker) == [(100, 100)])
    worker.must("set_limit(0, 2048)")
    grow(measured, worker, growth, 20)
    wait_for(lambda: charged(measured) != [CONTEXT_MIB])
    assert charged(measured) == [CONTEXT_MIB + 20]
    ((used, managed),) = stated(measured, worker)
    assert managed == 100
    assert used + CONTEXT_MIB + 20 == measured.true_mib(worker)


def test_what_one_gpus_contexts_grow_by_is_not_hidden_by_managed_memory_of_the_other(
    measured: Stage, growth: Path
) -> None:
    measured.grant((GPUS[0], 1000), (GPUS[1], 1000))
    worker = measured.worker()
    worker.must("managed(200)")
    worker.must("use(1)")
    worker.must("managed(300)")
    grow(measured, worker, growth, 40, unit=1)
    wait_for(lambda: charged(measured) == [CONTEXT_MIB, CONTEXT_MIB + 40])
    grow(measured, worker, growth, 60, unit=0)
    wait_for(lambda: charged(measured) == [CONTEXT_MIB + 60, CONTEXT_MIB + 40])
