"""Every metric as a row: what the code registers, and what an operator may be warned by.

Names follow Prometheus's conventions (https://prometheus.io/docs/practices/naming/): `breaches` lists those that do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry

from hack.reference.alerts import ALERTS
from hack.reference.page import sentence, table
from hack.reference.programs import PROGRAMS, Program
from observe.pages import build_registry

HEADER: Final = ("metric", "type", "labels", "unit", "meaning", "an alert")
UNITS: Final = {"seconds": "s", "bytes": "bytes", "percent": "percent", "ratio": "0 to 1"}
"""Unit by the last word of a name. Without one it is a number of things."""
_THINGS: Final = "gpu|host_pool|node|pod|container"
"""What a metric is about that more than one program could export: then its name has the thing, not the program."""
_NOT_BASE: Final = re.compile(r"_(ms|us|ns|milliseconds|microseconds|kib|mib|gib|kb|mb|gb|minutes|hours)(_|$)")
_HISTOGRAM_PARTS: Final = ("_bucket", "_count", "_sum", "_created", "_info")


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. A counter's name has its `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def unit(self) -> str:
        """What its number counts."""
        if self.name.endswith("_timestamp_seconds"):
            return "s since 1970"
        return UNITS.get(self.name.removesuffix("_total").rpartition("_")[2], "")


def rows(registry: CollectorRegistry) -> Iterator[Row]:
    """Every metric of a registry, by name. Labels are known to the library's own classes only, even before there is a value."""
    found = []
    for collector in list(registry._collector_to_names):
        instrument: Any = collector
        families: Iterable[Any] = [instrument] if hasattr(instrument, "_labelnames") else collector.collect()
        for family in families:
            described = family.describe()[0] if hasattr(family, "describe") else family
            name = f"{described.name}_total" if described.type == "counter" else described.name
            found.append(Row(name, described.type, tuple(family._labelnames), sentence(described.documentation)))
    return iter(sorted(found, key=lambda row: row.name))


def breaches(program: str, row: Row) -> Iterator[str]:
    """What is wrong with a metric's name, labels or text."""
    if not re.fullmatch(rf"tangram_({program}|{_THINGS})(_[a-z][a-z0-9]*)+", row.name):
        yield f"{row.name}: is not tangram_{program}_ (or of a thing: {_THINGS}) and words of lower case"
    if found := _NOT_BASE.search(row.name):
        yield f"{row.name}: {found[1]} is no base unit (seconds, bytes)"
    if row.kind != "counter" and row.name.endswith("_total"):
        yield f"{row.name}: _total is for counters, this is a {row.kind}"
    if row.kind == "histogram" and not row.unit:
        yield f"{row.name}: a histogram ends with its unit, one of {', '.join(UNITS)}"
    if row.name.removesuffix("_total").endswith(_HISTOGRAM_PARTS):
        yield f"{row.name}: ends with what Prometheus adds by itself ({', '.join(_HISTOGRAM_PARTS)})"
    for label in row.labels:
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", label) or label in ("le", "quantile", "job", "instance"):
            yield f"{row.name}: label {label} is not in snake case, or Prometheus's own"
    if len(row.text) < 10:
        yield f"{row.name}: text {row.text!r} is no sentence"


def unknown_alerts() -> list[str]:
    """Names in the list of alerts that no program has."""
    known = {row.name for program in PROGRAMS for row in rows(program.registry())}
    return sorted(set(ALERTS) - known)


def section(program: Program) -> str:
    """The heading and the table of one program."""
    port = program.settings.model_fields[program.port].default
    head = f"## {program.package}\n\nRuns {program.runs}; `/metrics` on port {port}.\n\n"
    return head + table(HEADER, _cells(program.registry()))


def _cells(registry: CollectorRegistry) -> Iterator[tuple[str, ...]]:
    for row in rows(registry):
        labels = ", ".join(f"`{label}`" for label in row.labels)
        yield f"`{row.name}`", row.kind, labels, row.unit, row.text, ALERTS.get(row.name, "")


def tables() -> str:
    """The made part of docs/reference/metrics.md."""
    common = "## every program\n\nAt the end of each `/metrics`.\n\n" + table(HEADER, _cells(build_registry()))
    return "\n".join([common, *(section(program) for program in PROGRAMS)])
