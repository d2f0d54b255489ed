"""kube-scheduler's cycles of one gang, with pauses between its pods: what it binds has a reservation, and what it could bind it binds soon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.scheduling.gang_facts import ReservationFacts
from vgpu.scheduling.gang_pauses import LONGEST_QUIET_S, LONGEST_S, GangPauses
from vgpu.scheduling.gangs import QUIET_S, Gangs

PODS = 4
PAUSES_S = [0.0, 0.0, 0.0, 1.0, 3.0, 10.0, 29.0]


@dataclass(frozen=True)
class Try:
    """One pod in one cycle."""

    pause_s: float = 0.0
    """Before its call."""
    fits: bool = True
    passes: bool = True
    """Or do kube-scheduler's own filters refuse it this time?"""


@dataclass(frozen=True)
class After:
    """What happens from one cycle of the gang to the next."""

    seconds: float = 0.0
    other: bool = False
    """Is a pod of no gang tried?"""
    shown: bool = False
    """Does the watch show what kube-scheduler reports of each pod?"""
    fails: frozenset[int] = frozenset()
    """Which pods fail one after the other before they are bound, if the gang fits; then all do."""


@dataclass
class GangScheduler:
    """A gang whose pods all request a GPU, and kube-scheduler, which tries them in order."""

    min_count: int
    called: tuple[bool, ...] = (True,) * PODS
    """Others kube-scheduler's own filters refuse at each try."""
    gangs: Gangs = field(default_factory=Gangs)
    reserved: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)
    """Pods that kube-scheduler has nominated, as it is to bind them."""
    now_s: float = 0.0
    fitted: bool = False

    def __post_init__(self) -> None:
        self.uids = [f"g{at}" for at in range(PODS)]
        self.facts = ReservationFacts(self.reserved.__contains__, expected=self.expected.__contains__)
        self.gangs.set_min_count("g", self.min_count)
        for uid in self.uids:
            self.gangs.see(uid, "g", "waits")

    def pass_s(self, seconds: float) -> None:
        """In steps of half a second, as the extender checks once a second."""
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            for failed in self.gangs.quiet(self.now_s, self.facts):
                self.reserved.difference_update(failed.uids)

    def call(self, uid: str, group: str, *, fits: bool) -> bool:
        """Filter: does the pod fit?"""
        if self.gangs.refuses(uid, group, self.now_s):
            self.reserved.discard(uid)
            return False
        found = self.gangs.next_pod(uid, group, self.facts, again=uid in self.reserved)
        self.reserved.difference_update({one for failed in found for one in failed.uids})
        if group:
            self.gangs.called(uid, group, self.now_s)
            self.reserved.discard(uid)
            if fits:
                self.reserved.add(uid)
        self.gangs.answered(uid, group, fits=fits, reserved=fits)
        return fits

    def cycle(self, tries: Iterable[Try]) -> set[str]:
        """The pods that fit, if the gang is scheduled: all of them fit. Else none."""
        fit = set[str]()
        for uid, one, called in zip(self.uids, tries, self.called, strict=True):
            self.pass_s(one.pause_s)
            if called and one.passes and self.call(uid, "g", fits=one.fits):
                fit.add(uid)
        if len(fit) < self.min_count:
            return set()
        assert fit <= self.reserved
        return fit

    def wait(self, fit: set[str], after: After) -> None:
        """The gang fits, and its pods wait for volumes. One that fails is tried again by itself; the others keep their reservations. In the end all fail."""
        if not self.fitted:
            self.gangs.fitted("g", self.facts)
        self.fitted = True
        self.expected.update(fit)
        for uid in fit:
            self.gangs.nominated(uid, "g")
        for uid in [one for one in self.uids if one in fit and int(one[1:]) in after.fails]:
            self.withdraw(uid)
            if after.other:
                self.call("p", "", fits=False)
            self.call(uid, "g", fits=False)
            self.pass_s(after.seconds)
            fit = fit - {uid}
            assert fit <= self.reserved
        for uid in fit:
            self.withdraw(uid)

    def withdraw(self, uid: str) -> None:
        """It failed."""
        self.expected.discard(uid)
        self.gangs.withdrawn(uid, "g", self.now_s)

    def go_on(self, after: After) -> None:
        """To the next cycle."""
        for uid in self.uids if after.shown else ():
            self.gangs.refusal_shown(uid, "g")
        if after.other:
            self.call("p", "", fits=False)
        self.pass_s(after.seconds)


