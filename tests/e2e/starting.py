"""Processes that start in running containers, one after the other, while something is done to Tangram."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.cluster import Cluster
from tests.e2e.objects import share

PROCESSES, CONTAINERS = 200, 4
STARTER = """
import json, pathlib, subprocess, time
least, took = {least}, []
while len(took) < least or not pathlib.Path("/tmp/over").exists():
    began = time.monotonic()
    ended = subprocess.run(["gpuview", "grab", "1Gi"], capture_output=True, text=True)
    took.append([ended.returncode, time.monotonic() - began, ended.stdout + ended.stderr if ended.returncode else ""])
    time.sleep({pause_s})
print(json.dumps(took))
"""
"""In a container: processes one after the other, so many at least and until there is the file. How each ended, and after how long."""


class Started:
    """What the processes of all containers came to."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float, str]] = []

    def must_have_waited_at_most(self, seconds: float) -> None:
        waits = sorted(took for _, took, _ in self.ends)
        print(f"{len(waits)} processes: p50 {waits[len(waits) // 2]:.2f} s, most {waits[-1]:.2f} s")
        assert len(waits) >= PROCESSES
        assert [end for end in self.ends if end[0]] == []
        assert waits[-1] <= seconds


@contextmanager
def processes_start(cluster: Cluster, namespace: str, *, pause_s: float) -> Iterator[Started]:
    """Meanwhile, in four containers."""
    names, started = [f"busy{at}" for at in range(CONTAINERS)], Started()
    cluster.run(namespace, *(share(name, 2) for name in names))
    code = STARTER.format(least=PROCESSES // CONTAINERS, pause_s=pause_s)
    printed: dict[str, str] = {}

    def run(name: str) -> None:
        printed[name] = cluster.exec(namespace, name, "python3", "-c", code)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield started
    finally:
        for name in names:
            cluster.exec(namespace, name, "touch", "/tmp/over")
        for thread in threads:
            thread.join()
    assert sorted(printed) == names
    started.ends = [(code, took, output) for name in names for code, took, output in json.loads(printed[name])]
