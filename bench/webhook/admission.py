"""Admissions a second and their latency, over HTTPS against the webhook as it runs in its container.

`python -m bench.webhook.admission` starts `tangram-webhook` on this machine, sends pods of two containers from one client over
several kept-alive connections, as an API server does, and writes admission.csv. Client and webhook share the machine's cores.
Latency is measured at a fixed rate (300/s, evenly spaced) from the moment when a call was due, or when this client's own timer woke it
for it (a timer is late by a millisecond and more); throughput as fast as it goes. `bare` is what the same requests take to a path that
the webhook does not have: all but its own work, on this machine.
"""

from __future__ import annotations

import asyncio
import csv
import gc
import os
import platform
import ssl
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.calls import posted, wait_for
from bench.process import memory_mib
from tests.ports import free_port
from webhook.certs import CA_CERT, CERT, KEY, renewed

CONNECTIONS, RATE, PACED, FLAT_OUT = 8, 300, 3000, 6000
MUTATE = "/mutate"
FOLDER = Path(__file__).parent


def request(uid: int, path: str) -> bytes:
    container = {"image": "pytorch", "env": [{"name": f"V{i}", "value": "x" * 20} for i in range(10)]}
    main = container | {"name": "main", "resources": {"limits": {"tangram.sh/gpu-mem": "8Gi", "tangram.sh/gpu-core": "30"}, "requests": {"tangram.sh/gpu-mem": "8Gi", "tangram.sh/gpu-core": "30"}}}  # fmt: skip
    pod = {
        "metadata": {"generateName": "web-", "namespace": "a"},
        "spec": {"containers": [main, container | {"name": "logs"}]},
    }
    requested = {
        "uid": str(uid),
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": pod,
    }
    body = msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": requested})
    return posted(path, body)


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, uid: int, path: str) -> None:
    writer.write(request(uid, path))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    if path == MUTATE:
        assert head.startswith(b"HTTP/1.1 200"), head
        assert b'"patch"' in body, body


async def measure(
    port: int, tls: ssl.SSLContext, count: int, rate: float, path: str = MUTATE
) -> tuple[list[float], float]:
    """Latencies in ms, and calls a second. `rate` 0 = no pacing."""
    uids, latencies, began = iter(range(count)), [], time.perf_counter()

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="localhost")
        for uid in uids:
            start = began + uid / rate if rate else time.perf_counter()
            early_s = start - time.perf_counter()
            if early_s > 0:  # else every connection was waiting for an answer, which is the webhook's time
                await asyncio.sleep(early_s)
                start = time.perf_counter()
            await call(reader, writer, uid, path)
            latencies.append((time.perf_counter() - start) * 1000)
        writer.close()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return sorted(latencies), count / (time.perf_counter() - began)


def main() -> None:
    port, files = free_port(), renewed({}, ("localhost",), datetime.now(UTC))
    with tempfile.TemporaryDirectory() as folder:
        for name in (CERT, KEY):
            (Path(folder) / name).write_bytes(files[name])
        flags = [
            "--cert-mode",
            "files",
            "--cert-folder",
            folder,
            "--port",
            str(port),
            "--metrics-port",
            "0",
            "--drain-s",
            "0",
        ]
        process = subprocess.Popen([sys.executable, "-m", "webhook", *flags], stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            tls = ssl.create_default_context(cadata=files[CA_CERT].decode())
            asyncio.run(measure(port, tls, 500, 0))
            gc.freeze()  # looks for garbage in this process are not the webhook's time
            gc.disable()
            bare, _ = asyncio.run(measure(port, tls, PACED, RATE, "/bare"))
            paced, _ = asyncio.run(measure(port, tls, PACED, RATE))
            _, per_second = asyncio.run(measure(port, tls, FLAT_OUT, 0))
            rss_mib = memory_mib(process.pid)
        finally:
            process.terminate()
            process.wait()
    row = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": f"{os.cpu_count()} cores {platform.machine()}", "load_1m": round(os.getloadavg()[0], 1),
        "python": platform.python_version(), "admissions_per_s": round(per_second), "rate_per_s": RATE,
        "p50_ms": round(paced[PACED // 2], 2), "p99_ms": round(paced[PACED * 99 // 100], 2),
        "bare_p50_ms": round(bare[PACED // 2], 2), "bare_p99_ms": round(bare[PACED * 99 // 100], 2), "rss_mib": round(rss_mib),
    }  # fmt: skip
    with (FOLDER / "admission.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, row)
        table.writeheader()
        table.writerow(row)
    print(row)


if __name__ == "__main__":
    main()
