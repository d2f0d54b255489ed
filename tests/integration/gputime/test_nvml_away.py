"""An arbiter whose NVML hangs, and whose child is killed again and again: memory is leased and limits of GPU time are enforced meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from tests.integration.gputime.conftest import Node, until
from tests.integration.gputime.test_enforcement import status
from tests.integration.gputime.test_sharing import shares


def children(node: Node) -> list[int]:
    """Pids of the arbiter's NVML processes."""
    found = []
    for task in Path(f"/proc/{node.arbiter.pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return [pid for pid in found if b"\0nvml\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_memory_is_leased_and_a_cap_is_enforced_while_nvml_hangs_and_its_child_is_killed(node: Node) -> None:
    program = node.run("capped", core=30)
    until(lambda: status(node, "capped").memory_state == "enforced")
    node.driver.ctl("fault", "hang", "nvmlInitWithFlags", "seconds=1000")
    over = threading.Event()
    killed: set[int] = set()

    def kill_all() -> None:
        while not over.wait(0.2):
            for pid in children(node):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    killing = threading.Thread(target=kill_all)
    killing.start()
    try:
        until(lambda: {one.reason for one in status(node, "capped").unenforced} == {"nvml"}, 5.0 + 3.0)
        assert status(node, "capped").gpu_time_state == "enforced"
        program.do("work_on(5_000)")
        (got,) = shares(node, 2.0, "capped")
        assert 20 < got < 40, "30 % were requested"
        used = status(node, "capped").gpus[0].leased_bytes
        program.do("fill('cuMemsetD8_v2')")
        assert status(node, "capped").gpus[0].leased_bytes >= used
        other = node.run("late")
        other.do("fill('cuMemsetD8_v2')")
        assert node.arbiter.poll() is None
    finally:
        over.set()
        killing.join()
    assert len(killed) >= 2
    node.driver.ctl("fault", "none")
    until(lambda: not status(node, "capped").unenforced, 60.0)
    assert node.misuses() == ""
