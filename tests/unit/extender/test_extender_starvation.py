"""A pod is preempted so many times, and then left alone for a while."""

from __future__ import annotations

import msgspec
import pytest

from extender.starvation import Starvation
from kube.objects import OwnerReference, Pod
from tests.builders import pod


def owned(name: str, kind: str) -> Pod:
    built = pod(name).build()
    owner = OwnerReference(kind, "set", "uid-of-set", controller=True)
    return msgspec.structs.replace(built, metadata=msgspec.structs.replace(built.metadata, owner_references=(owner,)))


def test_after_so_many_times_it_is_spared_until_the_first_is_long_ago() -> None:
    now_s = [0.0]
    starvation = Starvation(lambda: now_s[0], times=2, period_s=100)
    one = pod("a").build()
    for at_s, spared in ((0, False), (10, True)):
        now_s[0] = at_s
        starvation.preempted(one)
        assert starvation.spared(one, lambda _: 1) is spared
    now_s[0] = 99
    assert starvation.spared(one, lambda _: 1)
    now_s[0] = 100
    assert not starvation.spared(one, lambda _: 1)
    assert not starvation.spared(pod("b").build(), lambda _: 1)


@pytest.mark.parametrize(("kind", "follows"), [("StatefulSet", False), ("ReplicaSet", True), ("Job", True)])
def test_pods_whose_names_change_are_counted_by_their_controller(kind: str, follows: bool) -> None:
    starvation = Starvation(lambda: 0.0, times=2)
    for _ in range(2):
        starvation.preempted(owned("set-0", kind))
    assert starvation.spared(owned("set-0", kind), lambda _: 1)
    assert starvation.spared(owned("set-1", kind), lambda _: 1) is follows


def test_a_controller_may_lose_as_many_times_more_as_it_has_pods() -> None:
    starvation = Starvation(lambda: 0.0, times=2)
    for times in range(1, 7):
        starvation.preempted(owned(f"set-{times}", "ReplicaSet"))
        assert starvation.spared(owned("set-x", "ReplicaSet"), lambda _: 3) is (times == 6)
