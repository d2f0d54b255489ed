"""Calls fail as the description, a command or the program's environment requests."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

GPU = "gpu h200 context_mib=0"
OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801


def test_the_nth_allocation_fails_and_no_other(fake_driver, worker):
    one = worker(fake_driver(f"{GPU}\nfault fail cuMemAlloc_v2 nth=2"))
    assert [one.request("alloc", 512)[0] for _ in range(3)] == [0, OUT_OF_MEMORY, 0]


def test_allocations_of_a_size_fail_until_the_fault_is_removed(fake_driver, worker):
    driver = fake_driver(GPU)
    one = worker(driver)
    driver.ctl("fault", "fail", "cuMemAlloc_v2", "size=4096")
    assert [one.request("alloc", size)[0] for size in (4096, 512, 4096)] == [OUT_OF_MEMORY, 0, OUT_OF_MEMORY]
    driver.ctl("fault", "none")
    one.must("alloc", 4096)


def test_a_fault_in_the_environment_is_that_programs_alone(fake_driver, worker):
    driver = fake_driver(GPU)
    script = f"fail cuDeviceGetUuid_v2 error={NOT_SUPPORTED}; missing cuMemAllocAsync"
    one, other = worker(driver, TANGRAM_FAKE_FAULTS=script), worker(driver)
    assert one.request("uuid", 0)[0] == NOT_SUPPORTED
    assert [one.must("found", name) for name in ("cuMemAllocAsync", "cuMemAlloc")] == [False, True]
    other.must("uuid", 0)
    assert other.must("found", "cuMemAllocAsync") is True


def test_a_call_hangs_for_as_long_as_reported(fake_driver, worker):
    driver = fake_driver(GPU)
    one = worker(driver)
    driver.ctl("fault", "hang", "cuStreamQuery", "seconds=1")
    start = time.monotonic()
    one.must("query")
    assert time.monotonic() - start >= 1


def missing(one, *symbols: str) -> list[bool]:
    return [not one.must("exported", symbol) for symbol in symbols]


def test_a_missing_name_is_not_found_from_the_start(fake_driver, worker):
    """Every version of the name, with its per-thread twins, and nothing else; the same from the daemon and from the environment."""
    driver = fake_driver(f"{GPU}\nfault missing cuMemAllocAsync")
    one = worker(driver, TANGRAM_FAKE_FAULTS="missing cuMemAlloc")
    assert missing(one, "cuMemAllocAsync", "cuMemAllocAsync_ptsz", "cuMemAlloc", "cuMemAlloc_v2", "cuMemFreeAsync") == [
        True
    ] * 4 + [False]
    assert [one.must("found", name) for name in ("cuMemAllocAsync", "cuMemAlloc", "cuMemFreeAsync")] == [
        False,
        False,
        True,
    ]
    driver.ctl("fault", "none")
    assert missing(worker(driver), "cuMemAllocAsync", "cuMemAlloc") == [False, False]


def test_a_missing_symbol_leaves_its_other_versions(fake_driver, worker):
    one = worker(fake_driver(f"{GPU}\nfault missing cuMemAlloc_v2"))
    assert missing(one, "cuMemAlloc_v2", "cuMemAlloc") == [True, False]


@pytest.mark.parametrize("line", ["fail cuMemcpyHtoD_v2", "hang cuMemAlloc seconds=1", "missing cuMemAlloc_v9"])
def test_a_fault_that_nothing_heeds_is_refused(fake_driver, line):
    with pytest.raises(AssertionError, match=f'found function "{line.split()[1]}", must be one of'):
        fake_driver(GPU).ctl("fault", *line.split())


def test_a_program_with_a_fault_that_nothing_heeds_does_not_start(fake_driver):
    env = fake_driver(GPU).env() | {"TANGRAM_FAKE_FAULTS": "fail cuMemcpyHtoD_v2"}
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    done = subprocess.run(load, env=env, capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert 'found function "cuMemcpyHtoD_v2"' in done.stderr


def test_the_table_of_what_can_fail_has_the_marked_functions_and_no_others():
    fake = Path(__file__).parents[3] / "shim/fake"
    rows = [
        row
        for file in fake.glob("cuda/*.def")
        for row in re.findall(r"^[A-Z]+\((?:[^\n]|\n )+", file.read_text(), re.MULTILINE)
    ]
    marked = [row.split("(")[1].split(",")[0] for row in rows if " fault(" in row]
    assert all(f' fault("{row.split("(")[1].split(",")[0]}", ' in row for row in rows if " fault(" in row)
    assert sorted(marked) == re.findall(r"^F\((\w+)\)", (fake / "common/faultable.def").read_text(), re.MULTILINE)


HANG = """
import time, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
begun = time.monotonic()
n.nvmlDeviceGetMemoryInfo(gpu)
print(time.monotonic() - begun)
"""


def test_a_function_of_nvml_hangs_and_does_not_fail(fake_driver):
    driver = fake_driver(GPU)
    driver.ctl("fault", "hang", "nvmlDeviceGetMemoryInfo", "seconds=1")
    done = subprocess.run([sys.executable, "-c", HANG], env=driver.env(), capture_output=True, text=True, check=True)
    assert 1 <= float(done.stdout) < 10
    driver.ctl("fault", "none")
    done = subprocess.run([sys.executable, "-c", HANG], env=driver.env(), capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1
    with pytest.raises(AssertionError, match="found function"):
        driver.ctl("fault", "fail", "nvmlDeviceGetMemoryInfo")


@pytest.mark.parametrize("line", ["fail", "hang cuStreamQuery", "fail cuInit nth=x", "fail cuInit seconds=1", "burn"])
def test_a_fault_that_is_not_understood_is_refused(fake_driver, line):
    driver = fake_driver(GPU)
    with pytest.raises(AssertionError, match="must be none"):
        driver.ctl("fault", *line.split())
