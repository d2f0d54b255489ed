"""Did an attack come to its outcome? Pure: judges what `judge` has seen. Each function fails with what is wrong, and an attack that never happened is wrong, too.

tests/unit/e2e/test_attack_verdicts.py shows what each of them does when the product is broken.

Units: MiB, seconds since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.e2e.attacks.attack import LIMIT_MIB

REPORTED_S, KILLED_S = 5.0, 10.0
"""Specified."""
ROUNDED_S: Final = 1.0
"""The API server keeps the end of a container in whole seconds."""
SLOWEST_MS: Final = 1000.0
"""Of a neighbour's allocation, beside fifty attackers on two processors that are the cluster's, too. Guessed."""
SILENT_S: Final = 10.0
"""A neighbour logs its calls each second. One without a line for this long hangs. Guessed."""
BY_BYPASS, BY_GUARD, UNENFORCED = "LimitBypassed", "OverMemoryLimit", "LimitNotEnforced"
"""Reasons of Events."""
_ALLOCATED: Final = re.compile(r"^([0-9.]+) (?:allocated (\d+) MiB|refused: .*)$", re.MULTILINE)
_CALLS: Final = re.compile(r"^([0-9.]+) calls (\d+) slowest_ms ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reported:
    """An Event about the attacker's container."""

    at_s: float
    reason: str
    note: str


def acted(log: str) -> tuple[float, int] | None:
    """When the attacker last logged its memory or a refusal, and how much memory; None = not yet."""
    seen = list(_ALLOCATED.finditer(log))
    return (float(seen[-1][1]), int(seen[-1][2] or 0)) if seen else None


def happened(prints: str, log: str) -> None:
    assert prints in log, f"the attack did not happen: {prints!r} is not in\n{log}"


def refused(prints: str, answer: str) -> None:
    """By admission, which gave its reason: any other failure is none."""
    assert prints, "a refusal without a sentence may be any failure"
    assert prints in answer, f"it failed, and not for {prints!r}:\n{answer}"


def nothing_held(booked_mib: int) -> None:
    assert booked_mib == 0, f"{booked_mib} MiB by the driver's records: refused means none"


def harmless(booked_mib: int, claimed_mib: int) -> None:
    """By the driver's records it is within its limit, and the records see what it has."""
    assert booked_mib <= LIMIT_MIB, (
        f"{booked_mib} MiB by the driver's records, {claimed_mib} by its own words: at most {LIMIT_MIB}"
    )
    assert claimed_mib <= booked_mib, f"the driver's records show {booked_mib} MiB of the {claimed_mib} that it logged"


def metric_row(metrics: str, labels: Mapping[str, str]) -> None:
    """A row of `tangram_container_unenforced` has these labels."""
    rows = [line for line in metrics.splitlines() if line.startswith("tangram_container_unenforced{")]
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    assert any(all(part in line for part in wanted) and line.endswith(" 1.0") for line in rows), (
        f"no row has {wanted}:\n" + "\n".join(rows)
    )


def report_of(reason: str, events: Iterable[Reported]) -> Reported | None:
    """The first Event that names the reason; None = none yet. An Event about the limit is one about `over-limit` and no other reason."""
    about = (one for one in events if (one.reason == UNENFORCED and f"({reason})" in one.note) or _over(reason, one))
    return min(about, key=lambda one: one.at_s, default=None)


def _over(reason: str, one: Reported) -> bool:
    return reason == "over-limit" and one.reason == BY_GUARD and "granted" in one.note


def reported(since_s: float, event: Reported) -> None:
    took_s = event.at_s - since_s
    assert took_s <= REPORTED_S, f"{took_s:.1f} s after it held memory: {event.note}"


def killed(since_s: float, terminated: Mapping[str, Any], ended_s: float) -> None:
    """By SIGKILL, and not by the kernel for its memory."""
    assert terminated["exitCode"] == 137, terminated
    assert terminated["reason"] != "OOMKilled", terminated
    took_s = ended_s - since_s
    assert took_s <= KILLED_S + ROUNDED_S, f"killed {took_s:.1f} s after it held memory"


def kill_reported(events: Sequence[Reported]) -> bool:
    """Does an Event report that it was killed for going around the library?"""
    return any(one.reason == BY_BYPASS and "was killed" in one.note for one in events)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A pod that must notice nothing, as it was seen at `now_s`."""

    name: str
    log: str
    restarts: int
    booked_mib: int
    now_s: float


def undisturbed(seen: Neighbour, kept_mib: int, since_s: float) -> None:
    """It has the memory that it had, goes on calling, and none of its calls failed or took long since then."""
    assert "refused" not in seen.log, seen.log[-2000:]
    assert seen.restarts == 0, f"{seen.name} was restarted {seen.restarts} times"
    assert kept_mib <= seen.booked_mib, (
        f"{seen.name} has {seen.booked_mib} MiB by the driver's records, and kept {kept_mib}"
    )
    lines = [(float(at), float(ms)) for at, _, ms in _CALLS.findall(seen.log)]
    silent_s = seen.now_s - max((at for at, _ in lines), default=since_s)
    assert silent_s <= SILENT_S, f"{seen.name} has logged nothing for {silent_s:.0f} s: a call hangs"
    slowest_ms = max((ms for at, ms in lines if at >= since_s), default=0.0)
    assert slowest_ms <= SLOWEST_MS, f"{seen.name}: a call took {slowest_ms:.0f} ms"
