"""NVML in a container: its own memory with contexts, its own processes, its own share of the GPU's time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, Stage, wait_for

LOOK = """
import ctypes, json, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
def listed(name, width):
    call, capacity = getattr(ctypes.CDLL("libnvidia-ml.so.1"), name), 64
    count, raw = ctypes.c_uint(capacity), ctypes.create_string_buffer(width * capacity)
    assert call(gpu, ctypes.byref(count), raw) == 0
    at = lambda i: raw.raw[i * width:]
    return sorted([int.from_bytes(at(i)[:4], "little"), int.from_bytes(at(i)[8:16], "little") >> 20] for i in range(count.value))
def samples():
    try:
        return sorted(s.pid for s in n.nvmlDeviceGetProcessUtilization(gpu, 0))
    except n.NVMLError_NotFound:
        return []
memory = n.nvmlDeviceGetMemoryInfo(gpu)
capacity = ctypes.c_uint(0)
few = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(capacity), None)
print(json.dumps({
    "memory": [memory.total >> 20, memory.used >> 20],
    "compute": [listed(f"nvmlDeviceGetComputeRunningProcesses{v}", w) for v, w in (("", 16), ("_v2", 24), ("_v3", 24))],
    "graphics": [len(n.nvmlDeviceGetGraphicsRunningProcesses(gpu)), len(n.nvmlDeviceGetMPSComputeRunningProcesses(gpu))],
    "count": [few, capacity.value],
    "busy": samples(), "rate": n.nvmlDeviceGetUtilizationRates(gpu).gpu,
}))
"""


def look(stage: Stage, **env: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(stage.python(LOOK, **env))
    return answer


@pytest.fixture
def neighbour(measured_node: Stage, measured: Stage) -> Iterator[Stage]:
    """Another container on the same GPU."""
    stage = Stage(measured_node.build, measured_node.folder, f"{measured.key}-n")
    stage.grant((GPUS[0], 2000))
    yield stage
    stage.close()


def test_a_container_sees_its_own_processes_and_no_neighbours(measured: Stage, neighbour: Stage) -> None:
    mine, theirs = measured.worker(), neighbour.worker()
    mine.must("alloc(100)")
    theirs.must("alloc(200)")

    def seen(stage: Stage, pid: int, mib: int) -> bool:
        return look(stage)["compute"] == [[[pid, mib]]] * 3

    wait_for(lambda: seen(measured, mine.pid, CONTEXT_MIB + 100), seconds=20)
    wait_for(lambda: seen(neighbour, theirs.pid, CONTEXT_MIB + 200), seconds=20)
    without = look(measured, LD_PRELOAD="")["compute"]
    assert {mine.pid, theirs.pid} <= {pid for pid, _ in without[0]}, "the driver itself lists all"


def test_memory_that_is_used_includes_contexts(measured: Stage) -> None:
    measured.worker().must("alloc(100)")
    total, used = look(measured)["memory"]
    assert total == 1000
    assert CONTEXT_MIB + 100 <= used <= CONTEXT_MIB + 100 + 128, "at most two chunks are leased beside it"


def test_a_list_without_a_buffer_returns_the_number_of_processes(measured: Stage) -> None:
    measured.worker()
    assert look(measured)["count"] == [7, 1]
    assert look(measured)["graphics"] == [0, 0]


def test_utilisation_is_the_containers_own(measured: Stage, neighbour: Stage) -> None:
    mine, theirs = measured.worker(), neighbour.worker()
    theirs.must("busy(3000)")
    wait_for(lambda: look(neighbour)["busy"] == [theirs.pid])
    idle = look(measured)
    assert (idle["busy"], idle["rate"]) == ([], 0)
    mine.must("busy(1)")


def test_a_program_that_only_queries_is_in_no_list(measured: Stage) -> None:
    assert look(measured)["compute"] == [[], [], []]


def test_nvidia_smi_shows_a_containers_own_processes(measured: Stage, neighbour: Stage) -> None:
    mine, theirs = measured.worker(), neighbour.worker()
    smi = measured.build / "fake/nvidia-smi"
    done = subprocess.run([smi], env=measured.env(), capture_output=True, text=True, check=True, timeout=30)
    words = done.stdout.split()
    assert str(mine.pid) in words
    assert str(theirs.pid) not in words


def test_an_arbiter_that_is_away_makes_lists_empty_and_breaks_nothing(own_measured: Stage) -> None:
    own_measured.worker().must("alloc(10)")
    own_measured.stop_arbiter()
    assert look(own_measured)["compute"] == [[], [], []]


def test_a_container_without_a_grant_for_the_gpu_sees_it_as_it_is(measured: Stage) -> None:
    other = Stage(measured.build, measured.folder, f"{measured.key}-x")
    other.grant((GPUS[1], 500))
    mine = measured.worker()
    lists = look(other)["compute"]
    assert mine.pid in {pid for pid, _ in lists[0]}


FORKS = """
import ctypes, os, signal, sys, threading, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
call = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetComputeRunningProcesses_v3
def listed():
    count, raw = ctypes.c_uint(64), ctypes.create_string_buffer(24 * 64)
    return call(gpu, ctypes.byref(count), raw)
assert listed() == 0
print("ready", flush=True)
sys.stdin.readline()
waits, children = threading.Thread(target=listed), []
wait_fd, go_fd = os.pipe()
waits.start()
while waits.is_alive():
    waits.join(0.3)
    if (child := os.fork()) == 0:
        os.close(go_fd)
        signal.alarm(20)
        os.read(wait_fd, 1)
        os._exit(listed())
    children.append(child)
print("forked", flush=True)
sys.stdin.readline()
os.close(go_fd)
print(*[os.waitpid(child, 0)[1] for child in children], flush=True)
"""


def test_a_child_that_was_forked_while_a_list_was_waited_for_can_request_one(own_measured: Stage) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=own_measured.env(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def exchange(line: str) -> str:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(line)
        program.stdin.flush()
        return program.stdout.readline().strip()

    with program:
        assert exchange("") == "ready"
        own_measured.signal_arbiter(signal.SIGSTOP)
        assert exchange("fork\n") == "forked"
        own_measured.signal_arbiter(signal.SIGCONT)
        ends = exchange("go\n").split()
    assert len(ends) >= 2
    assert set(ends) == {"0"}, "no list, or killed by the alarm"
