"""Which addresses are blocked: those that open more connections than any client needs, for as long as they go on."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from observe.connection_rates import (
    ADDRESSES_MOST,
    BLOCKED_MOST_S,
    BLOCKED_S,
    REFUSED_COST,
    ConnectionRates,
)

PER_S, AT_ONCE = 4.0, 16.0
ADDRESSES = ("a", "b")
WAITS = st.integers(0, 24).map(lambda quarters: quarters / 4)


class Slowly:
    """One address, with a budget that is brought up to date in steps of a 64th of a second."""

    def __init__(self) -> None:
        self.left, self.at_s, self.until_s = AT_ONCE, 0.0, -1.0

    def pass_until(self, at_s: float) -> None:
        while self.at_s < at_s:
            self.at_s += 1 / 64
            self.left = min(AT_ONCE, self.left + PER_S / 64)

    def spend(self, cost: float) -> None:
        self.left = max(self.left - cost, -(BLOCKED_MOST_S - BLOCKED_S) * PER_S)
        if self.left < 0:
            self.until_s = self.at_s + BLOCKED_S + -self.left / PER_S


@given(st.lists(st.tuples(WAITS, st.sampled_from(ADDRESSES), st.sampled_from([1.0, 7.0, REFUSED_COST])), max_size=60))
def test_an_address_is_blocked_as_the_slow_version_says(calls):
    rates, slowly, now_s = ConnectionRates(PER_S, AT_ONCE), {address: Slowly() for address in ADDRESSES}, 0.0
    for wait_s, address, cost in calls:
        now_s += wait_s
        rates.release(now_s)
        for one in slowly.values():
            one.pass_until(now_s)
        assert set(rates.blocked) == {name for name, one in slowly.items() if one.until_s > now_s}
        before = rates.is_blocked(address)
        began = rates.spend(address, now_s, cost)
        slowly[address].spend(cost)
        assert rates.is_blocked(address) == (slowly[address].until_s > now_s)
        assert began == (rates.is_blocked(address) and not before), "it is reported once"


def test_a_client_within_its_rate_is_never_blocked():
    rates = ConnectionRates(10, 256)
    assert not any(rates.spend("kubelet", number / 10) for number in range(10_000))
    assert not any(rates.spend("scheduler", 0.0) for _ in range(256)), "nor one that makes all its connections at once"


def test_a_flood_has_a_few_connections_each_ten_seconds():
    rates, begun_s, had = ConnectionRates(10, 256), list[float](), 0
    for now_s in (at / 100 for at in range(60 * 100)):
        rates.release(now_s)
        for _ in range(0 if rates.is_blocked("flood") else 100):  # before the kernel drops them
            had += 1
            if rates.spend("flood", now_s):
                begun_s.append(now_s)
    assert all(BLOCKED_S <= later - sooner <= BLOCKED_MOST_S + 1 for sooner, later in pairwise(begun_s))
    assert had < 256 + 60 * 100


def test_without_a_rate_nobody_is_blocked_and_nothing_is_kept():
    rates = ConnectionRates()
    assert not any(rates.spend("flood", 0.0, REFUSED_COST) for _ in range(100_000))
    assert not rates.blocked
    assert not rates._budgets


def test_addresses_that_stopped_are_forgotten_and_there_are_never_too_many():
    rates = ConnectionRates(PER_S, AT_ONCE)
    for number in range(ADDRESSES_MOST + 100):
        rates.spend(f"10.0.{number >> 8}.{number & 255}", 0.0, 2 * AT_ONCE)
    assert len(rates._budgets) == ADDRESSES_MOST
    assert len(rates.blocked) == ADDRESSES_MOST
    assert rates.release(100.0)
    assert not rates.blocked
    assert not rates._budgets


def test_an_address_that_is_answered_well_is_released_at_once():
    rates = ConnectionRates(PER_S, AT_ONCE)
    for address in ADDRESSES:
        assert rates.spend(address, 0.0, 2 * AT_ONCE)
    assert rates.release(0.1, lambda address: address == "a")
    assert rates.blocked == ["b"]
