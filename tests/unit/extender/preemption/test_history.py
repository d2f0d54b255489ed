"""A pod is preempted so many times, and then left alone for a while."""

from __future__ import annotations

import msgspec
import pytest

from extender.preemption.history import MOST_BYTES, MOST_EACH, MOST_IDENTITIES, MOST_TOGETHER, PreemptionHistory
from kube.objects import OwnerReference, Pod
from tests.builders import pod


def owned(name: str, kind: str) -> Pod:
    built = pod(name).build()
    owner = OwnerReference(kind, "set", "uid-of-set", controller=True)
    return msgspec.structs.replace(built, metadata=msgspec.structs.replace(built.metadata, owner_references=(owner,)))


def again(one: Pod, times: int) -> Pod:
    """The pod that came back under the same name."""
    return msgspec.structs.replace(one, metadata=msgspec.structs.replace(one.metadata, uid=f"{one.uid}-{times}"))


def test_after_so_many_times_a_pod_is_protected_until_the_first_is_long_ago() -> None:
    now_s = [0.0]
    history = PreemptionHistory(lambda: now_s[0], times=2, period_s=100)
    one = pod("a").build()
    for at_s, protected in ((0, False), (10, True)):
        now_s[0] = at_s
        history.preempted(again(one, at_s))
        assert history.protected(one, lambda _: 1) is protected
    now_s[0] = 99
    assert history.protected(one, lambda _: 1)
    now_s[0] = 100
    assert not history.protected(one, lambda _: 1)
    assert not history.protected(pod("b").build(), lambda _: 1)


@pytest.mark.parametrize(("kind", "follows"), [("StatefulSet", False), ("ReplicaSet", True), ("Job", True)])
def test_pods_whose_names_change_are_counted_by_their_controller(kind: str, follows: bool) -> None:
    history = PreemptionHistory(lambda: 0.0, times=2)
    for times in range(2):
        history.preempted(again(owned("set-0", kind), times))
    assert history.protected(owned("set-0", kind), lambda _: 1)
    assert history.protected(owned("set-1", kind), lambda _: 1) is follows


def test_a_controller_may_lose_as_many_times_more_as_it_has_pods() -> None:
    history = PreemptionHistory(lambda: 0.0, times=2)
    for times in range(1, 7):
        history.preempted(owned(f"set-{times}", "ReplicaSet"))
        assert history.protected(owned("set-x", "ReplicaSet"), lambda _: 3) is (times == 6)


def test_what_is_read_back_protects_the_same_pods_and_counts_nothing_twice() -> None:
    now_s = [1000.0]
    first, one = PreemptionHistory(lambda: now_s[0], times=2, period_s=100), pod("a").build()
    first.preempted(again(one, 1))
    first.preempted(again(one, 1))
    assert first.changes == 1, "reported twice, evicted once"
    second = PreemptionHistory(lambda: now_s[0], times=2, period_s=100)
    second.preempted(again(one, 1))  # it saw that one too
    now_s[0] = 1050
    first.preempted(again(one, 2))
    assert not second.protected(one, lambda _: 1)
    second.read_back(first.to_json())
    assert second.protected(one, lambda _: 1)
    assert second.changes == 1, "what was read is not written again"
    now_s[0] = 1101
    assert not second.protected(one, lambda _: 1)
    assert set(msgspec.json.decode(second.to_json())["default/a"]) == {again(one, 2).uid}


def test_a_clock_that_was_wrong_protects_no_pod_for_ever() -> None:
    history, one = PreemptionHistory(lambda: 1000.0, times=1, period_s=100), pod("a").build()
    history.read_back(b'{"default/a":{"u":99999999}}')
    assert history.protected(one, lambda _: 1)
    now = PreemptionHistory(lambda: 1101.0, times=1, period_s=100)
    now.read_back(history.to_json())
    assert not now.protected(one, lambda _: 1)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":1}', '{"a":{"u":"x"}}'])
def test_what_cannot_be_read_is_refused_whole(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        PreemptionHistory(lambda: 0.0).read_back(text)


def test_what_does_not_fit_a_config_map_is_what_was_longest_ago() -> None:
    history = PreemptionHistory(lambda: 1.7e9, times=2)
    for at in range(2 * MOST_IDENTITIES):
        for times in range(3):
            history.preempted(again(pod(f"{at:036}").build(), times))
    assert 400_000 < len(history.to_json()) < MOST_BYTES
    back = PreemptionHistory(lambda: 1.7e9, times=2)
    back.read_back(history.to_json())
    assert back.protected(pod(f"{2 * MOST_IDENTITIES - 1:036}").build(), lambda _: 1)
    assert not back.protected(pod(f"{MOST_IDENTITIES + 1:036}").build(), lambda _: 1)


def test_one_controller_that_loses_thousands_of_pods_displaces_no_other_from_the_history() -> None:
    history = PreemptionHistory(lambda: 1000.0, times=2)
    one = pod("a").build()
    for times in range(2):
        history.preempted(again(one, times))
    for number in range(9_700):
        history.preempted(owned(f"set-{number:040}", "ReplicaSet"))
    back = PreemptionHistory(lambda: 1000.0, times=2)
    back.read_back(history.to_json())
    for known in (history, back):
        assert known.protected(one, lambda _: 1)
        assert known.protected(owned("set-x", "ReplicaSet"), lambda _: 9_700), "it has lost enough"
        assert len(known) == MOST_EACH + 2


def test_of_a_controller_the_last_preemptions_are_remembered() -> None:
    now_s = [0.0]
    history = PreemptionHistory(lambda: now_s[0], times=MOST_EACH, period_s=MOST_EACH)
    for number in range(2 * MOST_EACH):
        now_s[0] = number
        history.preempted(owned(f"set-{number}", "ReplicaSet"))
    assert history.protected(owned("set-x", "ReplicaSet"), lambda _: 1)
    now_s[0] += 1
    assert not history.protected(owned("set-x", "ReplicaSet"), lambda _: 1)
    assert len(history) == MOST_EACH - 1


def test_an_entry_that_is_too_long_is_left_out_and_no_other() -> None:
    history = PreemptionHistory(lambda: 1000.0, times=1)
    history.preempted(pod("a").build())
    long = pod("b").build()
    huge = msgspec.structs.replace(long, metadata=msgspec.structs.replace(long.metadata, uid="u" * MOST_BYTES))
    history.preempted(huge)
    assert set(msgspec.json.decode(history.to_json())) == {"default/a"}


def test_what_is_remembered_is_bounded() -> None:
    history = PreemptionHistory(lambda: 1000.0)
    for number in range(2 * MOST_TOGETHER // 512):
        history.read_back(msgspec.json.encode({f"of-{number}": {f"{number}-{at}": 1000 for at in range(512)}}))
    assert len(history) == MOST_TOGETHER


@pytest.mark.parametrize("digits", [20, 400, 4000])
def test_a_time_of_many_digits_counts_as_now(digits: int) -> None:
    history = PreemptionHistory(lambda: 1000.0, times=1)
    history.read_back(f'{{"default/a": {{"uid": {"9" * digits}}}}}')
    assert msgspec.json.decode(history.to_json()) == {"default/a": {"uid": 1000}}
