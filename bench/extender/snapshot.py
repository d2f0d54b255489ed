"""How long the filter takes while others read snapshots, over HTTP, and what those weigh.

A `tangram-extender` process lists nodes with 8 GPUs and pods on them. One connection has pods placed on all nodes, one call after another, without and with others that call for
GET /snapshot again and again: one reader, `gzip` one that has it compressed, `unread` eight that never read what they called for, `eight` that read. Each is
compared with the calls just before it. `more_mib` is by how much the extender's resident memory was larger at most.

    python -m bench.extender.snapshot [--nodes 10000 --seconds 12]        writes snapshot.csv beside this file
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from typing import Any

import numpy as np

from bench.calls import Kept
from bench.extender.filter import HERE, NAME, bodies, ready, start_extender
from bench.floods.__main__ import commit_of_tree
from bench.process import memory_mib
from bench.rows import append
from tests.builders import node, pod, share
from tests.fake_api import FakeApi

READERS = {"one": 1, "gzip": 1, "eight": 8, "unread": 8}


def read_one(port: int, how: str) -> None:
    """Snapshots, until it is ended. Prints the size of each."""
    while True:
        with suppress(OSError):
            if how == "unread":
                with socket.create_connection(("127.0.0.1", port), 30) as sock:
                    sock.sendall(b"GET /snapshot HTTP/1.1\r\nHost: x\r\n\r\n")
                    time.sleep(5)
                continue
            headers = {"Accept-Encoding": "gzip"} if how == "gzip" else {}
            with urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}/snapshot", headers=headers)
            ) as answer:
                print(len(answer.read()), flush=True)
            continue
        time.sleep(0.1)


def read_all(port: int, how: str) -> None:
    """By as many readers as it has."""
    for _ in range(READERS[how] - 1):
        threading.Thread(target=read_one, args=(port, how), daemon=True).start()
    read_one(port, how)


def calls_for(seconds: float, port: int, names: list[str], pid: int) -> tuple[np.ndarray, float]:
    """Milliseconds of each call, and the most memory."""
    took, most_mib, kept = list[float](), 0.0, Kept(port)
    requests = list(bodies(names, 60, "chunks", "share", "fragmentation"))
    ends_s = time.monotonic() + seconds
    for at in count():
        if time.monotonic() > ends_s:
            break
        began = time.perf_counter()
        kept.send(requests[at % len(requests)])
        took.append((time.perf_counter() - began) * 1000)
        if at % 20 == 0:
            most_mib = max(most_mib, memory_mib(pid))
    kept.close()
    return np.array(took), most_mib


async def measure(nodes: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each kind of readers."""
    rows = []
    async with FakeApi() as api:
        built = [node(NAME.format(at // 250, at % 250)).with_gpus(8) for at in range(nodes)]
        for one in built:
            api.put(one.plain())
        for at in range(2 * nodes):
            where = built[at % nodes]
            bound = pod(f"old-{at}").asking(mib=2048).on(where.name).assigned(share(where.gpus[at % 8], 2048))
            api.put(bound.with_phase("Running").plain())
        process, port, metrics_port = start_extender(api.port)
        try:
            await asyncio.wait_for(ready(metrics_port), 90)
            names = [one.name for one in built]
            await asyncio.to_thread(calls_for, 3, port, names, process.pid)
            for how in READERS:
                alone, alone_mib = await asyncio.to_thread(calls_for, seconds, port, names, process.pid)
                command = [sys.executable, "-m", "bench.extender.snapshot", "--read", how, "--port", str(port)]
                reader = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
                await asyncio.sleep(1)
                try:
                    beside, mib = await asyncio.to_thread(calls_for, seconds, port, names, process.pid)
                finally:
                    reader.kill()
                    sizes = reader.communicate()[0].split()
                (p50, p99), (alone_p50, alone_p99) = (np.percentile(of, (50, 99)).tolist() for of in (beside, alone))
                rows.append({
                    "nodes": nodes, "readers": how, "snapshots_read": len(sizes), "mib": round(int(sizes[0]) / 2**20, 1) if sizes else "", "calls": len(beside),
                    "alone_p50_ms": round(alone_p50, 2), "alone_p99_ms": round(alone_p99, 2), "p50_ms": round(p50, 2), "p99_ms": round(p99, 2),
                    "p99_to_alone": round(p99 / alone_p99, 2), "max_ms": round(float(beside.max()), 2), "more_mib": round(mib - alone_mib, 1),
                })  # fmt: skip
                print(rows[-1], flush=True)
        finally:
            process.terminate()
            process.wait()
    return rows


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[10_000])
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--read", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read_all(arguments.port, arguments.read)
    about = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit_of_tree(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
    }
    rows = [
        row | about | {"load": round(os.getloadavg()[0], 1)}
        for nodes in arguments.nodes
        for row in asyncio.run(measure(nodes, arguments.seconds))
    ]
    for row in rows:
        append(HERE / "snapshot.csv", row)


if __name__ == "__main__":
    main()
