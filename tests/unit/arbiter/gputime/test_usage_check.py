"""NVML's count of GPU time by container, also with faults of NVML or of the clock."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from arbiter.gputime import usage_check as usage_check
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.process import GpuTimeProcess
from arbiter.gputime.usage_check import AHEAD_US, REMEMBERED_US, UsageCheck, add_up, read_since_us, seen_whole
from nvml.errors import NvmlAway, NvmlError, NvmlHung
from nvml.messages import AnyReply, AnyRequest, Busy, ErrorReply, UtilisationReply, UtilisationRequest
from nvml.queries import Nvml
from tests.examples import examples
from tests.unit.arbiter.conftest import wait_for
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol.wire import Activity, ActivityKind

WATCHED = {"a": (frozenset({"0", "1"}), frozenset({1, 2})), "b": (frozenset({"0"}), frozenset({3}))}
SPANS = st.lists(st.tuples(st.floats(0.02, 3.0), st.floats(0.02, 3.0)), min_size=1, max_size=10)
"""(idle, working) seconds, one after the other."""


@dataclass
class NodeScheduler:
    """What the usage check calls."""

    reported: list[dict[str, float]] = field(default_factory=list)
    whole: list[frozenset[str]] = field(default_factory=list)

    def watched(self) -> Mapping[str, tuple[frozenset[str], frozenset[int]]]:
        return WATCHED

    def usage_check(self, seen_s: dict[str, float], whole: frozenset[str], _at_s: float) -> None:
        self.reported.append(seen_s)
        self.whole.append(whole)


@dataclass
class Counts:
    """Carries questions to a function in the place of NVML."""

    busy: Callable[[str, int, int], Busy]

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: AnyRequest) -> AnyReply:
        assert isinstance(request, UtilisationRequest)
        try:
            return UtilisationReply(self.busy(request.uuid, request.since_us, request.until_us))
        except NvmlAway:
            raise
        except NvmlError as error:
            return ErrorReply.of(error)


def no_process(*_: object) -> Busy:
    raise NvmlAway("there is no NVML")


def usage_check_of(
    scheduler: object, monkeypatch: pytest.MonkeyPatch, busy: Callable[[str, int, int], Busy]
) -> UsageCheck:
    monkeypatch.setattr(usage_check.host, "key_of", lambda *_: None)
    monkeypatch.setattr(usage_check.host, "key_shown", lambda *_: None)
    return UsageCheck(scheduler, Nvml(Counts(busy)), Path("/grants"))  # type: ignore[arg-type]


def test_each_process_counts_for_the_container_whose_grant_it_has() -> None:
    gpus = {"0": (Busy({1: 20, 2: 10, 3: 30, 4: 15, 5: 40}, 7), 1.0), "1": (Busy({1: 50}, 7), 2.0)}
    assert add_up(WATCHED, gpus, {}) == {"a": 1.0, "b": 0.3}
    assert add_up(WATCHED, gpus, {4: "a", 1: "b"}) == {"a": 0.25, "b": 0.5}
    assert add_up(WATCHED, gpus, {5: "b"}) == {"a": 1.0, "b": pytest.approx(0.7)}


def test_a_container_none_of_whose_gpus_answered_is_not_judged() -> None:
    assert add_up(WATCHED, {"1": (Busy({1: 50}, 7), 1.0)}, {}) == {"a": 0.5}
    assert add_up(WATCHED, {}, {}) == {}


@given(st.dictionaries(st.integers(1, 9), st.integers(1, 100)), st.floats(0.0, 2.0))
def test_no_container_computes_for_more_than_all_of_the_time(percent: dict[int, int], covered_s: float) -> None:
    watched = {"a": (frozenset({"0"}), frozenset(range(1, 10)))}
    assert 0.0 <= add_up(watched, {"0": (Busy(percent, 1), covered_s)}, {})["a"] <= covered_s


def test_a_gpu_that_does_not_answer_keeps_the_others_checked_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = {"0"}

    def busy(uuid: str, since_us: int, _until_us: int) -> Busy:
        if uuid in broken:
            raise NvmlError(f"GPU {uuid} is lost")
        return Busy({1: 50, 3: 100}, since_us + 1_000_000)

    scheduler = NodeScheduler()
    check = usage_check_of(scheduler, monkeypatch, busy)
    with capture_logs() as log:
        for _ in range(3):
            check._check()
        assert scheduler.reported == [{"a": 0.5}] * 3
        assert [line["gpu"] for line in log] == ["0"]
        broken.clear()
        check._check()
        assert scheduler.reported[-1] == {"a": 0.5, "b": 1.0}
        broken.update("01")
        with pytest.raises(NvmlError):
            check._check()
        assert [line["gpu"] for line in log] == ["0", "0", "1"], "logged again, for it had answered meanwhile"
    assert len(scheduler.reported) == 4


def test_nvml_that_does_not_answer_is_reported_once_and_an_error_of_ours_ends_it_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def busy(*_: object) -> Busy:
        tries.append(1)
        if len(tries) == 3:
            raise ValueError("an unexpected error")
        raise NvmlAway("no library")

    monkeypatch.setattr(usage_check, "PERIOD_S", 0.0)
    check = usage_check_of(NodeScheduler(), monkeypatch, busy)
    with capture_logs() as log:
        check.start()
        wait_for(lambda: not check._reader.alive, 30)
    assert [line["log_level"] for line in log] == ["warning", "error"]
    assert log[1]["event"] == "usage reports are not compared with the GPU time that NVML counts any more"


def test_without_an_answer_no_other_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def busy(uuid: str, *_: object) -> Busy:
        requested.append(uuid)
        raise NvmlAway("no child")

    with pytest.raises(NvmlAway):
        usage_check_of(NodeScheduler(), monkeypatch, busy)._check()
    assert requested == ["0"], "each of eight would cost three seconds"


def test_a_gpu_of_which_a_call_hung_keeps_the_others_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(uuid: str, since_us: int, _until_us: int) -> Busy:
        if uuid == "0":
            raise NvmlHung("it is asked again after 30 s")
        return Busy({1: 50}, since_us + 1_000_000)

    scheduler = NodeScheduler()
    usage_check_of(scheduler, monkeypatch, busy)._check()
    assert scheduler.reported == [{"a": 0.5}]


def test_nvml_that_answers_late_does_not_keep_the_arbiter_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, go_on = threading.Event(), threading.Event()

    def busy(*_: object) -> Busy:
        hung.set()
        go_on.wait(60)
        raise NvmlAway("late")

    monkeypatch.setattr(usage_check, "PERIOD_S", 0.0)
    check = usage_check_of(NodeScheduler(), monkeypatch, busy)
    check.start()
    assert hung.wait(30)
    ended = threading.Thread(target=check.close, daemon=True)
    ended.start()
    ended.join(30)
    try:
        assert not ended.is_alive()
    finally:
        go_on.set()
    wait_for(lambda: not check._reader.alive, 30)


def test_a_process_of_a_run_that_never_connected_counts_for_the_run_it_was_started_with(tmp_path: Path) -> None:
    grants = tmp_path / "grants"
    run = {"TANGRAM_GRANT": f"{grants}/0a/grant", "PATH": os.environ["PATH"]}
    check = UsageCheck(NodeScheduler(), Nvml(Counts(no_process)), grants, named_in=grants)  # type: ignore[arg-type]
    on_a_node = UsageCheck(NodeScheduler(), Nvml(Counts(no_process)), grants)  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "60"], env=run) as child:
        wait_for(
            lambda: check._owners_of([child.pid], set()) == {child.pid: "0a"}, 30
        )  # it has an environment a moment later
        assert on_a_node._owners_of([child.pid], set()) == {}, "containers choose their environment"
        child.kill()


def test_what_was_seen_before_the_clock_was_set_back_is_forgotten() -> None:
    at_us = 1_700_000_000_000_000
    assert read_since_us(at_us - 1_000_000, at_us) == at_us - 1_000_000
    assert read_since_us(at_us - 9_000_000, at_us) == at_us - REMEMBERED_US
    assert read_since_us(at_us + 500_000, at_us) == at_us + 500_000, "the driver's clock is a little ahead"
    assert read_since_us(at_us + AHEAD_US + 1, at_us) == at_us - REMEMBERED_US
    assert read_since_us(0, at_us) == at_us - REMEMBERED_US


def test_a_clock_that_is_set_back_does_not_stop_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, requested = [2_000.0], []

    def busy(_uuid: str, since_us: int, until_us: int) -> Busy:
        requested.append((since_us / 1e6, until_us / 1e6))
        return Busy({}, int(clock_s[0] * 1e6))

    monkeypatch.setattr(usage_check.time, "time_ns", lambda: int(clock_s[0] * 1e9))
    monkeypatch.setattr(NodeScheduler, "watched", lambda _: {"b": WATCHED["b"]})
    check = usage_check_of(NodeScheduler(), monkeypatch, busy)
    for clock_s[0] in (2000.0, 2001.0, 1000.0, 1001.0):
        check._check()
    assert requested == [(1998.0, 2001.0), (2000.0, 2002.0), (998.0, 1001.0), (1000.0, 1002.0)]


def until_next(spans: list[tuple[float, float]], at_s: float) -> tuple[bool, float]:
    """Does it work then, and when is that over?"""
    whole, since_s = sum(idle + work for idle, work in spans), 0.0
    since_s = whole * int(at_s / whole)
    while True:
        for idle, work in spans:
            for works, span_s in ((False, idle), (True, work)):
                since_s += span_s
                if since_s > at_s:
                    return works, since_s


class Honest:
    """A container that reports all its work, and the driver's count of it, `late_s` after the fact."""

    def __init__(self, spans: list[tuple[float, float]], late_s: float) -> None:
        grant = Grant("ns", "a", "uid", "main", (GrantGpu("0", 1024, 0),), "standard", 2)
        self.container = GpuTimeContainer("a", grant, None, 0.0)
        self.container.processes[1] = GpuTimeProcess(1)
        self.now_s = 0.0
        self._spans, self._late_s = spans, late_s
        self._worked: list[tuple[float, float]] = []

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            works, until_s = until_next(self._spans, self.now_s)
            self.container.take_activity(1, Activity(ActivityKind.WORK if works else ActivityKind.IDLE), self.now_s)
            until_s = min(until_s, end_s)
            if works:
                self._worked.append((self.now_s, until_s))
            self.now_s = until_s

    def busy(self, _uuid: str, since_us: int, _until_us: int) -> Busy:
        newest_us = int((self.now_s - self._late_s) * 1e6)
        if newest_us <= since_us:
            return Busy({}, since_us)
        ran_us = sum(max(0.0, min(newest_us, b * 1e6) - max(since_us, a * 1e6)) for a, b in self._worked)
        return Busy({1: round(100 * ran_us / (newest_us - since_us))}, newest_us)


