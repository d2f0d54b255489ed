"""What a flood of each listener does to those who need the program: latency, refusals and memory beside a control.

    sudo uv run python -m bench.floods [--seconds 60] [--only webhook] [--attack body]

50 clients (bench/floods/flooder, in Go) in a cgroup of half a processor attack one listener while an honest client goes on: an API server
that opens a connection for every second admission, a scheduler that calls the filter, a process in a container that allocates GPU memory, or
a kubelet that probes. The control burns the same processor time and connects to nobody. Written to floods.csv, a row for each attack: p50 and p99 in ms
of the honest client (and of its slow call, where it has one), its calls that failed, and the processor time and resident memory of all the program's
processes. The last columns compare that with the goals: p99 at most twice the control's (arbiter's sockets: 50 ms more), no call failed, at most
64 MiB more than under the control. A program that ended ends the run. Needs root for the cgroup. Runs about 70 min with 60 s each.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.floods.flood import (
    CONTROL,
    HERE,
    Attack,
    Honest,
    Listener,
    build_flooder,
    cgroup_of_half_a_processor,
    flood,
    quantile,
)
from bench.floods.servers import extender, plugin, webhook
from bench.floods.sockets import arbiter

PROGRAMS: Final[dict[str, Callable[[], AbstractContextManager[list[Listener]]]]] = {
    "webhook": webhook,
    "extender": extender,
    "arbiter": arbiter,
    "plugin": plugin,
}
TIMES_CONTROL: Final = 2.0
MORE_MS: Final = 50.0
"""Instead, for the arbiter's sockets: beyond the control."""
MORE_MIB: Final = 64.0


def goals(listener: Listener, row: dict[str, Any], control: dict[str, Any]) -> dict[str, bool]:
    """Whether each goal is met."""
    if listener.name.endswith(".sock"):
        fast = all(row[key] - control[key] <= MORE_MS for key in ("p99_ms", "start_p99_ms"))
    else:
        fast = row["p99_ms"] <= TIMES_CONTROL * control["p99_ms"]
    return {"fast": fast, "none_failed": row["failed"] == 0, "memory": row["more_mib"] <= MORE_MIB}


def described(listener: Listener, attack: Attack, seen: Honest) -> dict[str, Any]:
    """A row, without what compares it with the control."""
    made, refused, sent = seen.did.split()
    return {
        "listener": listener.name, "attack": attack.name, "calls": len(seen.ms), "failed": seen.failures.total(),
        "p50_ms": round(quantile(seen.ms, 50), 2), "p99_ms": round(quantile(seen.ms, 99), 2),
        "start_p50_ms": round(quantile(seen.start_ms, 50), 1), "start_p99_ms": round(quantile(seen.start_ms, 99), 1),
        "mib": round(seen.mib, 1), "cpu_percent": round(seen.cpu_percent, 1), "connections": int(made), "connections_refused": int(refused), "bytes_sent": int(sent),
    }  # fmt: skip


def main() -> None:
    """Attack, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--listener", help="a part of its name")
    parser.add_argument("--attack", help="the name of one")
    parser.add_argument("--csv", type=Path, default=HERE / "floods.csv")
    options = parser.parse_args()
    program, cgroup, rows = build_flooder(), cgroup_of_half_a_processor(), []
    about = {
        "seconds": options.seconds, "machine": f"{os.cpu_count()} cores {platform.machine()}", "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip
    for name, start in PROGRAMS.items():
        if options.only not in (None, name):
            continue
        with start() as listeners:
            for listener in [one for one in listeners if (options.listener or "") in one.name]:
                control: dict[str, Any] = {}
                attacks = [one for one in listener.attacks if options.attack in (None, one.name)]
                for attack in (Attack(CONTROL, CONTROL), *attacks):
                    seen = flood(program, cgroup, listener, attack, options.seconds)
                    row = described(listener, attack, seen)
                    control = control or row
                    row["p99_to_control"] = round(row["p99_ms"] / control["p99_ms"], 2)
                    row["more_mib"] = round(row["mib"] - control["mib"], 1)
                    row |= goals(listener, row, control) | about
                    rows.append(row)
                    print(
                        {key: value for key, value in row.items() if key not in about}, dict(seen.failures), flush=True
                    )
    with options.csv.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
