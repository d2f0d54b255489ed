"""The fake loses what a GPU lost: steps that were measured on an H200, replayed, and the sizes of arrays."""

from __future__ import annotations

import csv
import re

import pytest

from tests.built import REPOSITORY

MIB = 1 << 20
BLOCK = 2 * MIB
ROOMY = "gpu h200 context_mib=0"
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


def test_the_address_reports_the_block(fake_driver, worker):
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


SHAPE = re.compile(
    r"(\d+)x(\d+)x(\d+)(?: levels=(\d+))? format=0x(\w+) channels=(\d+)(?: flags=(\d+))?(?: levels=(\d+))?"
)
LARGEST_FORMAT = 0x20
"""The fake has no compressed formats."""


def measured_arrays(part: str):
    """[shape, levels, arrays, what the row states for them] of each row."""
    for row in csv.DictReader((REPOSITORY / "bench/granularity/results-h200.csv").read_text().splitlines()):
        found = SHAPE.match(row["case"]) if row["part"] == part else None
        if found is not None and int(found[5], 16) <= LARGEST_FORMAT:
            width, height, depth, levels, _, channels, flags, more = (int(number or 0) for number in found.groups())
            shape = [width, height, depth, int(found[5], 16), channels, flags]
            yield shape, levels or more, int(row["count"]), int(row["lost_bytes"])


@pytest.mark.parametrize(("part", "rows"), [("arrays", 468), ("mipmaps", 48)])
def test_arrays_lose_what_they_lost_on_the_gpu(fake_driver, worker, part, rows):
    one = worker(fake_driver(ROOMY))
    measured = list(measured_arrays(part))
    assert len(measured) == rows
    lost = [one.must("arrays_lose", shape, levels, count)[-1] for shape, levels, count, _ in measured]
    assert lost == [expected for *_, expected in measured]


MOST = 1099
"""Arrays that were made in search of the second block."""


def test_so_many_arrays_share_a_block_as_on_the_gpu(fake_driver, worker):
    """`count` of them fitted into what the first one took; one more took more."""
    one = worker(fake_driver(ROOMY))
    wrong, rows = [], list(measured_arrays("per block"))
    assert len(rows) == 483
    for shape, levels, count, first in rows:
        lost = one.must("arrays_lose", shape, levels, count if count == MOST else count + 1)
        if [lost[0], lost[count - 1], lost[-1] > first] != [first, first, count < MOST]:
            wrong.append((shape, levels, count, lost[0], lost[-1]))
    assert wrong == []


def test_arrays_and_linear_memory_never_share_a_block_and_contexts_do_not_either(fake_driver, worker):
    driver = fake_driver(ROOMY)
    one = worker(driver)
    one.must("alloc", 1)
    one.must("array", 16, 16)
    assert driver.used_mib() == 4
    one.must("context", 0)
    one.must("alloc", 1)
    assert driver.used_mib() == 6


def test_a_full_gpu_still_allocates_from_its_blocks(fake_driver, worker):
    one = worker(fake_driver("gpu h200 memory_mib=2 context_mib=0"))
    one.must("alloc", MIB)
    one.must("alloc", MIB)
    assert one.request("alloc", 1)[0] == OUT_OF_MEMORY


def test_a_small_part_opened_by_another_process_is_the_same_memory(fake_driver, worker):
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
    driver = fake_driver("gpu h200 memory_mib=10 context_mib=0")
    assert worker(driver).request("load", f".global .align 4 .b8 table[{11 * MIB}];\n")[0] == OUT_OF_MEMORY
    assert driver.used_mib() == 0
