"""Children that cannot be killed, another driver, and GPUs that are released: when there is a child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvml.driver import DriverIdentity
from nvml.errors import NvmlAway, NvmlHung
from nvml.replacing import EndReason
from nvml.supervisor import TimeLimits
from tests.unit.nvml.double import GPU
from tests.unit.nvml.stand import Stand, stand, wait_for

__all__ = ["stand"]


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40
print(libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, PTRACE_O_TRACEEXIT), flush=True)
sys.stdin.read()
"""


class Kept:
    """A tracer keeps a process at its exit: SIGKILL does not end it, as in an uninterruptible sleep of a driver."""

    def __init__(self, pid: int) -> None:
        self._tracer = subprocess.Popen(
            [sys.executable, "-c", TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._tracer.stdout is not None
        if self._tracer.stdout.readline() != "0\n":
            self.let_go()
            pytest.skip("no process may be traced here")

    def let_go(self) -> None:
        self._tracer.communicate()


def hang_for_good(stand: Stand) -> Kept:
    """The child that answers now hangs, and cannot be killed."""
    pid = stand.supervisor.pid
    assert pid is not None
    kept = Kept(pid)
    stand.does(Count="hang")
    with pytest.raises(NvmlHung):
        stand.supervisor.nvml.count()
    stand.does()
    wait_for(lambda: stand.supervisor.abandoned and stand.supervisor.pid != pid)
    return kept


def test_a_child_that_cannot_be_killed_is_abandoned_and_a_third_waits_until_one_ends(stand: Stand) -> None:
    started = stand.opened(TimeLimits(10.0, 0.3, end_s=0.3))
    first = hang_for_good(stand)
    stand.back()
    second = hang_for_good(stand)
    wait_for(lambda: "cannot be killed: no other is started until one ends" in started.failing)
    assert started.abandoned == 2
    assert list(started.abandoned_pids) == stand.children
    assert len(stand.children) == 2
    with pytest.raises(NvmlAway, match=r"2 NVML processes \(\d+, \d+\) hang in the driver"):
        started.nvml.count()
    first.let_go()
    stand.back()
    assert started.abandoned == 1
    second.let_go()
    wait_for(lambda: started.abandoned == 0)
    assert len(stand.children) == 3


def test_another_driver_ends_the_wait_for_children_that_cannot_be_killed(stand: Stand) -> None:
    started = stand.opened(TimeLimits(10.0, 0.3, end_s=0.3))
    kept = [hang_for_good(stand)]
    stand.back()
    kept.append(hang_for_good(stand))
    wait_for(lambda: "cannot be killed" in started.failing)
    stand.driver = DriverIdentity((1,), "595", 2)
    stand.back()
    assert started.abandoned == 2
    for one in kept:
        one.let_go()
    wait_for(lambda: started.abandoned == 0)


@pytest.mark.parametrize(
    "driver", [DriverIdentity((2,), "580", 1), DriverIdentity((1,), "595", 1), DriverIdentity((1,), "580", 2)], ids=["library", "version", "module"]
)  # fmt: skip
def test_a_child_that_has_another_driver_open_than_the_one_that_is_there_is_replaced(
    stand: Stand, driver: DriverIdentity
) -> None:
    started = stand.opened()
    stand.does(Processes="hang")
    with pytest.raises(NvmlHung):
        started.nvml.processes(GPU)
    stand.does()
    stand.back()
    stand.driver = driver
    wait_for(lambda: started.ends[EndReason.DRIVER] == 1)
    stand.back()
    assert started.nvml.processes(GPU), "what hung with the driver before does not count for this one"
    assert len(stand.children) == 3


def test_a_driver_that_changes_while_it_is_opened_is_opened_again(stand: Stand) -> None:
    stand.does(Open="slow=0.5")
    stand.start()
    wait_for(lambda: stand.script.with_suffix(".log").exists() and stand.children)
    stand.driver = DriverIdentity((2,), "595", 2)
    stand.does()
    wait_for(lambda: stand.supervisor.ends == {EndReason.DRIVER: 1})
    stand.back()


def test_while_nvml_is_released_there_is_no_child(stand: Stand) -> None:
    started = stand.opened()
    (pid,) = stand.children
    stand.released.touch()
    wait_for(lambda: started.failing.startswith("NVML is released, as the file"))
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(NvmlAway, match="remove it when the GPUs may be used again"):
        started.await_open(0.2)
    assert len(stand.children) == 1
    stand.released.unlink()
    stand.back()


def test_a_start_ends_when_nvml_is_released(stand: Stand) -> None:
    stand.does(Open="hang")
    started = stand.start(TimeLimits(start_s=60.0))
    wait_for(lambda: started.pid)
    stand.released.touch()
    wait_for(lambda: started.ends == {EndReason.RELEASED: 1})
    stand.does()
    stand.released.unlink()
    stand.back()
