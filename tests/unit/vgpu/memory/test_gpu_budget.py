"""One GPU's memory for the requests of all its containers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.gpu_budget import Admitted, Answer, GpuBudget, Refused, Waits


def budget(capacity: int = 100, **guarantees: int) -> GpuBudget:
    made = GpuBudget(capacity)
    for name, bytes_ in guarantees.items():
        made.guarantee(name, bytes_)
    return made


def test_a_request_is_granted_at_once_while_there_is_memory_within_the_guarantee_and_above_it() -> None:
    gpu = budget(a=30, b=30)
    gpu.request(1, "a", 30, 5, 0)
    gpu.request(2, "a", 50, 5, 0)
    assert gpu.decide(0) == [Admitted(1), Admitted(2)]
    assert gpu.free_bytes == 20


def test_a_request_within_the_guarantee_waits_as_long_as_it_takes_and_is_reported_each_second() -> None:
    gpu = budget(a=30, b=30)
    gpu.use("a", 90)
    gpu.request(1, "b", 30, 5, 0)
    assert gpu.decide(0) == [Waits(1, 20)]
    assert gpu.deadline_s() == 1
    assert gpu.decide(0.9) == []
    assert gpu.decide(1) == [Waits(1, 20)]
    assert gpu.decide(1000) == [Waits(1, 20)]
    gpu.use("a", 70)
    assert gpu.decide(1000.1) == [Admitted(1)]
    assert gpu.deadline_s() == inf


def test_a_request_above_the_guarantee_times_out() -> None:
    gpu = budget(a=30, b=30)
    gpu.use("a", 90)
    gpu.request(1, "b", 31, 5, 0)
    assert gpu.decide(0) == [Waits(1, 21)]
    assert gpu.decide(4.5) == [Waits(1, 21)]
    assert gpu.deadline_s() == 5
    assert gpu.decide(5) == [Refused(1)]


def test_what_can_never_fit_is_refused_at_once() -> None:
    gpu = budget(a=30)
    gpu.use("a", 50)
    gpu.request(1, "a", 51, 5, 0)
    assert gpu.decide(0) == [Refused(1)]


def test_memory_for_which_a_guarantee_waits_is_not_given_to_an_excess() -> None:
    gpu = budget(a=30, b=30, c=10)
    gpu.use("a", 80)
    gpu.request("excess", "c", 20, 60, 0)
    gpu.request("guarantee", "b", 30, 60, 0)
    assert gpu.decide(0) == [Waits("guarantee", 10), Waits("excess", 30)]
    gpu.use("a", 70)
    assert gpu.decide(0.1) == [Admitted("guarantee")]
    gpu.use("a", 50)
    assert gpu.decide(0.2) == [Admitted("excess")]


def test_a_small_request_does_not_overtake_a_large_one_but_follows_when_that_is_over() -> None:
    gpu = budget(a=0, b=0)
    gpu.use("a", 50)
    gpu.request("large", "b", 60, 5, 0)
    gpu.request("small", "b", 10, 60, 1)
    assert gpu.decide(1) == [Waits("large", 10), Waits("small", 20)]
    assert gpu.decide(5) == [Refused("large"), Admitted("small")]


def test_the_end_of_a_container_or_of_a_request_frees_its_place() -> None:
    gpu = budget(a=30, b=30)
    gpu.use("a", 90)
    gpu.request(1, "b", 60, 60, 0)
    gpu.request(2, "b", 10, 60, 0)
    gpu.withdraw(1)
    assert gpu.decide(0) == [Admitted(2)]
    gpu.request(3, "b", 20, 60, 0)
    gpu.leave("b")
    assert gpu.decide(0) == []
    gpu.leave("unknown")
    gpu.withdraw("unknown")


def test_unknown_containers_and_numbers_in_use_are_errors() -> None:
    gpu = budget(a=30)
    gpu.use("a", 100)
    gpu.request(1, "a", 0, 60, 0)
    with pytest.raises(ValueError, match="request 1 of a: an earlier one"):
        gpu.request(1, "a", 1, 60, 0)
    for call in (lambda: gpu.request(2, "b", 1, 1, 0), lambda: gpu.use("b", 1)):
        with pytest.raises(KeyError):
            call()


GUARANTEES = {"a": 20, "b": 30, "c": 50}
happenings = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.sampled_from(["request", "free", "withdraw", "leave"]),
        st.sampled_from(sorted(GUARANTEES)),
        st.integers(1, 110),
        st.floats(0, 5),
    ),
    max_size=40,
)


@dataclass
class Model:
    """The obvious slow version: all requests in a list, read from its start again after each answer."""

    used: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARANTEES, 0))
    waiting: list[tuple[int, str, int, float]] = field(default_factory=list)

    def within(self, one: tuple[int, str, int, float]) -> bool:
        return self.used[one[1]] + one[2] <= GUARANTEES[one[1]]

    def decide(self, now_s: float) -> dict[int, bool]:
        answers: dict[int, bool] = {}
        while True:
            order = [one for one in self.waiting if self.within(one)] + [
                one for one in self.waiting if not self.within(one)
            ]
            if order and order[0][2] <= 100 - sum(self.used.values()):
                self.used[order[0][1]] += order[0][2]
                answers[order[0][0]] = True
                self.waiting.remove(order[0])
                continue
            over = [
                one for one in order if not self.within(one) and (one[3] <= now_s or self.used[one[1]] + one[2] > 100)
            ]
            if not over:
                return answers
            for one in over:
                answers[one[0]] = False
                self.waiting.remove(one)


def outcomes(answers: list[Answer]) -> dict[int, bool]:
    return {
        int(str(answer.request)): isinstance(answer, Admitted) for answer in answers if not isinstance(answer, Waits)
    }


@given(happenings)
def test_any_requests_are_answered_as_the_slow_version_answers_them(
    list_: list[tuple[float, str, str, int, float]],
) -> None:
    gpu, model, now_s = budget(**GUARANTEES), Model(), 0.0
    for number, (pause_s, what, name, amount, wait_s) in enumerate(list_):
        now_s += pause_s
        if what == "request":
            gpu.request(number, name, amount, wait_s, now_s)
            model.waiting.append((number, name, amount, now_s + wait_s))
        elif what == "free":
            model.used[name] = max(0, model.used[name] - amount)
            gpu.use(name, model.used[name])
        elif what == "withdraw":
            gpu.withdraw(amount)
            model.waiting = [one for one in model.waiting if one[0] != amount]
        else:
            gpu.leave(name)
            gpu.guarantee(name, GUARANTEES[name])
            model.used[name] = 0
            model.waiting = [one for one in model.waiting if one[1] != name]
        answers = gpu.decide(now_s)
        assert outcomes(answers) == model.decide(now_s)
        assert gpu.free_bytes == 100 - sum(model.used.values()) >= 0, "never more than there is"
        assert gpu.deadline_s() > now_s
        reported = {answer.request for answer in answers if isinstance(answer, Waits)}
        assert number not in {one[0] for one in model.waiting} or number in reported, "at once"


@given(st.lists(st.tuples(st.sampled_from(sorted(GUARANTEES)), st.integers(0, 50)), max_size=30))
def test_while_nobody_has_more_than_its_guarantee_no_request_within_one_ever_waits(
    list_: list[tuple[str, int]],
) -> None:
    gpu, used = budget(**GUARANTEES), dict.fromkeys(GUARANTEES, 0)
    for number, (name, amount) in enumerate(list_):
        need = min(amount, GUARANTEES[name] - used[name])
        used[name] += need
        gpu.request(number, name, need, 0, 0.0)
        assert gpu.decide(0.0) == [Admitted(number)]
