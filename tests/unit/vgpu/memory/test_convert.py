"""Elastic lease that becomes resident, because others open the memory."""

from __future__ import annotations

import pytest

from vgpu.api.errors import BadDocument
from vgpu.memory.ledger import Ledger
from vgpu.memory.records import Denied, Granted

MIB = 2**20


def burst(guarantee: int, limit: int) -> Ledger:
    """A container that may burst, with one process."""
    ledger = Ledger([guarantee])
    ledger.set_limits([guarantee], 0.0, [limit])
    ledger.join(1)
    return ledger


def test_it_counts_against_the_guarantee_from_then_on() -> None:
    ledger = burst(100, 1000)
    ledger.request(1, 0, 1, 900, 0, 0.0, elastic=True)
    assert ledger.convert(1, 0, 2, 60) == Granted(1, 0, 2, 60)
    assert ledger.claimed_bytes(0) == (60, 840)
    assert ledger.request(1, 0, 3, 41, 0, 0.0) == [Denied(1, 0, 3)], "resident memory has 40 left"
    assert ledger.leased_bytes(0) == 900


def test_beyond_the_guarantee_it_is_refused_and_nothing_changes() -> None:
    ledger = burst(100, 1000)
    ledger.request(1, 0, 1, 900, 0, 0.0, elastic=True)
    assert ledger.convert(1, 0, 2, 101) == Denied(1, 0, 2)
    assert ledger.claimed_bytes(0) == (0, 900)


def test_it_needs_no_free_memory() -> None:
    ledger = burst(100, 1000)
    ledger.request(1, 0, 1, 1000, 0, 0.0, elastic=True)
    assert ledger.convert(1, 0, 2, 100) == Granted(1, 0, 2, 100)
    assert ledger.unleased_bytes(0) == 0


def test_what_a_new_arbiter_counts_as_resident_is_resident_already() -> None:
    ledger = burst(100, 1000)
    ledger.state(1, 0, 300, 300)
    assert ledger.convert(1, 0, 2, 200) == Granted(1, 0, 2, 200)
    assert ledger.claimed_bytes(0) == (300, 0)


def test_more_than_is_leased_is_no_statement() -> None:
    ledger = burst(100, 1000)
    with pytest.raises(BadDocument, match="CONVERT of 5 bytes: 0 to 0 are leased"):
        ledger.convert(1, 0, 2, 5)


def test_the_first_that_stated_a_key_is_its_maker_until_it_is_gone() -> None:
    ledger = burst(100, 1000)
    ledger.join(2)
    for process in (1, 2):
        ledger.request(process, 0, process, 50, 0, 0.0, elastic=True)
        ledger.make(process, 0, b"key", 10)
    assert ledger.maker(0, b"key") == 1
    ledger.leave(1, 0.0)
    assert ledger.maker(0, b"key") == 2
    assert ledger.maker(0, b"other") is None
