"""Kernels take time, and the processes of a GPU share its time."""

from __future__ import annotations

import time

NOT_READY = 600


def milliseconds(call) -> float:
    start = time.monotonic()
    call()
    return (time.monotonic() - start) * 1000


def test_a_kernel_lasts_for_the_time_in_its_parameter(fake_driver, worker):
    one = worker(fake_driver())

    def launch_and_wait() -> None:
        one.must("launch", 200_000)
        assert one.request("query")[0] == NOT_READY
        one.must("synchronize")

    assert 200 <= milliseconds(launch_and_wait) < 1000
    one.must("query")


def test_two_processes_have_half_of_the_gpu_each_while_both_have_work(fake_driver, worker):
    driver = fake_driver()
    first, second = worker(driver), worker(driver)
    began = time.monotonic()
    first.must("launch", 300_000)
    second.must("launch", 100_000)
    second.must("synchronize")
    assert 0.2 <= time.monotonic() - began < 0.35, "100 ms of work at half speed"
    first.must("synchronize")
    assert 0.4 <= time.monotonic() - began < 0.6, "all of it, one after the other or not"


def test_kernels_of_one_process_run_one_after_the_other(fake_driver, worker):
    one = worker(fake_driver())
    began = time.monotonic()
    one.must("launch", 100_000)
    one.must("launch", 100_000)
    one.must("synchronize")
    assert 0.2 <= time.monotonic() - began < 0.4


def test_a_killed_process_leaves_its_time_to_the_others(fake_driver, worker):
    driver = fake_driver()
    first, second = worker(driver), worker(driver)
    first.must("launch", 5_000_000)
    second.must("launch", 200_000)
    first.end()
    assert milliseconds(lambda: second.must("synchronize")) < 1000


def test_kernels_on_two_gpus_do_not(fake_driver, worker):
    driver = fake_driver("gpu h200 count=2 context_mib=0")
    first, second = worker(driver, device=0), worker(driver, device=1)
    first.must("launch", 5_000_000)
    second.must("launch", 10_000)
    assert milliseconds(lambda: second.must("synchronize")) < 3000


def test_utilisation_is_what_ran(fake_driver, worker, nvml_python):
    driver = fake_driver()
    one = worker(driver)
    one.must("launch", 100_000_000)  # far longer than Python takes to start on a busy machine
    code = """
import time
h = n.nvmlDeviceGetHandleByIndex(0)
end = time.monotonic() + 60
while n.nvmlDeviceGetUtilizationRates(h).gpu < 90 and time.monotonic() < end: time.sleep(0.02)
since_us, processes = int(time.time() * 1e6), []
while not processes and time.monotonic() < end:
    try: processes = [(p.pid, p.smUtil) for p in n.nvmlDeviceGetProcessUtilization(h, since_us)]
    except n.NVMLError_NotFound: time.sleep(0.02)
print(json.dumps([n.nvmlDeviceGetUtilizationRates(h).gpu, processes]))
"""
    busy, processes = nvml_python(driver, code)
    assert busy >= 90
    assert [pid for pid, _ in processes] == [one.process.pid]
