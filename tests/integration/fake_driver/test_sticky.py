"""After a kernel failed, the process gets its error from the calls that an H200 answers so, and from no other."""

from __future__ import annotations

import pytest

CONTEXT_IS_DESTROYED = 709


def check(one, error):
    _, failing, succeeding = one.request("every_call")
    assert failing == dict.fromkeys(failing, error)
    assert succeeding == dict.fromkeys(succeeding, 0)


@pytest.mark.parametrize("error", [700, 710, 719])
def test_a_failed_kernel_leaves_its_error_to_its_process_alone(fake_driver, worker, error):
    driver = fake_driver()
    one, other = worker(driver), worker(driver)
    one.must("prepare")
    one.must("launch_broken", error)
    assert one.request("synchronize") == [error]
    check(one, error)
    other.must("alloc", 512)
    other.must("launch", 10)
    other.must("synchronize")


def test_an_error_set_from_outside_reaches_a_running_process(fake_driver, worker):
    driver = fake_driver()
    one = worker(driver)
    one.must("prepare")
    driver.ctl("trap", one.process.pid, 719)
    check(one, 719)


def test_a_reset_does_not_revive_the_process(fake_driver, worker):
    one = worker(fake_driver(), device=None)
    one.must("cuInit")
    one.must("retain", 0)
    one.must("launch_broken", 719)
    assert one.request("synchronize") == [719]
    assert one.request("reset") == [0, CONTEXT_IS_DESTROYED, 719]


def test_without_a_failed_kernel_every_call_succeeds(fake_driver, worker):
    one = worker(fake_driver())
    one.must("prepare")
    check(one, 0)
