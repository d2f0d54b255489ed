"""A process that is stopped (SIGSTOP) in the middle of anything delays no other: a kernel driver has the records that are on a page of all processes here."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.fake_driver.conftest import REPOSITORY
from tests.signals import send_signal

MIB = 1 << 20
HERE = Path(__file__).parent
LIMIT_S = 10.0


@pytest.fixture
def driver(fake_driver):
    return fake_driver("gpu h200 memory_mib=1000 context_mib=0")


@pytest.fixture
def stopped(driver, tmp_path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Factory: a process that has stopped at that place."""
    fake, program, started = REPOSITORY / "shim" / "fake", tmp_path / "stop_locked", []
    command = ["gcc", "-std=c11", "-pthread", f"-I{fake}", f"-I{fake}/common"]
    sources = [HERE / "programs" / "stop_locked.c", fake / "common" / "client.c"]
    subprocess.run([*command, "-o", program, *sources], check=True)

    def start(where: str) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([program, where], env=driver.env(), stdout=subprocess.PIPE, text=True))
        until(lambda: stat_of(started[-1].pid) == "T")
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def stat_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def goes_on(process: subprocess.Popen[str]) -> str:
    """What it prints."""
    process.send_signal(signal.SIGCONT)
    return process.communicate(timeout=LIMIT_S)[0].strip()


@pytest.mark.parametrize("where", ["page", "take", "time", "settle"])
def test_others_go_on(driver, owner, stopped, where):
    """Each of these waited for the process, which is stopped for good."""
    one, other = owner(driver), owner(driver)
    first = stopped(where)
    at = one.do("blocks(1)")
    one.do(f"ok(launch('add', {at}, 2 * MIB, 10, 1000))")
    one.suspend(one.COMPUTE, by=other)
    one.resume(one.COMPUTE, by=other)
    one.do("ok(done())")
    assert one.do(f"cell({at})") == 10
    assert driver.used_mib() == 2
    assert goes_on(first) in ("kept", "lost")
    other.do("ok(launch('write', alloc(4), 4, 0, 0)) or ok(done())")


@pytest.mark.parametrize("where", ["page", "time"])
def test_a_process_that_goes_on_finds_that_others_had_the_lock(driver, owner, stopped, where):
    assert goes_on(stopped(where)) == "kept", "nobody wanted it"
    first = stopped(where)
    owner(driver).do("ok(launch('write', alloc(4), 4, 0, 0)) or ok(done())")
    assert goes_on(first) == "lost"


@pytest.mark.parametrize(("others_mib", "says"), [(500, "lost"), (400, "kept")])
def test_memory_stays_within_the_gpus_though_a_stopped_process_had_found_that_its_fits(
    driver, worker, stopped, others_mib, says
):
    first = stopped("take")
    worker(driver).must("alloc", others_mib * MIB)
    assert driver.used_mib() == others_mib
    assert goes_on(first) == says
    worker(driver).must("alloc", (1000 - others_mib) * MIB)


def test_a_kernel_ends_later_and_never_sooner_for_a_process_that_was_stopped_as_it_recorded_time(
    driver, owner, stopped
):
    first = stopped("settle")
    began = time.monotonic()
    owner(driver).do("ok(launch('spin', 50_000)) or ok(done())")
    assert time.monotonic() - began >= 0.05
    assert goes_on(first) == "kept"


def test_a_process_that_is_stopped_at_any_moment_of_its_kernels_delays_no_suspend(driver, owner):
    one, other = owner(driver), owner(driver)
    at = one.do("blocks(1)")
    one.do(f"ok(launch('add', {at}, 2 * MIB, 4000, 0))")
    for _ in range(50):
        send_signal(one.process.pid, signal.SIGSTOP)
        one.suspend(one.COMPUTE, by=other)
        one.resume(one.COMPUTE, by=other)
        send_signal(one.process.pid, signal.SIGCONT)
    one.do("ok(done())")
    assert one.do(f"set(cells({at}, MIB // 2)) == {{4000}}")
