"""A card whose driver does not answer: its tenants go on by themselves, the others are served, and /healthz says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from arbiter.metrics import STUCK_AFTER_S, stuck
from arbiter.timer import now_s
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.turns_kit import A, B, Driver, Tenant, TurnsNode
from vgpu import wire
from vgpu.timing import Settings

SILENCE_S = 0.6
"""After so long the library enables its own channels."""


@pytest.fixture
def node(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode(settings=Settings(starve_after_s=600))
    yield made
    assert not made.failed.is_set(), "a card's thread failed"
    made.close()


def silent_s(node: TurnsNode, name: str) -> float:
    """How long its page has shown no sign of life."""
    return now_s() - node.pages[name]._numbers[wire.TURN_AT // 8] / 1000


def hang(driver: Driver, of: Tenant) -> threading.Event:
    """The next call for this one does not return before the event."""
    go_on, hung = threading.Event(), threading.Event()

    def before(client: int, _disable: bool) -> None:
        if client == of.client:
            hung.set()
            go_on.wait(120)

    driver.before = before
    of.tells_channels((5, 6))
    assert hung.wait(30)
    return go_on


def test_who_depends_on_a_card_that_hangs_sees_no_sign_of_life_and_the_others_do(node: TurnsNode, driver: Driver):
    off, gang, elsewhere = (
        node.tenant("off", "best-effort"),
        node.tenant("gang", "best-effort", cards=(B, A), channels=False),
        node.tenant("elsewhere", cards=(B,)),
    )
    for card in (0, 1):
        gang.tells_channels(card=card, client=gang.client + 1000 * card)
    urgent = node.tenant("lc", "latency-critical")
    off.works()
    urgent.works()
    elsewhere.works()
    wait_for(lambda: driver.off(off) and not node.status("off").on)
    wait_for(lambda: silent_s(node, "off") < SILENCE_S, 30)
    go_on = hang(driver, urgent)
    try:
        wait_for(lambda: silent_s(node, "off") > SILENCE_S and silent_s(node, "gang") > SILENCE_S, 30)
        wait_for(lambda: silent_s(node, "elsewhere") < SILENCE_S, 30)
        assert min(silent_s(node, "off"), silent_s(node, "gang")) > SILENCE_S
        card, seconds = node.turns.lanes.stuck(now_s())
        assert card == A
        assert seconds > SILENCE_S - 0.01  # the page tells milliseconds
    finally:
        go_on.set()
    wait_for(lambda: silent_s(node, "off") < SILENCE_S and silent_s(node, "gang") < SILENCE_S, 30)


def test_who_went_on_by_himself_on_another_card_too_is_stopped_there_again(node: TurnsNode, driver: Driver):
    """His page said nothing for as long as one of his cards hung; the thread of the other one noticed nothing."""
    gang = node.tenant("gang", "best-effort", cards=(B, A), channels=False)
    there = gang.client + 1000
    gang.tells_channels(card=0, client=there)
    gang.tells_channels(card=1)
    urgent = node.tenant("lc", "latency-critical")
    gang.works()
    urgent.works()
    wait_for(lambda: driver.off(gang) and driver.off(gang, there) and not node.status("gang").on)
    go_on = hang(driver, urgent)
    try:
        wait_for(lambda: silent_s(node, "gang") > SILENCE_S, 30)
        driver.goes_on_by_itself(gang, there)
        driver.goes_on_by_itself(gang)
    finally:
        go_on.set()
    wait_for(lambda: driver.off(gang) and driver.off(gang, there), 30)


def test_health_names_the_card_whose_thread_hangs(node: TurnsNode):
    node.tenant("a")
    server = SimpleNamespace(turned_at_s=now_s(), turns=node.turns)
    assert stuck(server, now_s()) == ""  # type: ignore[arg-type]
    later_s = now_s() + STUCK_AFTER_S + 1
    server.turned_at_s = later_s
    assert stuck(server, later_s).startswith(f"the thread of card {A} has not come round for ")  # type: ignore[arg-type]
    server.turned_at_s = 0.0
    assert stuck(server, later_s).startswith("the loop has not come round for ")  # type: ignore[arg-type]
