"""Kubernetes quantities, exactly, and memory as Tangram counts it.

`8Gi` and `8` mean the same to a user who requests GPU memory: a number of at least 2**20 is bytes, a smaller one is units
of the cluster's memory unit (1 GiB unless the chart sets another). No quantity of either kind is mistaken for the other:
2**20 units would be a GPU of 1 PiB, and fewer than 2**20 bytes would be less than any unit.

Source of the grammar: k8s.io/apimachinery/pkg/api/resource, Quantity ("serialization format").
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, NewType

from vgpu.api.errors import BadRequest

Mib = NewType("Mib", int)

MIB: Final = 2**20
SMALLEST_BYTES: Final = 2**20
"""A gpu-mem number from here on is bytes."""

MEMORY_UNITS_MIB: Final = {"1Gi": 1024, "512Mi": 512, "256Mi": 256}
"""Units a chart may choose. Smaller ones break the kubelet's 4 MiB limit on ListAndWatch (measured)."""

LARGEST: Final = 2**63 - 1
"""Largest number that a Kubernetes quantity has without rounding."""

LARGEST_GPU_MIB: Final = 2**24 - 1
"""16 TiB, some fifty times the largest GPU sold. 256 such GPUs still count below 2**32 MiB."""

LARGEST_CPU_MILLI: Final = 2**31 - 1
"""Thousandths of a processor that are distinguished: two million processors. What is more counts as so many."""

LONGEST_TEXT: Final = 64
"""Characters of a quantity that are read; Kubernetes writes at most 21. Guards against numbers of a million digits."""

_BINARY = {f"{s}i": 2 ** (10 * (i + 1)) for i, s in enumerate("KMGTPE")}
_DECIMAL = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
}  # fmt: skip
_GRAMMAR = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?\Z")


def parse(text: str | int) -> Fraction:
    """The exact value of a Kubernetes quantity.

    Raises BadRequest when it is none: `8 GB`, `8gb`, `0x10`, the empty string.
    """
    written = str(text)
    found = _GRAMMAR.match(written) if len(written) <= LONGEST_TEXT else None
    if not found:
        raise BadRequest(
            f"{_shown(written)!r} is not a Kubernetes quantity: write a number such as 8, or one with a suffix such as 8Gi or 8192Mi"
        )
    sign, digits, suffix, exponent = found.groups()
    value = Fraction(digits) * (
        Fraction(10) ** int(exponent) if exponent else _BINARY.get(suffix or "") or _DECIMAL[suffix or ""]
    )
    return -value if sign == "-" else value


def whole_number(text: str | int, *, what: str, at_most: int = LARGEST) -> int:
    """The quantity as an integer from 1 to `at_most`; `what` names it in the error."""
    try:
        value = parse(text)
    except BadRequest as error:
        raise BadRequest(f"{what}: {error}") from None
    if value.denominator != 1 or not 1 <= value <= at_most:
        upper = f"1 to {at_most}" if at_most != LARGEST or value > at_most else "1 or more"
        raise BadRequest(f"{what} is {text}: it must be a whole number, {upper}")
    return int(value)


def memory_units(text: str | int, *, unit_mib: int, what: str, most: int = SMALLEST_BYTES - 1) -> int:
    """A gpu-mem quantity in the cluster's units, bytes rounded up to whole units.

    Raises BadRequest when it is malformed, zero, negative or fractional, or more than `most` units; more than the default would read as bytes.
    """
    try:
        value = parse(text)
    except BadRequest as error:
        raise BadRequest(f"{what}: {error}") from None
    if value.denominator != 1 or value < 1:
        raise BadRequest(f"{what} is {text}: it must be a whole number, 1 to {most} units of {unit_mib} MiB, or bytes")
    units = int(value if value < SMALLEST_BYTES else -(-value // (unit_mib * MIB)))
    if units > most:
        plain = str(text).isdigit() and value < SMALLEST_BYTES
        hint = f"; a plain number counts units, so write {text}Mi for MiB" if plain else ""
        raise BadRequest(
            f"{what} is {text}, which is {counted(units)} of {unit_mib} MiB: it must be 1 to {most} units{hint}"
        )
    return units


def rounds_up(text: str | int, *, unit_mib: int) -> bool:
    """Would `memory_units` return more than was requested?"""
    value = parse(text)
    return value >= SMALLEST_BYTES and value % (unit_mib * MIB) != 0


def _shown(text: str) -> str:
    """The text, or its beginning when it would flood an error."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def counted(units: int) -> str:
    """`1 unit`, `2 units`."""
    return "1 unit" if units == 1 else f"{units} units"