def attempts(pauses_s: list[float], back_offs_s: list[float]) -> st.SearchStrategy[list[tuple[list[Try], After]]]:
    """Cycles of a gang, and what comes after each."""
    passes = st.sampled_from([True, True, True, False])
    tries = st.builds(Try, st.sampled_from(pauses_s), st.sampled_from([True, True, False]), passes)
    fails = st.frozensets(st.integers(0, PODS - 1))
    after = st.builds(After, st.sampled_from(back_offs_s), st.booleans(), st.booleans(), fails)
    return st.lists(st.tuples(st.lists(tries, min_size=PODS, max_size=PODS), after), max_size=4)


histories = attempts(PAUSES_S, [1.0, 5.0]) | attempts([0.0, 1.0], [0.0, 1.0, 5.0])
"""kube-scheduler waits for 1 s at least before it tries a gang again, or it tries it at once and does not pause."""


@settings(max_examples=examples(1000), deadline=None, derandomize=True)
@given(
    st.integers(2, PODS),
    st.tuples(*[st.sampled_from([True, True, False])] * PODS),
    histories,
    st.sampled_from([0.0, 1.0, 3.0, 9.0]),
)
def test_a_gang_is_bound_only_with_reservations_for_all_of_it_and_soon_if_it_fits(
    min_count: int, called: tuple[bool, ...], history: list[tuple[list[Try], After]], pause_s: float
) -> None:
    cluster = GangScheduler(min_count, called)
    for attempt, after in history:
        if fit := cluster.cycle(attempt):
            cluster.wait(fit, after)
        cluster.go_on(after)
    for _ in range(5 if sum(called) >= min_count else 0):
        if cluster.cycle([Try(pause_s)] * PODS):
            return
        cluster.go_on(After(3.0, shown=True))
    assert sum(called) < min_count, "it fits, and is not scheduled"


def alike(history: list[tuple[list[Try], After]]) -> list[tuple[list[Try], After]]:
    """kube-scheduler's own filters refuse the same pods at each try as at the first."""
    first = [one.passes for one in history[0][0]] if history else []
    return [
        ([replace(one, passes=passes) for one, passes in zip(attempt, first, strict=True)], after)
        for attempt, after in history
    ]


@given(st.integers(2, PODS), attempts([0.0], [0.0, 1.0, 5.0]).map(alike))
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_of_a_gang_that_never_fits_nothing_stays_reserved_once_others_request(
    min_count: int, history: list[tuple[list[Try], After]]
) -> None:
    cluster = GangScheduler(min_count)
    for attempt, after in history:
        if cluster.cycle(attempt):
            return
        cluster.go_on(after)
    cluster.call("p", "", fits=True)
    cluster.pass_s(QUIET_S + 1)
    assert not cluster.reserved


def test_two_tries_that_see_no_pod_twice_count_as_one_and_keep_their_reservations_until_the_gang_is_tried_again() -> (
    None
):
    """kube-scheduler's own filters refuse three pods at the first try and the first three at the second (docs/tasks/gangs.md)."""
    cluster = GangScheduler(min_count=2)
    assert not cluster.cycle([Try(), *[Try(passes=False)] * 3])
    cluster.go_on(After())
    assert not cluster.cycle([*[Try(passes=False)] * 3, Try()])
    cluster.call("p", "", fits=True)
    cluster.pass_s(QUIET_S + 1)
    assert cluster.reserved == {"g0", "g3"}, "docs/development describes it so: correct that, too"
    assert not cluster.cycle([Try(fits=False)] * PODS)
    cluster.call("p", "", fits=True)
    cluster.pass_s(QUIET_S + 1)
    assert not cluster.reserved


