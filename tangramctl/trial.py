"""Before the first share of a boot: does this machine's driver suspend? On a cluster the device plugin has it tried."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import Final

from nvml.trials import Trier
from tangramctl import gpus, records
from tangramctl.machine import StateRoot, held
from vgpu.api.inventory import Inventory
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict

PROGRAM: Final = "tangram-trial"
"""Beside the library."""


def try_out(machine: StateRoot, inventory: Inventory, library: Path) -> None:
    """Returns at once where a verdict of this boot stands, else within a minute. The arbiter goes by the verdict.

    A trial that could not run is made again by the first run of those that share a machine at a time.
    """
    env = machine.driver_env()
    with machine.locked():  # else it takes what another run has half made for what a dead one left
        first = not records.runs(machine)
    trier = Trier(
        machine.root, library.parent / PROGRAM, gpus.driver_root(machine), report=_report, env=env, again=first
    )
    with held(machine.root / "trial.lock", fcntl.LOCK_EX):
        if not trier.untried(inventory):
            return
        import asyncio

        try:
            asyncio.run(trier.try_out(inventory))
        except OSError as error:
            print(f"tangramctl: the result of the driver's trial cannot be kept: {error}", file=sys.stderr)


def _report(verdict: TrialVerdict, model: str, driver: str) -> None:
    if verdict.outcome is not TrialOutcome.WORKS:
        print(
            f"tangramctl: driver {driver or 'of unknown version'} was tried on {model}: {verdict.outcome}"
            f" ({verdict.why}); `tangramctl ps` shows what is not enforced",
            file=sys.stderr,
        )
