"""`tangramctl ps`, `arbiter status` and `arbiter stop`: gather, print, repeat."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Final

from tangramctl import book, fake, service, view
from tangramctl.errors import BadOption
from tangramctl.machine import Machine, default_root, prepared

WATCH_S: Final = 1.0


def ps(state: Path | None, *, json: bool, watch: bool) -> None:
    """Print the view once, or each second until interrupted."""
    machine = prepared(state or default_root())
    if json:
        _print_json(machine)
        while watch:
            threading.Event().wait(WATCH_S)
            _print_json(machine)
        return
    from tangramctl import screen

    console = screen.console()
    if not watch:
        screen.show(view.look(machine), console)
        return
    with screen.watching(console) as show:
        pause = threading.Event()
        while True:
            show(view.look(machine))
            pause.wait(WATCH_S)


def _print_json(machine: Machine) -> None:
    sys.stdout.write(view.encode(view.look(machine)).decode() + "\n")
    sys.stdout.flush()


def arbiter_status(state: Path | None) -> bool:
    """Say of each arbiter whether it runs; True when one does."""
    found = False
    for machine, described in _machines(state):
        keeper = service.running(machine)
        with machine.locked():
            count = len(book.runs(machine))
        if keeper is None and described is not None and not count:
            continue
        found |= keeper is not None
        what = f"{machine.root}" + (f" (fake: {described})" if described else "")
        if keeper is None:
            print(f"{what}: no arbiter; {count} runs")
        else:
            print(f"{what}: arbiter {keeper.arbiter_pid}, kept by {keeper.pid}; {count} runs; log {machine.log}")
    return found


def arbiter_stop(state: Path | None, *, force: bool) -> None:
    """End every arbiter of the state folder. Raises BadOption while runs live and `force` is not given."""
    machines = _machines(state)
    for machine, _ in machines:
        with machine.locked():
            alive = book.runs(machine)
        if alive and not force and service.running(machine) is not None:
            pids = ", ".join(str(run.pid) for run in alive)
            raise BadOption(
                f"{len(alive)} runs live (process {pids}) and could get no more memory: end them, or give --force"
            )
    stopped = 0
    for machine, _ in machines:
        stopped += service.stop(machine) is not None
    print(f"{stopped} stopped" if stopped else "no arbiter was running")


def _machines(state: Path | None) -> list[tuple[Machine, str | None]]:
    machine = prepared(state or default_root())
    return [(machine, None), *fake.known(machine)]
