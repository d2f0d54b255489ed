"""Carry out plans of MIG for a command, which ends with an exit code where they fail (`nvml.mig_changes`)."""

from __future__ import annotations

from collections.abc import Iterable

from nvml import mig_changes
from nvml.mig_changes import MigCalls, Tables
from tangramctl.errors import CommandError
from vgpu.mig.plan import GpuPlan


class MigFailed(CommandError):
    """The driver refused a step. The layout is as before, or the text names what is not."""

    code = 70


def carry_out(plans: Iterable[GpuPlan], nvml: MigCalls, tables: Tables) -> None:
    """Every plan, or none. None of them may be refused. Raises MigFailed."""
    try:
        mig_changes.carry_out(plans, nvml, tables)
    except mig_changes.NotCarriedOut as error:
        raise MigFailed(str(error)) from None
