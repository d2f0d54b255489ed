"""Kernels take time, and all processes of a card stand in one queue."""

from __future__ import annotations

import time

NOT_READY = 600


def milliseconds(call) -> float:
    start = time.monotonic()
    call()
    return (time.monotonic() - start) * 1000


def test_a_kernel_lasts_as_long_as_its_parameter_says(fake_driver, worker):
    one = worker(fake_driver())
    one.must("launch", 60_000)
    assert one.ask("query")[0] == NOT_READY
    assert 40 < milliseconds(lambda: one.must("synchronize")) < 160
    one.must("query")


def test_kernels_of_two_processes_wait_for_each_other(fake_driver, worker):
    driver = fake_driver()
    first, second = worker(driver), worker(driver)
    first.must("launch", 80_000)
    second.must("launch", 10_000)
    assert milliseconds(lambda: second.must("synchronize")) > 70


def test_kernels_on_two_cards_do_not(fake_driver, worker):
    driver = fake_driver("card h200 count=2 context_mib=0")
    first, second = worker(driver, device=0), worker(driver, device=1)
    first.must("launch", 3_000_000)
    second.must("launch", 10_000)
    assert milliseconds(lambda: second.must("synchronize")) < 1500


def test_utilisation_is_what_ran(fake_driver, worker, nvml_python):
    driver = fake_driver()
    one = worker(driver)
    one.must("launch", 1_500_000)
    code = """
import time
h = n.nvmlDeviceGetHandleByIndex(0)
end = time.monotonic() + 1.2
while n.nvmlDeviceGetUtilizationRates(h).gpu < 90 and time.monotonic() < end: time.sleep(0.02)
print(json.dumps([n.nvmlDeviceGetUtilizationRates(h).gpu, [(p.pid, p.smUtil) for p in n.nvmlDeviceGetProcessUtilization(h, 0)]]))
"""
    busy, processes = nvml_python(driver, code)
    assert busy >= 90
    assert [pid for pid, _ in processes] == [one.process.pid]
