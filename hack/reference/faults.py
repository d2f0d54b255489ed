"""The table of the fault matrix, for docs/development/faults.md: from what the end-to-end tests try."""

from __future__ import annotations

from collections.abc import Iterator

from hack.reference.page import table
from tests.e2e.matrix.table import FAULTS, NOT_TRIED, ROWS, STEPS


def tables() -> str:
    """The made part of the page."""
    fault = ("fault", "what is done"), FAULTS.items()
    step = ("step", "when"), STEPS.items()
    head = ("part", "fault", "what", "steps", "what pods notice meanwhile", "all runs again within")
    left_out = (
        ("part", "fault", "why it is not tried"),
        ((part, fault, why) for (part, fault), why in NOT_TRIED.items()),
    )
    parts = ("## Faults", table(*fault)), ("## Steps", table(*step)), ("## Matrix", table(head, _rows())), ("## Not tried", table(*left_out))  # fmt: skip
    return "\n".join(f"{title}\n\n{made}" for title, made in parts)


def _rows() -> Iterator[tuple[str, ...]]:
    """A step in bold is one that CI tries."""
    for row in ROWS:
        steps = ", ".join(f"**{step}**" if step in row.ci else step for step in row.steps)
        yield row.part, row.fault, row.what, steps, row.meanwhile, f"{row.within_s:g} s"
