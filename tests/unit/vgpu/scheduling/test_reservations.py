"""The store of reservations against the obvious slow one: a list, and the rules spelled out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.examples import examples
from vgpu.scheduling import reservations
from vgpu.scheduling.reservations import FIRST, KINDS, STAGES, Event, Kind, Reservations, WatchProgress

UIDS = st.sampled_from(["a", "b", "c", "d"])
EQUALS = 2
"""Of the same priority that yield, in this test."""

LIVES_S = {"reserved": 10.0, "kept": 40.0}


@dataclass
class SlowReservation:
    """One reservation, in the plainest form."""

    uid: str
    kind: Kind
    stage: str
    since_s: float
    priority: int

    def is_over(self, now_s: float, heard_s: float, listed_s: float, there: set[str]) -> bool:
        age_s = now_s - self.since_s
        if self.stage == "reserved":
            return age_s >= 10
        if self.stage == "in gang":
            return age_s >= 300
        if self.stage == "binding":
            return False
        if self.stage == "in doubt":
            return age_s >= 60 and heard_s >= self.since_s + 60
        if self.stage == "bound":
            return age_s >= 5 and listed_s > self.since_s and self.uid not in there
        if self.stage == "kept":
            return age_s >= 40
        return age_s >= 300

    def firm(self) -> bool:
        return self.stage in ("binding", "in doubt", "bound")


@dataclass
class SlowStore:
    """In the order in which they were made."""

    all: list[SlowReservation] = field(default_factory=list)

    def of(self, kind: Kind) -> list[SlowReservation]:
        return [one for one in self.all if one.kind == kind]

    def find(self, uid: str, kind: Kind) -> SlowReservation | None:
        return next((one for one in self.all if (one.uid, one.kind) == (uid, kind)), None)

    def drop(self, uid: str, *kinds: Kind) -> None:
        self.all = [one for one in self.all if one.uid != uid or one.kind not in kinds]

    def yielding(self, priority: int) -> set[str]:
        equals = [one.uid for one in self.of("nomination") if one.priority == priority]
        return {*equals[-EQUALS:], *(one.uid for one in self.of("nomination") if one.priority < priority)}


class ReservationMachine(RuleBasedStateMachine):
    """Pods are reserved for, bound, forgotten; time passes and the watch shows things."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.slow = Reservations(LIVES_S), SlowStore()  # type: ignore[arg-type]
        self.now_s, self.heard_s, self.listed_s = 100.0, 100.0, 100.0
        self.there: set[str] = set()

    @rule(uid=UIDS, kind=st.sampled_from(KINDS), priority=st.integers(0, 2))
    def put(self, uid: str, kind: Kind, priority: int) -> None:
        made = self.store.put(kind, uid, f"default/{uid}", "n1", self.now_s, priority=priority)
        assert made.stage == FIRST[kind]
        self.slow.drop(uid, kind)
        if kind == "preemption":
            self.slow.drop(uid, "nomination")
        stage = {"scheduling": "reserved", "preemption": "kept", "nomination": "planned"}[kind]
        self.slow.all.append(SlowReservation(uid, kind, stage, self.now_s, priority))

    @rule(uid=UIDS, event=st.sampled_from(["gang", "bind", "bind", "accepted", "no answer"]))
    def happens(self, uid: str, event: Event) -> None:
        self.store.on(event, uid, self.now_s)
        one = self.slow.find(uid, "scheduling")
        if one is None:
            return
        if event == "gang" and one.stage == "reserved":
            one.stage, one.since_s = "in gang", self.now_s
        elif event == "bind" and one.stage != "binding":
            one.stage, one.since_s = "binding", self.now_s
        elif event == "accepted" and one.stage in ("binding", "in doubt"):
            one.stage, one.since_s = "bound", self.now_s
        elif event == "no answer" and one.stage == "binding":
            one.stage, one.since_s = "in doubt", self.now_s

    @rule(
        uid=UIDS,
        events=st.sampled_from([["gang"], ["gang", "bind"], ["bind"], ["bind", "no answer"], ["bind", "accepted"]]),
    )
    def is_scheduled(self, uid: str, events: list[Event]) -> None:
        """What happens most, in one step: the machine gets further."""
        self.put(uid, "scheduling", 0)
        for event in events:
            self.happens(uid, event)

    @rule(uid=UIDS, kind=st.sampled_from(KINDS))
    def end(self, uid: str, kind: Kind) -> None:
        was = self.slow.find(uid, kind)
        assert (self.store.end(uid, kind) is not None) is (was is not None)
        self.slow.drop(uid, kind)

    @rule(uid=UIDS)
    def seen_bound_or_gone(self, uid: str) -> None:
        self.store.end_all(uid)
        self.slow.drop(uid, *KINDS)

    @rule(seconds=st.sampled_from([0.5, 4.0, 6.0, 11.0, 59.0, 61.0, 300.0]), heard=st.booleans(), listed=st.booleans())
    def time_passes(self, seconds: float, heard: bool, listed: bool) -> None:
        self.now_s += seconds
        self.heard_s = self.now_s if heard else self.heard_s
        self.listed_s = self.now_s if listed else self.listed_s

    @rule(
        kind=st.sampled_from(["scheduling", "scheduling", *KINDS]),
        dropped=st.booleans(),
        there=st.sampled_from(["", "abcd"]),
    )
    def lapses(self, kind: Kind, dropped: bool, there: str) -> None:
        self.there = set(there)
        shown = WatchProgress(
            self.heard_s, self.listed_s, lambda key, uid: key == f"default/{uid}" and uid in self.there
        )
        over = self.store.lapsed(kind, self.now_s, shown)
        expected = [
            one.uid for one in self.slow.of(kind) if one.is_over(self.now_s, self.heard_s, self.listed_s, self.there)
        ]
        assert over == expected
        for uid in over if dropped else ():
            self.end(uid, kind)

    @rule(priority=st.integers(0, 3))
    def a_pod_fits_no_node(self, priority: int) -> None:
        assert set(self.store.yielding(priority)) == self.slow.yielding(priority)

    @invariant()
    def both_know_the_same(self) -> None:
        assert {(one.uid, one.stage, one.rule.kind) for one in self.store} == {
            (one.uid, one.stage, one.kind) for one in self.slow.all
        }
        assert len(self.store) == len(self.slow.all)
        assert all(one.firm is slow.firm() for slow in self.slow.all if (one := self.store.get(slow.uid, slow.kind)))
        for uid in "abcd":
            kinds = [kind for kind in ("scheduling", "preemption", "nomination") if self.slow.find(uid, kind)]
            first = self.store.first(uid)
            assert (first.rule.kind if first else None) == (kinds[0] if kinds else None), (
                "the scheduling reservation counts, then the preemption reservation"
            )
            assert (uid in self.store) is bool(kinds)


def test_the_store_does_what_the_rules_say_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "EQUALS", EQUALS)
    run_state_machine_as_test(
        ReservationMachine,
        settings=settings(max_examples=examples(300), stateful_step_count=40, deadline=None, derandomize=True),
    )


def test_the_table_is_whole() -> None:
    assert {STAGES[stage].kind for stage in FIRST.values()} == set(KINDS)
    for stage, rule_ in STAGES.items():
        assert all(STAGES[after].kind == rule_.kind for after in rule_.next.values()), f"{stage} stays of its kind"
        assert (rule_.lapse == "never") is (rule_.life_s == 0), stage
        assert rule_.lapse != "never" or rule_.next, f"{stage} would never end"
    reached = set(FIRST.values()) | {after for rule_ in STAGES.values() for after in rule_.next.values()}
    assert reached == STAGES.keys()


def test_no_pod_may_take_what_may_become_a_bound_pod_and_its_own_pod_may_take_the_rest() -> None:
    takers = {stage: rule_.taker for stage, rule_ in STAGES.items()}
    assert takers == {
        "reserved": "its pod", "in gang": "its pod", "binding": "no pod", "in doubt": "no pod", "bound": "no pod", "kept": "its pod",
        "planned": "pods before it",
    }  # fmt: skip
