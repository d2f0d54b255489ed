"""Every attack, by family."""

from __future__ import annotations

from typing import Final

from tests.e2e.attacks import admission, api, elsewhere, loading, mounts, packets, processes
from tests.e2e.attacks.attack import Attack, Level, Outcome

FAMILIES: Final[dict[str, tuple[Attack, ...]]] = {
    "Admission": admission.ATTACKS,
    "The API server": api.ATTACKS,
    "Mounts": mounts.ATTACKS,
    "The library": loading.ATTACKS,
    "Processes": processes.ATTACKS,
    "The arbiter's socket": packets.ATTACKS,
    "Below the cluster, and on a GPU": elsewhere.ATTACKS,
}
"""Heading of the page -> rows."""

ORDER: Final = (Outcome.REFUSED, Outcome.HARMLESS, Outcome.REPORTED, Outcome.KILLED)
"""Kills come last: for a minute after its start the arbiter kills no process."""


def staged() -> list[tuple[Attack, Level]]:
    """What the runner runs, in its order."""
    rows = [attack for family in FAMILIES.values() for attack in family if not attack.test]
    rows.sort(key=lambda attack: (attack.act is not None or bool(attack.script), ORDER.index(attack.outcome)))
    return [(attack, level) for attack in rows for level in attack.levels]
