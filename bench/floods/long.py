"""How long one long request waits while 50 clients send long requests, over HTTP.

    uv run python -m bench.floods.long [--listener 8443] [--seconds 6]

The flood's clients send bodies of the largest size that the listener reads, one after another, each over a new connection. They have one source address
(127.0.0.2), or one each (127.0.1.1 to 127.0.1.50). The honest client sends a body of each size from an address of its own (127.0.0.3) or from the flood's, after the flood
has gone on for `--seconds`, over a new connection: an AdmissionReview to 8443, a filter call with many nodes' names to 8888. `alone` is the same call before the flood. Written to long.csv: seconds
until the answer (`late`: closed after 10 s, the limit for a request; `503`: there was no memory for it), the most of two calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final

import msgspec

from bench.calls import posted, read_answer
from bench.floods.__main__ import commit_of_tree
from bench.floods.flood import HERE
from bench.floods.servers import extender, webhook
from bench.rows import append
from bench.webhook.admission import MUTATE
from observe.bounds import ADMISSION, MIB, VERBS
from tests.builders import pod

CLIENTS: Final = 50
CALLS: Final = 2
SIZES: Final = {"8443": (MIB, 9 * MIB), "8888": (MIB // 2, 4 * MIB)}
FLOODS: Final = {
    "one other address": (["127.0.0.2"] * CLIENTS, "127.0.0.3"),
    "50 other addresses": ([f"127.0.1.{at}" for at in range(1, CLIENTS + 1)], "127.0.0.3"),
    "the same address": (["127.0.0.2"] * CLIENTS, "127.0.0.2"),
}


def review(size: int) -> bytes:
    """An AdmissionReview of about that size."""
    made = pod("long").asking(mib=8192).annotated().plain()
    made["metadata"].setdefault("annotations", {})["note"] = "x" * size
    requested = {
        "uid": "1",
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": made,
    }
    return posted(
        MUTATE,
        msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": requested}),
    )


def filtering(size: int) -> bytes:
    """A call to /filter of about that size."""
    names = [f"gke-production-gpu-pool-{at:020}" for at in range(size // 47)]
    made = pod("long").asking(mib=8192).plain()
    return posted(
        "/filter", json.dumps({"Pod": made, "Nodes": None, "NodeNames": names}, separators=(",", ":")).encode()
    )


def call(port: int, tls: ssl.SSLContext | None, address: str, request: bytes) -> str:
    """Seconds until the answer, or what went wrong."""
    began = time.perf_counter()
    try:
        sock = socket.create_connection(("127.0.0.1", port), 60, source_address=(address, 0))
        with tls.wrap_socket(sock) if tls else sock as sock:
            sock.sendall(request)
            head, _ = read_answer(sock.recv)
    except (OSError, AssertionError):
        return "late" if time.perf_counter() - began > 9 else "closed"
    status = head.split()[1].decode()
    return f"{time.perf_counter() - began:.2f}" if status == "200" else status


async def flood(port: int, tls: ssl.SSLContext | None, addresses: list[str], size: int) -> None:
    """Until it is ended."""
    body = b"x" * (size - 1) + b"\n"

    async def client(address: str) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, local_addr=(address, 0))
                writer.write(posted("/flood", body))
                await reader.read()
                writer.transport.abort()
            await asyncio.sleep(0.02)

    await asyncio.gather(*map(client, addresses))


@contextmanager
def flooded(port: int, listener: str, addresses: list[str], seconds: float) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "bench.floods.long",
        "--flood",
        str(port),
        "--listener",
        listener,
        "--addresses",
        ",".join(addresses),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    try:
        yield
        assert process.poll() is None, "the flood ended"
    finally:
        process.kill()
        process.wait()


def context(listener: str) -> ssl.SSLContext | None:
    return ssl._create_unverified_context() if listener == "8443" else None


def most(seen: list[str]) -> str:
    """The worst of these."""
    return max(seen, key=lambda one: (not one[0].isdigit() or "." not in one, float(one) if "." in one else 0.0))


def main() -> None:
    """Attack, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listener", choices=SIZES)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--flood", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        bounds = ADMISSION if arguments.listener == "8443" else VERBS
        asyncio.run(
            flood(arguments.flood, context(arguments.listener), arguments.addresses.split(","), bounds.body_bytes)
        )
    about = {
        "machine": f"{os.cpu_count()} cores {platform.machine()}", "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit_of_tree(),
    }  # fmt: skip
    for listener, sizes in SIZES.items():
        if arguments.listener not in (None, listener):
            continue
        tls, make = context(listener), review if listener == "8443" else filtering
        with (webhook if listener == "8443" else extender)() as listeners:
            flags = next(one.flags for one in listeners if one.name.endswith(listener))
            port = int(flags[flags.index("-address") + 1].rpartition(":")[2])
            for name, (addresses, own) in FLOODS.items():
                if listener == "8888" and name != "the same address":  # all of a pod have one
                    continue
                requests = [make(size) for size in sizes]
                alone = [call(port, tls, own, one) for one in requests]
                with flooded(port, listener, addresses, arguments.seconds):
                    took = [[call(port, tls, own, one) for _ in range(CALLS)] for one in requests]
                for size, seen, before in zip(sizes, took, alone, strict=True):
                    row = {
                        "listener": listener,
                        "flood_from": name,
                        "mib": size / MIB,
                        "alone_s": before,
                        "most_s": most(seen),
                        "all": " ".join(seen),
                    }
                    append(HERE / "long.csv", row | about)
                    print(row, flush=True)


if __name__ == "__main__":
    main()
