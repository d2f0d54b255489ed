"""Calls go wrong as the description, a command or the program's environment says."""

from __future__ import annotations

import time

import pytest

CARD = "card h200 context_mib=0"
OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801


def test_the_nth_allocation_fails_and_no_other(fake_driver, worker):
    one = worker(fake_driver(f"{CARD}\nfault fail cuMemAlloc_v2 nth=2"))
    assert [one.ask("alloc", 512)[0] for _ in range(3)] == [0, OUT_OF_MEMORY, 0]


def test_allocations_of_a_size_fail_until_the_fault_is_removed(fake_driver, worker):
    driver = fake_driver(CARD)
    one = worker(driver)
    driver.ctl("fault", "fail", "cuMemAlloc_v2", "size=4096")
    assert [one.ask("alloc", size)[0] for size in (4096, 512, 4096)] == [OUT_OF_MEMORY, 0, OUT_OF_MEMORY]
    driver.ctl("fault", "none")
    one.must("alloc", 4096)


def test_a_fault_in_the_environment_is_that_programs_alone(fake_driver, worker):
    driver = fake_driver(CARD)
    script = f"fail cuDeviceGetUuid_v2 error={NOT_SUPPORTED}; missing cuMemAllocAsync"
    one, other = worker(driver, TANGRAM_FAKE_FAULTS=script), worker(driver)
    assert one.ask("uuid", 0)[0] == NOT_SUPPORTED
    assert [one.must("found", name) for name in ("cuMemAllocAsync", "cuMemAlloc")] == [False, True]
    other.must("uuid", 0)
    assert other.must("found", "cuMemAllocAsync") is True


def test_a_call_hangs_for_as_long_as_told(fake_driver, worker):
    driver = fake_driver(CARD)
    one = worker(driver)
    driver.ctl("fault", "hang", "cuStreamQuery", "seconds=1")
    start = time.monotonic()
    one.must("query")
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize("line", ["fail", "hang cuStreamQuery", "fail cuInit nth=x", "fail cuInit seconds=1", "burn"])
def test_a_fault_that_is_not_understood_is_refused(fake_driver, line):
    driver = fake_driver(CARD)
    with pytest.raises(AssertionError, match="must be none"):
        driver.ctl("fault", *line.split())
