"""What follows when the driver's count and a container's word cannot both be true. The driver is a double of Seat's call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from arbiter.turn_metrics import families
from arbiter.witness import add_up
from nvml.utilisation import Busy
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.turns_kit import A, Driver, TurnsNode
from vgpu import wire
from vgpu.grant import Grant, GrantCard
from vgpu.untold import Doubt
from vgpu.wire import Activity, What


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr("arbiter.seat.fcntl.ioctl", made.ioctl)
    return made


@pytest.fixture
def node(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode()
    yield made
    assert not made.failed.is_set(), "a card's thread failed"
    made.close()
    assert driver.owed() == 0, "everybody runs after the end"


def accuse(node: TurnsNode, name: str) -> None:
    """As after seconds in which the driver saw it compute without a word."""
    wait_for(lambda: name in node.turns.statuses())
    with node.turns.lock:
        node.turns.tenants[name].suspicion.look(100.0, 0.0, 100.0)
        node.turns.tenants[name].suspicion.proven = False
    node.turns.witness({name: 1.0})
    node.turns.witness({name: 1.0})
    assert node.status(name).untold


def acquit(node: TurnsNode, name: str) -> None:
    with node.turns.lock:
        node.turns.tenants[name].suspicion.seconds = 0.0
    node.turns.witness({name: 0.0})
    assert not node.status(name).untold


def works_unseen(node: TurnsNode, name: str) -> bool:
    """Does the policy take it to have work?"""
    with node.turns.lock:
        return node.turns.share._states[name].working


def test_who_computes_unsaid_gives_way_to_whoever_has_work_and_is_no_longer_believed(node: TurnsNode, driver: Driver):
    liar, other = node.tenant("liar"), node.tenant("other")
    other.works()
    wait_for(lambda: node.status("other").working)
    assert not driver.off(liar)
    with capture_logs() as log:
        accuse(node, "liar")
    assert [line["grant"] for line in log if line["log_level"] == "warning"] == ["liar"]
    wait_for(lambda: driver.off(liar))
    liar.idles()
    assert node.is_quiet()
    assert driver.off(liar), "its word does not count"
    assert not node.status("liar").working
    other.idles()
    wait_for(lambda: not driver.off(liar))
    other.works()
    wait_for(lambda: driver.off(liar))
    acquit(node, "liar")
    assert not works_unseen(node, "liar")
    other.idles()
    wait_for(lambda: not driver.off(liar))


def test_what_it_does_tell_of_keeps_its_class(node: TurnsNode, driver: Driver):
    """So one that is accused wrongly loses nothing at its requests."""
    one, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    accuse(node, "lc")
    assert node.is_quiet()
    assert not driver.off(background), "untold work of a latency-critical container stops nobody"
    one.works()
    wait_for(lambda: driver.off(background))
    one.idles()
    wait_for(lambda: not driver.off(background))


def test_a_verdict_outlives_the_process_and_a_container_without_processes_has_no_work(node: TurnsNode, driver: Driver):
    liar, other = node.tenant("liar"), node.tenant("other")
    other.works()
    accuse(node, "liar")
    wait_for(lambda: driver.off(liar))
    driver.free(liar)
    liar.close()
    wait_for(lambda: not works_unseen(node, "liar"))
    again = node.tenant("liar")
    wait_for(lambda: driver.off(again))


def test_a_container_that_is_not_there_any_more_is_not_judged(node: TurnsNode):
    node.tenant("a")
    node.status("a")
    node.drop("a")
    node.turns.witness({"a": 1.0, "never": 1.0})
    assert "a" not in node.turns.statuses()


def test_who_is_not_listened_to_counts_as_working_meanwhile(node: TurnsNode, driver: Driver, monkeypatch):
    """Else a flood of messages would hide work, and a container of many processes would be taken for a liar."""
    told: list[float] = []
    monkeypatch.setattr(Doubt, "look", lambda _, passed_s, told_s, __: told.append(told_s / passed_s))
    flooder = node.tenant("flood", "best-effort")
    node.status("flood")
    with node.turns.lock:
        node.turns.tenants["flood"].budget._a_second = 200.0  # so that a slow machine floods, too
    stop = threading.Event()

    def flood() -> None:
        flooder.sock.setblocking(True)
        with suppress(OSError):  # hung up on at the end, in the middle of a send
            while not stop.is_set():
                for what in (What.WORK, What.IDLE):
                    flooder.sock.send(wire.encode(1, Activity(what)))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_for(lambda: node.turns.counts.held_back, 20)
        node.turns.witness({"flood": 0.0})
        held_back = node.turns.counts.held_back
        wait_for(lambda: node.turns.counts.held_back > held_back + 3, 20)
        node.turns.witness({"flood": 1.0})
    finally:
        stop.set()
        flooder.sock.shutdown(2)
        thread.join(10)
    assert told[0] > 0.5


def test_each_process_counts_for_the_container_whose_grant_it_has(node: TurnsNode):
    watched = {"a": (frozenset({"0", "1"}), frozenset({1, 2})), "b": (frozenset({"0"}), frozenset({3}))}
    cards = {"0": Busy({1: 20, 2: 10, 3: 30, 4: 15, 5: 40}, 7), "1": Busy({1: 50}, 7)}
    assert add_up(watched, cards, {}) == {"a": 0.5, "b": 0.3}
    assert add_up(watched, cards, {4: "a", 2: "b"}) == {"a": 0.5, "b": 0.4}
    assert add_up(watched, cards, {5: "a"}) == {"a": 0.7, "b": 0.3}


@given(st.dictionaries(st.integers(1, 9), st.integers(1, 100)))
def test_no_container_computes_for_more_than_all_of_the_time(percent: dict[int, int]) -> None:
    watched = {"a": (frozenset({"0"}), frozenset(range(1, 10)))}
    assert 0.0 <= add_up(watched, {"0": Busy(percent, 1)}, {})["a"] <= 1.0


def test_what_is_asked_and_had_and_waited_for_is_in_the_metrics(node: TurnsNode, driver: Driver):
    capped, urgent = node.tenant("capped", core=30), node.tenant("lc", "latency-critical")
    capped.works()
    wait_for(lambda: node.status("capped").suspends >= 1)
    urgent.works()
    wait_for(lambda: node.status("lc").working)
    grants = {name: Grant("ns", name, "", "main", (GrantCard(A, 1, 0),), "standard", 2) for name in ("capped", "lc")}
    node.turns.witness({"capped": 0.3})
    told = {
        (sample.name.removeprefix("tangram_arbiter_"), sample.labels.get("pod", "")): sample.value
        for family in families(node.turns, grants)
        for sample in family.samples
    }
    assert told["turns_asked_percent", "capped"] == 30
    assert told["turns_asked_percent", "lc"] == told["turns_credit_seconds", "lc"] == 0
    assert -0.1 < told["turns_credit_seconds", "capped"] <= 0.3 * 0.05 * 3
    assert told["turns_on_seconds_total", "capped"] > 0
    assert told["suspends_total", "capped"] >= 1
    assert 0 < told["turns_suspended_seconds_total", "capped"] >= told["turns_capped_seconds_total", "capped"]
    assert told["turns_arrivals_total", "lc"] == 1
    assert told["turns_clearing_seconds_total", "lc"] >= 0
    assert told["turns_seen_seconds_total", "capped"] == 0, "the first look has nothing to compare with"
    assert told["turns_untold", "capped"] == 0
    assert told["turns_untold_found_total", ""] == 0
