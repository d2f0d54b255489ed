"""Memory is counted over all processes, and a process that is gone has nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.built import REPOSITORY

OUT_OF_MEMORY, INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT = 2, 1, 3, 201
MIB = 1 << 20
HERE = Path(__file__).parent


def until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    """Whether the condition becomes true: the daemon handles a hang-up after an unknown delay."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def test_memory_of_two_processes_adds_up_and_a_full_gpu_refuses_both(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    first, second = worker(driver), worker(driver)
    first.must("alloc", 600 * MIB)
    second.must("alloc", 400 * MIB)
    assert first.request("alloc", 1)[0] == OUT_OF_MEMORY
    assert second.request("alloc", 1)[0] == OUT_OF_MEMORY
    assert first.request("info") == [0, 0, 1000 * MIB]
    assert driver.used_mib() == 1000


def test_freed_memory_is_there_for_the_neighbour(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    first, second = worker(driver), worker(driver)
    at = first.must("alloc", 1000 * MIB)
    first.must("free", at)
    second.must("alloc", 1000 * MIB)


def test_a_refused_allocation_takes_nothing(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=100 context_mib=0")
    one = worker(driver)
    assert one.request("alloc", 101 * MIB)[0] == OUT_OF_MEMORY
    assert one.request("alloc", 1 << 62)[0] == OUT_OF_MEMORY
    assert one.request("alloc", 0)[0] == INVALID_VALUE
    assert driver.used_mib() == 0


def test_the_status_of_all_processes_is_of_one_moment(fake_driver, worker):
    """Else what one gave and the other took in between counts for both."""
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    busy = [worker(driver) for _ in range(2)]
    for each in busy:
        each.process.stdin.write(f'["churn", {100 * MIB}]\n')
        each.process.stdin.flush()
    both = 0
    for _ in range(500):
        gpu, *held = (int(mib) for mib in re.findall(r"used_mib=(\d+)", driver.ctl("status")))
        assert gpu == sum(held)
        both += len(held) == 2
    assert both > 0


def test_all_memory_of_a_killed_process_is_free_at_once(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=100")
    victim, observer = worker(driver), worker(driver)
    victim.must("alloc", 700 * MIB)
    assert driver.used_mib() == 900
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    assert until(lambda: driver.used_mib() == 100)
    observer.must("alloc", 900 * MIB)


def test_a_process_killed_while_it_counts_leaves_exact_sums(fake_driver, worker, tmp_path):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    fake = REPOSITORY / "shim" / "fake"
    program = tmp_path / "die_locked"
    sources = [
        HERE / "programs" / "die_locked.c",
        fake / "common" / "page.c",
        fake / "common" / "client.c",
    ]
    command = ["gcc", "-std=c11", "-pthread", f"-I{fake}", f"-I{fake}/common", "-o", program, *sources]
    subprocess.run(command, check=True)
    observer = worker(driver)
    observer.must("alloc", 300 * MIB)
    died = subprocess.run([program], env=driver.env(), check=False)
    assert died.returncode == -signal.SIGKILL
    observer.must("alloc", 700 * MIB)
    assert driver.used_mib() == 1000


def test_a_context_costs_memory_while_it_lives(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=300")
    one = worker(driver, device=None)
    one.must("cuInit")
    assert driver.used_mib() == 0
    one.must("retain", 0)
    one.must("retain", 0)
    assert driver.used_mib() == 300
    one.must("release", 0)
    one.must("release", 0)
    assert driver.used_mib() == 0


def test_what_a_context_held_goes_with_it(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=10")
    one = worker(driver, device=None)
    one.must("cuInit")
    one.must("retain", 0)
    for _ in range(5):
        one.must("alloc", 100 * MIB)
    one.must("release", 0)
    assert driver.used_mib() == 0


def test_a_pointer_that_is_not_ours_is_refused_and_nothing_changes(fake_driver, worker):
    one = worker(fake_driver())
    at = one.must("alloc", MIB)
    assert one.request("free", 0x1234)[0] == INVALID_VALUE
    assert one.request("free", at + 512)[0] == INVALID_VALUE
    one.must("free", at)
    assert one.request("free", at)[0] == INVALID_VALUE
    one.must("free", 0)


def test_values_survive_in_device_memory(fake_driver, worker):
    one = worker(fake_driver())
    at = one.must("alloc", MIB)
    one.must("write", at + 1000, "what was written")
    assert one.must("read", at + 1000, 16) == "what was written"
    assert one.request("write", at + MIB - 4, "too long")[0] == INVALID_VALUE


def test_memory_of_a_gpu_costs_no_memory_of_the_machine(fake_driver, worker):
    one = worker(fake_driver("gpu h200 context_mib=0"))
    one.must("alloc", 139 << 30)
    status = Path(f"/proc/{one.process.pid}/status").read_text().splitlines()
    resident_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident_kib < 100 * 1024


def test_memory_opened_by_another_process_is_the_same_and_counted_once(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    owner, guest = worker(driver), worker(driver)
    at = owner.must("alloc", 300 * MIB)
    owner.must("write", at, "shared")
    there = guest.must("ipc_open", owner.must("ipc_get", at))
    assert guest.must("read", there, 6) == "shared"
    guest.must("write", there, "SHARED")
    assert owner.must("read", at, 6) == "SHARED"
    assert driver.used_mib() == 300


def test_shared_memory_lives_until_the_last_holder_lets_go(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    owner, guest = worker(driver), worker(driver)
    at = owner.must("alloc", 300 * MIB)
    there = guest.must("ipc_open", owner.must("ipc_get", at))
    owner.must("free", at)
    assert driver.status()[0].processes[guest.process.pid] == 300
    assert driver.used_mib() == 300
    guest.must("ipc_close", there)
    assert driver.used_mib() == 0


def test_shared_memory_survives_the_death_of_its_maker(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=0")
    owner, guest = worker(driver), worker(driver)
    at = owner.must("alloc", 300 * MIB)
    owner.must("write", at, "still here")
    there = guest.must("ipc_open", owner.must("ipc_get", at))
    owner.end()
    assert until(lambda: owner.process.pid not in driver.status()[0].processes)
    assert driver.used_mib() == 300
    assert guest.must("read", there, 10) == "still here"
    guest.end()
    assert until(lambda: driver.used_mib() == 0)


def test_cuda_is_not_usable_in_a_child_after_fork(fake_driver, worker):
    one = worker(fake_driver())
    assert one.request("forked_init")[0] == NOT_INITIALIZED
    one.must("alloc", MIB)


def test_a_fork_before_cuda_starts_is_no_obstacle(fake_driver, worker):
    one = worker(fake_driver(), device=None)
    assert one.request("forked_init")[0] == 0
    one.must("cuInit")


def test_nothing_works_before_cuinit_and_nothing_without_a_context(fake_driver, worker):
    one = worker(fake_driver(), device=None)
    assert one.request("alloc", MIB)[0] == NOT_INITIALIZED
    one.must("cuInit")
    assert one.request("alloc", MIB)[0] == INVALID_CONTEXT


def test_cuda_visible_devices_chooses_by_index_and_by_uuid(fake_driver, worker):
    driver = fake_driver("gpu t4\ngpu h200\ngpu a10")
    names = {"2,0": ["NVIDIA A10", "Tesla T4"], "1": ["NVIDIA H200"], driver.status()[1].uuid: ["NVIDIA H200"]}
    for visible, expected in names.items():
        one = worker(driver, device=None, CUDA_VISIBLE_DEVICES=visible)
        one.must("cuInit")
        assert [one.must("name", i) for i in range(one.must("count"))] == expected
    assert worker(driver, device=None, CUDA_VISIBLE_DEVICES="").request("cuInit")[0] == 100
