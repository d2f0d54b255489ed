"""How long kube-scheduler waits for the extender's filter, over HTTP, and what the extender weighs.

A `tangram-extender` process of its own lists nodes with 8 GPUs each from a small API server in this process, and is called, one call
after another over one connection, to place pods that differ. Measured from the first byte sent to the last byte read.
`events` has the watch report pod changes meanwhile. The load at the start shows what other processes used of the machine; the extender's own
processor time a call (with its share of the watch) depends less on them. Memory is the extender's resident size after all calls.
`bare` is what the same requests take to a process with the extender's server that does nothing but send an answer of the same length: all but its own
work, on this machine.

In `pools` nodes have one of `POOLS` labels, and the pods that were seen select their node's: policy `fragmentation` then weighs a pool for each.

    python -m bench.extender [--nodes 1000 --calls 2000 --policies fragmentation]   writes filter.csv beside this file; other rows stay
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np

from bench.calls import Kept, posted, wait_for
from bench.process import cpu_s, memory_mib
from tests.builders import NodeBuilder, node, pod, share
from tests.fake_api import FakeApi
from tests.ports import free_port

HERE = Path(__file__).parent
SIZES_MIB = (4_096, 8_192, 10_240, 16_384, 24_576, 40_960)
START_LIMIT_S = 60
GPU_MIB = 81_920
NAME = "gke-production-gpu-pool-{:02}-5d8f1c2e-{:04}"
"""As long as clouds make them."""
RUNS = (
    ("same", "share", 0), ("chunks", "share", 0), ("chunks", "share", 200), ("chunks", "full", 0), ("chunks", "mig", 0),
)  # fmt: skip
POOLED = ("chunks", "pools", 0), ("chunks", "pools", 200)
"""Of policy `fragmentation`, beside these."""
POOLS, POOL_LABEL = 16, "pool"
TARGETS_MS = {1_000: (1.0, 3.0), 5_000: (2.0, 6.0), 10_000: (4.0, 10.0)}


AS_IN_A_POD = """
import sys, kube.client
from kube.auth import Credentials
server = sys.argv.pop(1)
async def load(): return Credentials(server, None)
kube.client.loader = lambda kubeconfig: load
from extender.__main__ import main
main()
"""
"""Without a kubeconfig file the official client is not imported, which weighs 23 MiB."""

BARE = """
import sys, uvloop
from extender.server import scheduler_app
from observe.bounds import VERBS
from observe.ports import listen
from observe.serving import Server
from extender.verbs import VerbResponse
class Nothing:
    async def filter(self, body): return VerbResponse(answer)
answer = b'{"Error":""}'.ljust(int(sys.argv[2]))
uvloop.run(Server(scheduler_app(Nothing()), VERBS).serve([listen("127.0.0.1", int(sys.argv[1]))]))
"""


def start_extender(api_port: int, *more: str) -> tuple[subprocess.Popen[bytes], int, int]:
    """The process, the port of its verbs and that of its metrics. `more`: further flags."""
    port, metrics_port = free_port(), free_port()
    flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--metrics-host", "127.0.0.1", *more]
    command = [sys.executable, "-c", AS_IN_A_POD, f"http://127.0.0.1:{api_port}", *flags, "--log-level", "warning"]
    return subprocess.Popen(command), port, metrics_port


async def ready(port: int) -> float:
    started = time.perf_counter()
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
            line = await reader.readline()
            writer.close()
            if b"200" in line:
                return time.perf_counter() - started
        except OSError:
            pass
        await asyncio.sleep(0.05)


def in_chunks(names: list[str], shuffled: random.Random) -> list[str]:
    """The nodes in chunks as `parallelize.Until` cuts them, in the order in which workers happen to take them."""
    size = max(1, min(int(len(names) ** 0.5), len(names) // 16 + 1))
    chunks = [names[at : at + size] for at in range(0, len(names), size)]
    shuffled.shuffle(chunks)
    return [name for chunk in chunks for name in chunk]


def bodies(names: list[str], calls: int, order: str, requests: str, policy: str) -> Iterator[bytes]:
    """Requests as Go's client writes them."""
    shuffled = random.Random(7)
    encoded = json.dumps(names, separators=(",", ":"))
    for at in range(calls):
        if order == "chunks":
            encoded = json.dumps(in_chunks(names, shuffled), separators=(",", ":"))
        built = pod(f"requests-{at}").annotated(placement=policy)
        if requests == "mig":
            built = built.asking(mig="1g.10gb")
        else:
            mib = 2 * GPU_MIB if requests == "full" else SIZES_MIB[at % len(SIZES_MIB)]
            built = built.asking(mib=mib, core=10 * (at % 4))
        yield posted("/filter", f'{{"Pod":{json.dumps(built.plain())},"Nodes":null,"NodeNames":{encoded}}}'.encode())


def call(port: int, requests: Iterable[bytes]) -> np.ndarray:
    """Milliseconds that each took."""
    took, kept = [], Kept(port)
    kept.open()
    for request in requests:
        started = time.perf_counter()
        _, body = kept.send(request)
        took.append(time.perf_counter() - started)
        assert not json.loads(body)["Error"], body[:300]
    kept.close()
    return np.array(took) * 1000


