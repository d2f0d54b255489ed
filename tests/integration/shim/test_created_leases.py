"""The lease of memory of cuMemCreate in a container that may burst: elastic, and resident once something that is not followed uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.shim.burst_kit import burst, worker
from tests.integration.shim.conftest import GPUS, MIB, OUT_OF_MEMORY, Stage, Worker, wait_for
from tests.integration.shim.swapping_arbiter import ELASTIC, FEATURES, RESIDENT, SwappingArbiter, swapping_arbiter
from vgpu.protocol import wire

GUARANTEE_MIB, LIMIT_MIB = 100, 1000
LAUNCH_FAILED = 719
SENTENCE = "do not fit into the container's guarantee, and the call is refused"


@pytest.fixture(params=[FEATURES | wire.UNDERSTANDS_OPEN, FEATURES], ids=["CONVERT", "LEASE"])
def arbiter(bare_stage: Stage, request: pytest.FixtureRequest) -> Iterator[SwappingArbiter]:
    """Of a container that may burst; one that knows CONVERT, and one that does not."""
    bare_stage.grant((GPUS[0], GUARANTEE_MIB))
    burst(bare_stage)
    folder = bare_stage.folder / "grants" / bare_stage.key
    with swapping_arbiter(folder, limits=(GUARANTEE_MIB, LIMIT_MIB), features=request.param) as made:
        yield made


@pytest.fixture
def gpu(bare_stage: Stage, arbiter: SwappingArbiter) -> Worker:
    return worker(bare_stage)


def leases(made: SwappingArbiter) -> tuple[int, int]:
    """MiB that are in use, resident and elastic: what is left leased after a recall of everything."""
    made.recall(LIMIT_MIB)
    return made.leased[RESIDENT] // MIB, made.leased[ELASTIC] // MIB


def test_it_may_exceed_the_guarantee_and_goes_up_to_the_limit(arbiter: SwappingArbiter, gpu: Worker) -> None:
    blocks = [gpu.must(f"create({mib}, 0, {handles})") for mib, handles in ((600, 0), (380, 1), (20, 1))]
    assert leases(arbiter) == (0, 1000)
    assert gpu.request("create(2)")[0] == OUT_OF_MEMORY
    gpu.must(f"release({blocks[1]})")
    assert leases(arbiter) == (0, 620)


def test_within_the_guarantee_it_is_elastic_too(arbiter: SwappingArbiter, gpu: Worker) -> None:
    gpu.must("create(20)")
    assert leases(arbiter) == (0, 20)


def test_what_is_exported_is_resident_within_the_guarantee(arbiter: SwappingArbiter, gpu: Worker) -> None:
    first, second, large = (gpu.must(f"create({mib}, 0, 1)") for mib in (60, 60, 400))
    gpu.must(f"export_block({first})")
    gpu.must(f"export_block({first})")
    assert leases(arbiter) == (60, 460)
    for block in (second, large):
        assert gpu.request(f"export_block({block})")[0] == OUT_OF_MEMORY
    assert leases(arbiter) == (60, 460), "as before"
    gpu.must(f"release({first})")
    gpu.must(f"export_block({second})")
    assert leases(arbiter) == (60, 400)
    gpu.must(f"release({second})")
    gpu.must(f"release({large})")
    assert leases(arbiter) == (0, 0)
    assert gpu.end().count(SENTENCE) == 1
    assert bool(arbiter.converts) == bool(arbiter.features & wire.UNDERSTANDS_OPEN)


def test_what_is_mapped_into_an_array_is_resident_within_the_guarantee(arbiter: SwappingArbiter, gpu: Worker) -> None:
    small, large = gpu.must("create(4)"), gpu.must("create(400)")
    array = gpu.must("array(1024, 1024, flags=0x40)")
    assert gpu.request(f"tile({array}, {large})")[0] == OUT_OF_MEMORY
    gpu.must(f"tile({array}, {small})")
    gpu.must(f"release({small})")
    assert leases(arbiter)[1] == 400
    assert leases(arbiter)[0] >= 4, "the array has it"
    before_mib = leases(arbiter)[0]
    gpu.must(f"array_end({array})")
    assert leases(arbiter)[0] <= before_mib - 4
    assert SENTENCE in gpu.end()


@pytest.mark.parametrize("mib", [60, 400])
def test_what_the_driver_makes_only_without_an_export_is_resident_or_refused(
    bare_stage: Stage, arbiter: SwappingArbiter, mib: int
) -> None:
    gpu = worker(bare_stage, TANGRAM_FAKE_FAULTS="fail cuMemCreate nth=1 error=801")
    if mib > GUARANTEE_MIB:
        assert gpu.request(f"create({mib})")[0] == OUT_OF_MEMORY
        assert leases(arbiter) == (0, 0)
        return
    gpu.must(f"create({mib})")
    assert leases(arbiter) == (mib, 0)
    assert "the driver refused memory of cuMemCreate that can be exported" in gpu.end()


def test_what_the_driver_makes_in_no_form_has_its_error_and_keeps_its_lease(
    bare_stage: Stage, arbiter: SwappingArbiter
) -> None:
    """Also where the guarantee has no room for it."""
    gpu = bare_stage.worker(
        CUDA_VISIBLE_DEVICES="0", TANGRAM_FAKE_FAULTS=f"fail cuMemCreate size={400 * MIB} error=719"
    )
    assert gpu.request("create(400)")[0] == LAUNCH_FAILED
    assert arbiter.converts == []
    assert leases(arbiter) == (0, 0)
    gpu.must("create(200)")
    assert leases(arbiter) == (0, 200), "it can be swapped still"


def test_a_conversion_that_is_answered_too_late_ends_the_connection_so_that_both_sides_agree(
    bare_stage: Stage, arbiter: SwappingArbiter, gpu: Worker
) -> None:
    if not arbiter.features & wire.UNDERSTANDS_OPEN:
        return
    block = gpu.must("create(60, 0, 1)")
    assert leases(arbiter) == (0, 60)
    arbiter.convert_after_s = 3
    assert gpu.request(f"export_block({block})")[0] == OUT_OF_MEMORY
    assert arbiter.converts == []
    wait_for(lambda: arbiter.restated)
    assert arbiter.restated == [60 * MIB]
    arbiter.leased = {RESIDENT: 0, ELASTIC: 60 * MIB}  # as SWAPPABLE states it
    arbiter.convert_after_s = 0
    gpu.must(f"export_block({block})")
    assert leases(arbiter) == (60, 0)