@settings(max_examples=examples(40), deadline=None)
@given(SPANS, st.floats(0.0, 1.0), st.lists(st.one_of(st.just(1.0), st.floats(0.2, 30.0)), min_size=10, max_size=30))
@example([(30.0, 2.0)], 0.0, [27.0, 32.0, 32.0])  # all its work right before each look
def test_a_container_that_reports_all_its_work_is_never_accused_whatever_the_pauses_between_readings(
    spans: list[tuple[float, float]], late_s: float, pauses_s: list[float]
) -> None:
    one = Honest(spans, late_s)

    @dataclass
    class Only:
        """Time slices of this container."""

        def watched(self) -> Mapping[str, tuple[frozenset[str], frozenset[int]]]:
            return {"a": (frozenset({"0"}), frozenset({1}))}

        def usage_check(self, seen_s: dict[str, float], _whole: frozenset[str], at_s: float) -> None:
            one.container.weigh(at_s, seen_s["a"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage_check, "now_s", lambda: one.now_s)
        patch.setattr(usage_check.time, "time_ns", lambda: int(one.now_s * 1e9))
        check = usage_check_of(Only(), patch, one.busy)
        one.run(5.0)
        for pause_s in pauses_s:
            one.run(pause_s)
            check._check()
            assert not one.container.reports.unreported_work.proven
    assert one.container.reports.unreported_work.seconds < 1.5, "no more than what is on its way"


def test_of_a_container_all_is_seen_only_where_all_its_gpus_count_by_process() -> None:
    watched = {
        name: (frozenset(gpus), frozenset[int]()) for name, gpus in {"a": "0", "b": "01", "c": "2", "d": ""}.items()
    }
    mig, good = Busy({}, 7, by_process=False), Busy({}, 7)
    assert seen_whole(watched, {"0": (good, 1.0), "1": (mig, 1.0)}) == {"a"}
    assert seen_whole(watched, {"0": (good, 1.0), "1": (good, 1.0)}) == {"a", "b"}
    assert seen_whole(watched, {}) == frozenset()


def test_the_cgroup_reports_a_process_that_is_not_connected_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod with several containers it may name the wrong one."""
    watch = usage_check_of(None, monkeypatch, no_process)
    monkeypatch.setattr(usage_check.host, "key_of", lambda pid, *_: f"pod of {pid}")
    monkeypatch.setattr(usage_check.host, "key_shown", lambda pid, *_: "shown" if pid == 3 else None)
    assert watch._owners_of([1, 2, 3], frozenset({1, 3})) == {2: "pod of 2", 3: "shown"}
