"""The arbiter is killed again and again, and started again by its supervisor: no process that starts meanwhile fails, or waits for long.

Each kill comes when the spare arbiter is loaded, which takes a second of a processor; before that a restart takes as long.
Three kills and 24 processes are always made; `make faults` makes 20 and 200 (here TANGRAM_RESTART_KILLS), and prints how long they waited.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gputime.conftest import Node, until
from tests.signals import send_signal

KILLS = int(os.environ.get("TANGRAM_RESTART_KILLS", "3"))
PROCESSES = KILLS * 10 if KILLS > 3 else 24
WAITS_S = 10.0
"""No process waits longer."""
GRACE_S = 1.0
"""For this long after its start the arbiter leases nothing. An arbiter that is killed before that leases nothing at all."""
CONTAINERS, AT_A_TIME = 4, 4
STARTS = """
import ctypes, json, time
cuda = ctypes.CDLL("libcuda.so.1")
at, context = ctypes.c_uint64(), ctypes.c_void_p()
began = time.monotonic()
codes = [cuda.cuInit(0), cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)]
codes += [cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1 << 20)) for _ in range(3)]
print(json.dumps([codes, time.monotonic() - began]))
"""


@pytest.fixture
def node(library: Path) -> Iterator[Node]:
    made = Node(library, module="arbiter.supervisor", grace_ms=int(GRACE_S * 1000))
    yield made
    made.close()


def arbiter_of(node: Node) -> int:
    """Pid of the arbiter that the supervisor runs now; 0 = there is none."""
    pid = node.arbiter.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else 0


def served(node: Node) -> int:
    return node.log().count('"serving"')


def one_process(node: Node, grant: Path) -> tuple[list[int], float]:
    """CUresults, and how long all calls took together."""
    env = node.driver.env(LD_PRELOAD=f"{node.library}:{node.kernel}", TANGRAM_GRANT=str(grant))
    ended = subprocess.run([sys.executable, "-S", "-c", STARTS], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    codes, seconds = json.loads(ended.stdout)
    return codes, seconds


@pytest.mark.timeout(120 + 20 * KILLS)
def test_processes_that_start_while_the_arbiter_is_killed_again_and_again_wait_and_none_fails(node: Node) -> None:
    grants = [node.grant(f"c{at}", core=20) for at in range(CONTAINERS)]
    chance, over = random.Random(1), threading.Event()
    found: list[tuple[list[int], float]] = []
    begun = iter(range(PROCESSES))
    failed: list[BaseException] = []

    def start_processes() -> None:
        try:
            for at in begun:
                found.append(one_process(node, grants[at % CONTAINERS]))
                if len(found) + AT_A_TIME < PROCESSES * (kills + 1) / KILLS:
                    continue
                over.wait(0.05)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    kills, restarts_s = 0, []
    threads = [threading.Thread(target=start_processes) for _ in range(AT_A_TIME)]
    for thread in threads:
        thread.start()
    while kills < KILLS:
        time.sleep(GRACE_S + 2 * chance.random())
        until(lambda kills=kills: node.log().count("a spare arbiter is loaded") > kills, 60)
        pid, times = arbiter_of(node), served(node)
        send_signal(pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda times=times: served(node) > times, 30)
        restarts_s.append(time.monotonic() - began)
        kills += 1
    over.set()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    waits = sorted(seconds for _, seconds in found)
    print(
        f"{len(found)} processes, {KILLS} kills: waits p50 {waits[len(waits) // 2]:.2f} s, most {waits[-1]:.2f} s; "
        f"the arbiter served again after {min(restarts_s):.2f} to {max(restarts_s):.2f} s"
    )
    assert len(found) == PROCESSES
    assert [end for end in found if any(end[0])] == []
    assert waits[-1] <= WAITS_S
    assert node.arbiter.poll() is None, "the supervisor lives"
