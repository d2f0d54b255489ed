"""What an attack is: one line of text, how it is made, and what must happen.

A family is a module beside this one with a tuple `ATTACKS`. To add an attack, write a row in one of them:

    Attack(
        name="own-preload-file",
        does="A program starts another one with an LD_PRELOAD of its own.",
        outcome=Outcome.HARMLESS,
        script='again("take()", LD_PRELOAD="/nowhere.so")',
    )

`script` is Python in a container with a share of 1 GiB; `programs/kit.py` has what it can call. `pod` is a whole pod, `act` something done with the
API server. hack/verify-reference keeps docs/operations/security.md in step with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tests.e2e.cluster import Cluster

LIMIT_MIB: Final = 1024
"""The share of each attacker."""


class Outcome(StrEnum):
    """What must happen."""

    REFUSED = "refused"
    """Admission gives the reason, or the call fails in the attacker, which then has nothing."""
    HARMLESS = "harmless"
    """By the fake driver's own records the container has no more than its limit, and its neighbour's calls succeed."""
    REPORTED = "reported"
    """Status, metric and an Event name the reason within 5 s."""
    KILLED = "killed"
    """SIGKILL within 10 s, and an Event."""


class Level(StrEnum):
    """Pod Security level of the attacker's namespace."""

    RESTRICTED = "restricted"
    BASELINE = "baseline"
    """The attackers are root in their containers."""
    PRIVILEGED = "privileged"


class Where(StrEnum):
    """Where the attack runs."""

    CLUSTER = "cluster"
    """tests/e2e: a real cluster with the fake driver."""
    BELOW = "no cluster"
    """tests/integration or tests/contract: `test` names it."""
    H200 = "H200"
    """By hand: tests/gpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One row."""

    name: str
    """Of the pod or container, too."""
    does: str
    outcome: Outcome
    levels: tuple[Level, ...] = (Level.RESTRICTED,)
    """Namespaces in which it runs: more than one where root makes a difference."""
    where: Where = Where.CLUSTER
    prints: str = ""
    """Part of what admission, or the attacker, must print: else the attack did not happen."""
    reason: str = ""
    """Of a REPORTED one, as docs/reference/enforcement.md names them."""
    event: str = ""
    """Reason of an Event that the pod must have, beside those of the outcome."""
    script: str = ""
    cpu: str = ""
    """CPU limit of the script's container."""
    pod: dict[str, Any] | None = None
    """With `script` a pod of the attack's own, in which `main` runs the script."""
    unwatched: bool = False
    """Is the pod refused with the same words where the webhook is not asked, in kube-system?"""
    act: Callable[[Cluster, str, str], None] | None = None
    """(cluster, namespace, name of a running pod with a share); kubectl must fail."""
    test: str = ""
    """path::test that shows the outcome, of those that run elsewhere."""


BOTH: Final = (Level.RESTRICTED, Level.BASELINE)
BASELINE_ONLY: Final = (Level.BASELINE,)
PRIVILEGED_ONLY: Final = (Level.PRIVILEGED,)
