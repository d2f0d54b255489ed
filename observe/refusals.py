"""How often a program's listeners refused something, by listener and reason, as one counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

REASONS: Final = (
    "connections", "rate", "memory", "late", "unread", "handshake", "malformed", "header", "body", "pipelined",
    "no-token", "unauthorized", "forbidden", "not-reviewed", "review-rate",
)  # fmt: skip
"""Of HTTP listeners. docs/operations/server-limits.md explains each."""


class RefusalCounter(Protocol):
    """Counts so many more refusals for a reason of `REASONS`."""

    def __call__(self, reason: str, more: int = 1, /) -> None: ...


def not_counted(_reason: str, _more: int = 1, /) -> None:
    """For a listener whose refusals are not counted."""


class Refusals(Collector):
    """Of one program; for one thread."""

    def __init__(self, program: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._name = f"tangram_{program}_refused"

    def of(self, listener: str) -> RefusalCounter:
        """What a listener calls."""

        def refused(reason: str, more: int = 1, /) -> None:
            self.counts[listener, reason] += more

        return refused

    def collect(self) -> Iterable[Metric]:
        """One family."""
        return [refused_family(self._name, self.counts)]


def refused_family(name: str, counts: Counter[tuple[str, str]]) -> CounterMetricFamily:
    """(listener, reason) -> how often."""
    family = CounterMetricFamily(
        name, "Connections and requests refused, or ended for others' sake, by listener and reason.", labels=("listener", "reason")
    )  # fmt: skip
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    return family
