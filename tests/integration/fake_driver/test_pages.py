"""The fake loses what a GPU lost: steps that were measured on an H200, replayed, and the sizes of arrays."""

from __future__ import annotations

import csv

import pytest

from tests.built import REPOSITORY

MIB = 1 << 20
BLOCK = 2 * MIB
ROOMY = "card h200 context_mib=0"
MEASURED = list(csv.DictReader((REPOSITORY / "bench/granularity/traces-h200.csv").read_text().splitlines()))
OUT_OF_MEMORY = 2


@pytest.mark.parametrize("trace", sorted({row["trace"] for row in MEASURED}))
def test_the_loss_after_every_measured_step_is_the_gpus(fake_driver, worker, trace):
    rows = [row for row in MEASURED if row["trace"] == trace]
    steps, maker = [], {}
    for number, row in enumerate(rows):
        size = int(row["bytes"])
        steps.append(size if size > 0 else -maker.pop(row["address"]) - 1)
        if size > 0:
            maker[row["address"]] = number
    lost = worker(fake_driver(ROOMY)).must("replay", steps)
    assert len(lost) == 3000
    assert lost == [int(row["lost_bytes"]) for row in rows]


def test_the_address_tells_the_block(fake_driver, worker):
    one = worker(fake_driver(ROOMY))
    first, second, third = (one.must("alloc", size) for size in (700_000, 700_000, 700_000))
    assert first % BLOCK == 0
    assert second == first + 700_416
    assert third % BLOCK == 0
    assert third != first


@pytest.mark.parametrize(
    ("size", "lost_mib"), [(1, 2), (BLOCK - 1, 2), (BLOCK, 2), (BLOCK + 1, 4), (100 * MIB + 1, 102)]
)
def test_a_request_loses_whole_pages_and_a_free_returns_them(fake_driver, worker, size, lost_mib):
    driver = fake_driver(ROOMY)
    one = worker(driver)
    at = one.must("alloc", size)
    assert driver.used_mib() == lost_mib
    one.must("free", at)
    assert driver.used_mib() == 0


@pytest.mark.parametrize(
    ("shape", "per_block"),
    [((256, 256), 32), ((1000, 1000), 2), ((500, 300), 10), ((3, 5000), 6), ((5000, 3), 51), ((65536, 0), 4)],
)
def test_so_many_arrays_share_a_block_as_on_the_gpu(fake_driver, worker, shape, per_block):
    driver = fake_driver(ROOMY)
    one = worker(driver)
    made = [one.must("array", *shape) for _ in range(per_block)]
    assert driver.used_mib() == 2
    made.append(one.must("array", *shape))
    assert driver.used_mib() == 4
    for array in made:
        one.must("array_destroy", array)
    assert driver.used_mib() == 0


def test_arrays_and_linear_memory_never_share_a_block_and_contexts_do_not_either(fake_driver, worker):
    driver = fake_driver(ROOMY)
    one = worker(driver)
    one.must("alloc", 1)
    one.must("array", 16, 16)
    assert driver.used_mib() == 4
    one.must("context", 0)
    one.must("alloc", 1)
    assert driver.used_mib() == 6


def test_a_full_card_still_has_room_in_its_blocks(fake_driver, worker):
    one = worker(fake_driver("card h200 memory_mib=2 context_mib=0"))
    one.must("alloc", MIB)
    one.must("alloc", MIB)
    assert one.ask("alloc", 1)[0] == OUT_OF_MEMORY


def test_a_small_piece_opened_by_another_process_is_the_same_memory(fake_driver, worker):
    driver = fake_driver(ROOMY)
    owner, guest = worker(driver), worker(driver)
    owner.must("alloc", 512)
    at = owner.must("alloc", 4096)
    owner.must("write", at, "shared")
    there = guest.must("ipc_open", owner.must("ipc_get", at))
    assert guest.must("read", there, 6) == "shared"
    assert driver.used_mib() == 2


@pytest.mark.parametrize(("size", "lost_mib"), [(4, 2), (BLOCK + 1, 4), (100 * MIB, 100), (3 << 30, 3072)])
def test_variables_of_a_module_lose_pages_from_load_to_unload(fake_driver, worker, size, lost_mib):
    driver = fake_driver(ROOMY)
    one = worker(driver)
    module = one.must("load", f".version 8.0\n.target sm_80\n.visible .global .align 4 .b8 table[{size}];\n")
    assert driver.used_mib() == lost_mib
    one.must("unload", module)
    assert driver.used_mib() == 0


def test_a_module_whose_variables_do_not_fit_is_refused(fake_driver, worker):
    driver = fake_driver("card h200 memory_mib=10 context_mib=0")
    assert worker(driver).ask("load", f".global .align 4 .b8 table[{11 * MIB}];\n")[0] == OUT_OF_MEMORY
    assert driver.used_mib() == 0
