"""The effect of a flood of each listener on the program's clients: latency, refusals and memory beside a control.

    sudo uv run python -m bench.floods [--seconds 60] [--only webhook] [--listener 8443] [--attack body] [--every]

50 clients (bench/floods/flooder, in Go) in a cgroup of half a processor attack one listener while an honest client goes on: an API server
that opens a connection for every second admission, a scheduler that calls the filter and binds, a process in a container that allocates GPU memory, or
a kubelet that probes. The control burns the same processor time and makes no connection. Written to floods.csv, a row for each attack: p50 and p99 in ms
of the honest client and of its second call, where it has one (bind; the start of a process), its calls that failed, and the processor time and resident memory of all the program's
processes. The last columns compare that with the goals: p99 of admission, filter and bind at most twice the control's, of a container's allocations and starts at most
50 ms more; probes and scrapes of the flooded port itself at most 500 ms, half of what the kubelet waits; no call failed; at most 64 MiB more than under the control. A program that ended ends the run. Needs root for the cgroup.

Each listener has a control of its own, just before its attacks: what earlier ones left in memory counts on both sides. Of attacks that the same code meets in the same way, one listener
has all: endless headers and an endless request line, bodies with and without a length. --every runs all on all. 70 runs of 60 s take about 75 min (123 with
--every). Parts (--only, --listener, --attack) go into the same CSV: a row takes the place of an earlier one of its listener, attack and commit.
`load` is that of the last minute, before the run: the last flood's own, and what else the machine did.
`commit` is that of the tree, or TANGRAM_COMMIT; "+" means that the tree had changes beside it.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
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
from bench.floods.servers import extender, hostpool, plugin, webhook
from bench.floods.sockets import arbiter

PROGRAMS: Final[dict[str, Callable[[], AbstractContextManager[list[Listener]]]]] = {
    "webhook": webhook,
    "extender": extender,
    "arbiter": arbiter,
    "plugin": plugin,
    "hostpool": hostpool,
}
MORE_MIB: Final = 64.0


def goals(listener: Listener, row: dict[str, Any], control: dict[str, Any]) -> dict[str, bool]:
    """Whether each goal is met."""
    timed = ("p99_ms", "second_p99_ms") if listener.second is not None else ("p99_ms",)
    fast = all(row[key] <= listener.goal_ms(control[key]) for key in timed)
    return {"fast": fast, "none_failed": row["failed"] == 0, "memory": row["more_mib"] <= MORE_MIB}


def described(listener: Listener, attack: Attack, seen: Honest) -> dict[str, Any]:
    """A row, without what compares it with the control."""
    made, refused, sent = seen.did.split()
    return {
        "listener": listener.name, "attack": attack.name, "calls": len(seen.ms), "failed": seen.failures.total(), "failures": "; ".join(f"{count} x {why}" for why, count in seen.failures.items()),
        "p50_ms": round(quantile(seen.ms, 50), 2), "p99_ms": round(quantile(seen.ms, 99), 2),
        "second": listener.second.name if listener.second is not None else "", "second_calls": len(seen.second_ms),
        "second_p50_ms": round(quantile(seen.second_ms, 50), 2), "second_p99_ms": round(quantile(seen.second_ms, 99), 2),
        "mib": round(seen.mib, 1), "cpu_percent": round(seen.cpu_percent, 1), "connections": int(made), "connections_refused": int(refused), "bytes_sent": int(sent),
    }  # fmt: skip


def compared(listener: Listener, row: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
    """The row, with what compares it with the control."""
    more = {
        "control_p99_ms": control["p99_ms"],
        "p99_to_control": round(row["p99_ms"] / control["p99_ms"], 2),
        "second_control_p99_ms": control["second_p99_ms"],
        "more_mib": round(row["mib"] - control["mib"], 1),
    }
    return row | more | goals(listener, row | more, control)


def chosen(listener: Listener, names: str, *, every: bool) -> list[Attack]:
    """Those of these names; without one, those of which a run is made, or every one."""
    if names:
        return [one for one in (*listener.attacks, *listener.others) if one.name in names.split(",")]
    return [*listener.attacks, *(listener.others if every else ())]


class Table:
    """The CSV. A row takes the place of an earlier one of its listener, attack and commit; it is written at once, so a run may be made in parts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        if path.exists():
            with path.open(newline="") as file:
                self._rows = {_key(row): row for row in csv.DictReader(file)}

    def put(self, row: dict[str, Any]) -> None:
        self._rows[_key(row)] = row
        with self._path.open("w", newline="") as file:
            written = csv.DictWriter(file, row, restval="", extrasaction="ignore")
            written.writeheader()
            written.writerows(self._rows.values())


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["listener"], row["attack"], row["commit"]


def commit_of_tree() -> str:
    """TANGRAM_COMMIT where it is set, as where there is no git."""
    if commit := os.environ.get("TANGRAM_COMMIT"):
        return commit
    git = ("git", "-C", HERE)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!floods.csv"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return commit.strip() + ("+" if changed.strip() else "")


def main() -> None:
    """Attack, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--listener", help="a part of its name")
    parser.add_argument("--attack", default="", help="names, comma between")
    parser.add_argument(
        "--every", action="store_true", help="also attacks that differ little from another of the same server"
    )
    parser.add_argument("--csv", type=Path, default=HERE / "floods.csv")
    arguments = parser.parse_args()
    program, cgroup, table = build_flooder(), cgroup_of_half_a_processor(), Table(arguments.csv)
    about = {
        "seconds": arguments.seconds, "machine": f"{os.cpu_count()} cores {platform.machine()}", "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit_of_tree(),
    }  # fmt: skip
    for name, start in PROGRAMS.items():
        if arguments.only not in (None, name):
            continue
        with start() as listeners:
            for listener in [one for one in listeners if (arguments.listener or "") in one.name]:
                attacks, control = chosen(listener, arguments.attack, every=arguments.every), dict[str, Any]()
                for attack in (Attack(CONTROL, CONTROL), *attacks) if attacks else ():
                    load = {"load": round(os.getloadavg()[0], 1)}
                    result = described(listener, attack, flood(program, cgroup, listener, attack, arguments.seconds))
                    control = control or result
                    row = compared(listener, result, control)
                    table.put(row | about | load)
                    print(row, flush=True)


if __name__ == "__main__":
    main()
