#!/usr/bin/env python3
"""Send requests of a Poisson process to several servers at once; print how long first tokens and whole answers took, by the server's class.

    client.py --seconds 120 --rate 0.2 latency-critical=127.0.0.1:8001 standard=127.0.0.1:8002 best-effort=127.0.0.1:8003

A request that comes while its server still answers the one before waits for it; that counts. Exit status 1 if an answer failed or had a wrong check.
"""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import threading
import time
from dataclasses import dataclass, field

ANSWER_S = 600


@dataclass
class Seen:
    """Of one server. Milliseconds from the time at which the request came."""

    name: str
    address: str
    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def ask(seen: Seen, due: float, tokens: int) -> None:
    """One request."""
    connection = http.client.HTTPConnection(seen.address, timeout=ANSWER_S)
    try:
        connection.request("GET", f"/generate?tokens={tokens}")
        answer = connection.getresponse()
        answer.readline()
        first = time.monotonic()
        check = answer.read().splitlines()[-1:]
    except (OSError, http.client.HTTPException) as error:
        seen.failed.append(f"{type(error).__name__}: {error}")
        return
    finally:
        connection.close()
    if check != [b"right"]:
        seen.failed.append(f"the check at the end of the answer is {check}")
    seen.first_ms.append(1000 * (first - due))
    seen.whole_ms.append(1000 * (time.monotonic() - due))


def run(seen: Seen, seconds: float, rate: float, tokens: int, seed: int) -> None:
    """All requests to one server."""
    draw, began = random.Random(seed), time.monotonic()  # noqa: S311  arrivals, no secrets
    due = began
    while True:
        due += draw.expovariate(rate)
        if due > began + seconds:
            return
        time.sleep(max(0.0, due - time.monotonic()))
        ask(seen, due, tokens)


def part(values: list[float], of: float) -> float:
    """A quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(of * len(ordered)))] if ordered else float("nan")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="CLASS=HOST:PORT")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--rate", type=float, default=0.2, help="requests in a second to each server (default %(default)g)"
    )
    parser.add_argument("--tokens", type=int, default=8, help="of each answer (default %(default)d)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not all("=" in one for one in arguments.servers):
        parser.error("each server is CLASS=HOST:PORT")
    everyone = [Seen(*one.split("=", 1)) for one in arguments.servers]
    threads = [
        threading.Thread(
            target=run, args=(one, arguments.seconds, arguments.rate, arguments.tokens, arguments.seed + at)
        )
        for at, one in enumerate(everyone)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        f"{'CLASS':18}{'REQUESTS':>9}{'FAILED':>8}{'FIRST p50':>12}{'FIRST p99':>12}{'WHOLE p50':>12}{'WHOLE p99':>12}  ms"
    )
    for one in everyone:
        figures = [part(values, of) for values in (one.first_ms, one.whole_ms) for of in (0.5, 0.99)]
        print(
            f"{one.name:18}{len(one.first_ms):9}{len(one.failed):8}" + "".join(f"{figure:12.0f}" for figure in figures)
        )
        for why in sorted(set(one.failed))[:3]:
            print(f"  {why}")
    return 1 if any(one.failed for one in everyone) else 0


if __name__ == "__main__":
    sys.exit(main())