@pytest.mark.parametrize(
    "history",
    [
        [
            ([Try()] * PODS, After()),
            ([Try(), Try(), Try(fits=False), Try(1.0)], After(1.0, fails=frozenset({0}))),
            ([Try()] * PODS, After()),
            ([Try(), Try(), Try(passes=False), Try(passes=False)], After()),
        ],
        [
            ([Try(), Try(), Try(passes=False), Try(fits=False)], After(1.0)),
            ([Try(), Try(passes=False), Try(), Try()], After(1.0)),
        ],
    ],
    ids=[
        "after a pause three are refused and one fits, then two others fit",
        "one fitted before three others fit",
    ],
)
def test_of_a_gang_that_fitted_once_nothing_stays_reserved_once_others_request(
    history: list[tuple[list[Try], After]],
) -> None:
    cluster = GangScheduler(3)
    for attempt, after in history:
        if fit := cluster.cycle(attempt):
            cluster.wait(fit, after)
        cluster.go_on(after)
    cluster.call("p", "", fits=True)
    cluster.pass_s(QUIET_S + 1)
    assert not cluster.reserved


def refused(pauses: GangPauses, *calls: str, at_s: float = 5.0) -> list[bool]:
    return [pauses.refuses(uid, "g", at_s) for uid in calls]


def a_pause() -> GangPauses:
    """After `a` and `b` of a gang were called; they lost their reservations."""
    pauses = GangPauses(QUIET_S)
    pauses.begin("g", ["a", "b"], "b", 0.0)
    return pauses


def test_the_rest_of_a_cycle_is_refused_until_the_gang_is_tried_again() -> None:
    pauses = a_pause()
    assert refused(pauses, "c", "d", "a", "b", "c") == [True, True, False, False, False]


@pytest.mark.parametrize("calls", ["ca", "cca", "ba", "bca", "a"])
def test_a_gang_is_woken_if_its_next_cycle_may_have_begun_with_a_pod_that_was_refused(calls: str) -> None:
    """That call cannot be distinguished from one of the cycle that paused. So the next cycle fails, and nothing else would have the gang tried again."""
    pauses = a_pause()
    assert refused(pauses, *calls) == [True] * (len(calls) - 1) + [False]
    assert pauses.wakes() is (len(calls) > 1)


def test_a_pod_that_was_refused_is_retried_when_another_pod_is_tried() -> None:
    pauses = a_pause()
    assert refused(pauses, "c") == [True]
    assert not pauses.refuses("p", "", 6.0)
    assert pauses.wakes()
    assert not pauses.wakes()
    assert refused(pauses, "d") == [False]


def test_no_pod_is_retried_if_none_was_refused() -> None:
    pauses = a_pause()
    assert not pauses.refuses("p", "", 6.0)
    assert not pauses.wakes()


def test_a_pod_that_was_refused_is_retried_when_kube_scheduler_has_reported_it() -> None:
    pauses = a_pause()
    assert refused(pauses, "c") == [True]
    pauses.refusal_shown("a", "g")
    assert "g" in pauses, "it reports that of a pod that was not refused: of an earlier cycle"
    pauses.refusal_shown("c", "g")
    assert pauses.wakes()
    assert refused(pauses, "c", "d") == [False, False]


def test_no_pod_is_refused_for_ever() -> None:
    pauses = a_pause()
    assert refused(pauses, "c", at_s=LONGEST_S - 1) == [True]
    pauses.expire(LONGEST_S - 0.1)
    assert not pauses.wakes()
    pauses.expire(LONGEST_S)
    assert pauses.wakes()
    assert refused(pauses, "d") == [False]


def test_a_slow_gang_is_given_twice_its_pause_until_a_pod_of_it_is_bound() -> None:
    pauses = a_pause()
    assert pauses.quiet_s("g") == QUIET_S
    refused(pauses, "c")
    assert pauses.quiet_s("g") == 10.0
    refused(pauses, "d", at_s=40.0)
    assert pauses.quiet_s("g") == 10.0, "nothing was reserved any more in the second pause"
    pauses.begin("g", ["a"], "a", 0.0)
    refused(pauses, "b", at_s=40.0)
    assert pauses.quiet_s("g") == LONGEST_QUIET_S
    pauses.bound("g")
    assert pauses.quiet_s("g") == QUIET_S