def answer_bytes(port: int, requests: Iterator[bytes]) -> int:
    """Of one call."""
    kept = Kept(port)
    _, body = kept.send(next(requests))
    kept.close()
    return len(body)


def call_bare(requests: Iterable[bytes], answer_bytes: int) -> np.ndarray:
    """The same to a process that only serves, answers of this length."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", BARE, str(port), str(answer_bytes)]) as process:
        try:
            wait_for(port)
            return call(port, requests)
        finally:
            process.terminate()


async def events(api: FakeApi, where: NodeBuilder, per_second: int) -> None:
    """Pods that are bound, start and end, as a busy cluster has them."""
    at = 0
    began = time.perf_counter()
    while True:
        one = where.gpus[at % len(where.gpus)]
        built = pod(f"busy-{at % 500}").asking(mib=1024).on(where.name).assigned(share(one, 1024))
        api.put((built.with_phase("Running") if at % 1000 >= 500 else built).plain())
        at += 1
        await asyncio.sleep(max(0.0, began + at / per_second - time.perf_counter()))


async def measure(
    nodes: int, calls: int, events_s: int, pods: int, order: str, requests: str, policy: str
) -> dict[str, object]:
    async with FakeApi() as api:
        built = [node(NAME.format(at // 250, at % 250)).with_gpus(8) for at in range(nodes)]
        pool = {POOL_LABEL: ""} if requests == "pools" else {}
        for at, one in enumerate(built):
            plain = one.plain()
            plain["metadata"]["labels"] = dict.fromkeys(pool, f"pool-{at % POOLS}")
            api.put(plain)
        for at in range(pods):
            where = built[at % nodes]
            bound = pod(f"old-{at}").asking(mib=2048).on(where.name).assigned(share(where.gpus[at % 8], 2048))
            plain = bound.with_phase("Running").plain()
            plain["spec"]["nodeSelector"] = dict.fromkeys(pool, f"pool-{at % nodes % POOLS}")
            api.put(plain)
        process, port, metrics_port = start_extender(api.port)
        try:
            started_s = await asyncio.wait_for(ready(metrics_port), START_LIMIT_S)
            names = [one.name for one in built]
            await asyncio.to_thread(call, port, bodies(names, 50, order, requests, policy))
            size = await asyncio.to_thread(answer_bytes, port, bodies(names, 1, order, requests, policy))
            bare = await asyncio.to_thread(call_bare, bodies(names, calls // 2, order, requests, policy), size)
            noise = asyncio.create_task(events(api, built[0], events_s)) if events_s else None
            load, before_s = os.getloadavg()[0], cpu_s(process.pid)
            took = await asyncio.to_thread(call, port, bodies(names, calls, order, requests, policy))
            spent_ms = (cpu_s(process.pid) - before_s) * 1000 / calls
            if noise:
                noise.cancel()
            rss = int(memory_mib(process.pid))
        finally:
            process.terminate()
            process.wait()
    p50, p99, bare_p50, bare_p99 = (round(float(np.percentile(of, q)), 2) for of in (took, bare) for q in (50, 99))
    return {
        "nodes": nodes, "gpus_a_node": 8, "pods": pods, "policy": policy, "order": order, "requests": requests, "events_per_s": events_s, "calls": calls,
        "p50_ms": p50, "p99_ms": p99, "bare_p50_ms": bare_p50, "bare_p99_ms": bare_p99,
        "max_ms": round(float(took.max()), 2), "cpu_ms_a_call": round(spent_ms, 2), "rss_mib": rss, "start_s": round(started_s, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f} at the start",
    }  # fmt: skip


def main() -> int:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(prog="bench.extender", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 5_000, 10_000])
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--pods", type=int, default=2_000)
    parser.add_argument("--policies", nargs="*", default=["binpack", "fragmentation"])
    arguments = parser.parse_args()
    rows = read_rows()
    for nodes, policy in product(arguments.nodes, arguments.policies):
        for order, requests, events_s in (*RUNS, *(POOLED if policy == "fragmentation" else ())):
            row = asyncio.run(measure(nodes, arguments.calls, events_s, arguments.pods, order, requests, policy))
            print(
                f"{nodes} nodes x 8, {policy}, {order}, {requests}, {events_s} events/s: p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms "
                f"(target when idle {' / '.join(f'{ms:g}' for ms in TARGETS_MS.get(nodes, ()))}; "
                f"bare {row['bare_p50_ms']} / {row['bare_p99_ms']}), {row['cpu_ms_a_call']} ms of CPU a call, {row['rss_mib']} MiB, ready after {row['start_s']} s",
                flush=True,
            )
            rows[nodes, policy, order, requests, events_s] = row
            write_rows(rows)
    return 0


Key = tuple[int, str, str, str, int]


def read_rows() -> dict[Key, dict[str, object]]:
    with (HERE / "filter.csv").open(newline="") as file:
        return {
            (int(row["nodes"]), row["policy"], row["order"], row["requests"], int(row["events_per_s"])): dict(row)
            for row in csv.DictReader(file)
        }


def write_rows(rows: dict[Key, dict[str, object]]) -> None:
    """After each: they take a minute each."""
    with (HERE / "filter.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, next(iter(rows.values())), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
