"""`tangramctl ps`, `arbiter status` and `arbiter stop`: gather, print, repeat."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Final

from tangramctl import fake, records, service, view
from tangramctl.errors import BadOption
from tangramctl.machine import default_root, found

WATCH_S: Final = 1.0


def ps(state: Path | None, *, json: bool, watch: bool) -> None:
    """Print the view once, or each second until interrupted."""
    pause = threading.Event()
    if json:
        _print_json(state)
        while watch:
            pause.wait(WATCH_S)
            _print_json(state)
        return
    from tangramctl import screen

    console = screen.console()
    if not watch:
        screen.show(view.seen_at(state), console)
        return
    with screen.watching(console) as show:
        while True:
            show(view.seen_at(state))
            pause.wait(WATCH_S)


def _print_json(state: Path | None) -> None:
    sys.stdout.write(view.encode(view.seen_at(state)).decode() + "\n")
    sys.stdout.flush()


def arbiter_status(state: Path | None) -> bool:
    """Print of each arbiter whether it runs; True when one does."""
    one_runs = False
    for machine, described in fake.all_of(found(state or default_root())):
        keeper = service.running(machine)
        with machine.locked():
            count = len(records.runs(machine))
        if keeper is None and not count:
            continue
        arbiter = service.arbiter_pid(machine) if keeper is not None else None
        one_runs |= arbiter is not None
        what = f"{machine.root}" + (f" (fake: {described})" if described else "")
        if keeper is None:
            print(f"{what}: no arbiter; {_runs(count)}")
        else:
            now = "no arbiter answers now" if arbiter is None else f"arbiter {arbiter}"
            print(f"{what}: {now}, kept by {keeper.pid}; {_runs(count)}; log {machine.log}")
    if not one_runs:
        print("no arbiter runs")
    return one_runs


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def arbiter_stop(state: Path | None, *, force: bool) -> None:
    """End every arbiter of the state folder. Raises BadOption while runs live and `force` is not given."""
    machines = fake.all_of(found(state or default_root()))
    for machine, _ in machines:
        with machine.locked():
            alive = records.runs(machine)
        if alive and not force and service.running(machine) is not None:
            pids = ", ".join(str(run.pid) for run in alive)
            verb, them = ("lives", "it") if len(alive) == 1 else ("live", "them")
            raise BadOption(
                f"{_runs(len(alive))} {verb} (process {pids}) and could get no more memory: end {them}, or give --force"
            )
    stopped = 0
    for machine, _ in machines:
        stopped += service.stop(machine) is not None
    print(f"{stopped} stopped" if stopped else "no arbiter was running")
