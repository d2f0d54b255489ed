"""Quantities against an independent exact reading of the grammar."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadRequest
from vgpu.api.quantity import counted, memory_units, parse, rounds_up, whole_number

SUFFIXES = {
    "": "1", "n": "1e-9", "u": "1e-6", "m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15", "E": "1e18",
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60, "e3": "1e3", "E-2": "1e-2",
}  # fmt: skip


@given(
    st.sampled_from(["", "+", "-"]),
    st.from_regex(r"[0-9]{1,15}(\.[0-9]{0,9})?|\.[0-9]{1,9}", fullmatch=True),
    st.sampled_from(sorted(SUFFIXES)),
)
def test_a_quantity_has_its_exact_value(sign: str, digits: str, suffix: str) -> None:
    with localcontext() as context:
        context.prec = 100
        expected = Decimal(sign + digits) * Decimal(SUFFIXES[suffix])
    assert parse(sign + digits + suffix) == Fraction(expected)


@given(st.one_of(st.text(), st.integers(), st.from_regex(r"[0-9.+-]{1,70}[eEKMGi]{0,3}[0-9]{0,5}", fullmatch=True)))
def test_anything_else_is_a_bad_request_and_never_another_error(text: str | int) -> None:
    try:
        value = memory_units(text, unit_mib=1024, what="x")
    except BadRequest:
        return
    assert 1 <= value < 2**20


@pytest.mark.parametrize("text", ["", "8 GB", "8gb", "0x10", "1e", "8\n", ".", "9" * 5000, "1e999999999", "NaN", "٣"])
def test_what_is_no_quantity_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a Kubernetes quantity"):
        parse(text)


@given(st.integers(1, 2**40), st.sampled_from([256, 512, 1024]))
def test_bytes_are_rounded_up_to_units_and_smaller_numbers_are_units(number: int, unit_mib: int) -> None:
    unit = unit_mib * 2**20
    units = memory_units(number, unit_mib=unit_mib, what="x")
    if number < 2**20:
        assert units == number
        assert not rounds_up(number, unit_mib=unit_mib)
    else:
        assert (units - 1) * unit < number <= units * unit
        assert rounds_up(number, unit_mib=unit_mib) == (units * unit != number)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0", "x is 0: it must be a whole number, 1 or more"),
        ("-3", "x is -3: it must be a whole number, 1 or more"),
        ("1.5", "x is 1.5: it must be a whole number, 1 or more"),
        ("8Ei", "x is 8Ei: it must be a whole number, 1 to 9223372036854775807"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(text: str, sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        whole_number(text, what="x")
    assert str(caught.value) == sentence


def test_one_unit_is_counted_as_one() -> None:
    assert (counted(1), counted(2), counted(0)) == ("1 unit", "2 units", "0 units")
