"""The tables of attacks, for docs/operations/security.md: from what the tests try."""

from __future__ import annotations

from hack.reference.page import table
from tests.e2e.attacks.attack import Attack, Where
from tests.e2e.attacks.table import FAMILIES

HEAD = ("attack", "what it does", "outcome", "namespace", "runs on")


def tables() -> str:
    """The made part of the page."""
    return "\n".join(f"### {family}\n\n{table(HEAD, map(_row, rows))}" for family, rows in FAMILIES.items())


def _row(attack: Attack) -> tuple[str, ...]:
    where = "cluster, fake driver" if attack.where is Where.CLUSTER else str(attack.where)
    levels = "any" if attack.where is not Where.CLUSTER else ", ".join(attack.levels)
    shown = f" ([test](../../{attack.test.partition('::')[0]}))" if attack.test else ""
    return f"`{attack.name}`", attack.does, f"*{attack.outcome}*", levels, where + shown
