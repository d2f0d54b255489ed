"""NVML that hangs, dies or lies: a caller has its answer in time, and a child is there again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml import messages as m
from nvml import replacing, supervisor
from nvml.errors import NvmlAway, NvmlError, NvmlHung, NvmlOpening
from nvml.replacing import EndReason
from nvml.supervisor import NvmlSupervisor, TimeLimits
from tests.unit.nvml.double import GPU
from tests.unit.nvml.stand import LIMITS, OTHER, Stand, stand, wait_for

__all__ = ["stand"]


def test_a_call_that_never_returns_costs_the_child_and_is_answered_in_time(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="hang")
    begun_s = time.monotonic()
    with pytest.raises(
        NvmlHung,
        match=rf"^{GPU}: a call of NVML for its processes did not return within 0.3 s; the next call follows after 0.5 s$",
    ):
        nvml.processes(GPU)
    assert time.monotonic() - begun_s < 5
    stand.back()
    assert len(stand.children) == 2
    assert stand.supervisor.ends == {EndReason.HUNG: 1}
    assert stand.supervisor.hangs == 1
    stand.does()
    assert nvml.processes(OTHER)
    assert stand.supervisor.hangs == 0


def test_a_gpu_of_which_a_call_hung_is_left_alone_for_a_while_and_the_others_answer(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "QUARANTINE_S", (8.0, 16.0))
    nvml = stand.opened().nvml
    stand.does(Processes="hang")
    with pytest.raises(NvmlHung):
        nvml.processes(GPU)
    stand.does()
    stand.back()
    children = list(stand.children)
    with pytest.raises(NvmlHung, match="the next call follows"):
        nvml.answers(GPU)
    assert nvml.processes(OTHER)
    assert stand.children == children, "it was not asked, so no child was lost"
    wait_for(lambda: answers(nvml.processes, GPU))


def answers(request: Callable[[str], object], uuid: str) -> bool:
    try:
        request(uuid)
    except NvmlError:
        return False
    return True


def test_a_caller_behind_a_call_that_hangs_gets_the_error_that_no_child_answers(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="hang")
    errors: list[NvmlError] = []

    def request(uuid: str) -> None:
        try:
            nvml.processes(uuid)
        except NvmlError as error:
            errors.append(error)

    threads = [threading.Thread(target=request, args=(f"GPU-{number}",)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(type(error).__name__ for error in errors) == ["NvmlAway"] * 4 + ["NvmlHung"]


def test_of_several_gpus_that_are_queried_together_only_the_one_whose_call_hangs_is_left_alone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacing, "QUARANTINE_S", (30.0, 60.0))
    nvml = stand.opened().nvml
    stand.does(**{f"Processes:{OTHER}": "hang"})
    with pytest.raises(NvmlAway, match=rf"^{OTHER}: a call of NVML for its processes did not return within 0.3 s"):
        nvml.held_of([GPU, OTHER, "GPU-3"])
    assert stand.supervisor.hangs == 1
    stand.back()
    found = nvml.held_of([GPU, OTHER, "GPU-3"])
    assert [type(one).__name__ for one in found.values()] == ["ProcessesReply", "NvmlHung", "ProcessesReply"]
    assert len(stand.children) == 2


def test_each_of_several_calls_has_its_own_time(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="slow=0.2")
    found = nvml.held_of([GPU, OTHER, "GPU-3", "GPU-4"])
    assert all(isinstance(one, m.ProcessesReply) for one in found.values()), "0.8 s, where a call may take 0.3"
    assert len(stand.children) == 1


def test_what_a_slow_child_left_over_is_called_again(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="first")
    found = nvml.held_of([GPU, OTHER, "GPU-3"])
    assert list(found) == [GPU, OTHER, "GPU-3"]
    assert all(isinstance(one, m.ProcessesReply) for one in found.values())
    assert len(stand.children) == 1


def test_a_caller_with_less_time_than_a_call_is_answered_sooner_and_the_child_lives(stand: Stand) -> None:
    started = stand.opened(TimeLimits(10.0, 10.0))
    stand.does(Processes="slow=0.5")
    (late,) = started.call_all([m.ProcessesRequest(GPU)], 0.05)
    assert isinstance(late, m.ErrorReply)
    assert isinstance(late.error, NvmlAway)
    assert str(late.error) == "NVML did not answer within 0.05 s"
    stand.does()
    assert started.nvml.processes(GPU)[0].pid == 4242, "and no answer is taken for another"
    assert len(stand.children) == 1


@pytest.mark.parametrize("kind", ["Open", "Count", "Answers", "Processes", "Computes", "Xids"])
@pytest.mark.parametrize("act", ["die", "exit", "garbage", "endless", "other"])
def test_a_child_that_dies_or_answers_wrongly_at_any_step_is_replaced(stand: Stand, kind: str, act: str) -> None:
    stand.does(**{kind: act})
    nvml = stand.start().nvml
    requests: dict[str, Callable[[], object]] = {
        "Count": nvml.count,
        "Answers": lambda: nvml.answers(GPU),
        "Processes": lambda: nvml.processes(GPU),
        "Computes": lambda: nvml.busy(GPU, 0, 10),
        "Xids": lambda: nvml.xids((GPU,)),
        "Open": nvml.count,
    }
    if kind != "Open":
        stand.supervisor.await_open(20)
    else:
        wait_for(lambda: stand.supervisor.ends.total())
    with pytest.raises(NvmlAway, match=r"the NVML process (ended|sent no answer)"):
        requests[kind]()
    stand.does()
    stand.back()
    requests[kind]()
    assert set(stand.supervisor.ends) == {EndReason.DIED if act in ("die", "exit") else EndReason.MALFORMED}


def test_a_child_that_is_killed_without_a_request_is_back_at_once(stand: Stand) -> None:
    started = stand.opened()
    pid = started.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: started.ends == {EndReason.DIED: 1})
    stand.back()
    assert "signal 9 (Killed)" in stand.reported[1]


def test_an_answer_of_another_kind_and_one_without_a_request(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="wrong")
    with pytest.raises(NvmlAway, match="the answer to ProcessesRequest is HealthReply: must be ProcessesReply"):
        nvml.processes(GPU)
    stand.does(Count="unasked")
    assert nvml.count().count == 1
    wait_for(lambda: stand.supervisor.ends == {EndReason.MALFORMED: 1})
    stand.does()
    stand.back()


def test_a_refusal_of_nvml_costs_no_child(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="refuse")
    with pytest.raises(NvmlError, match=r"NVML reports no \(9\)") as caught:
        nvml.processes(GPU)
    assert type(caught.value) is NvmlError
    assert caught.value.code == 9
    assert len(stand.children) == 1


def test_a_request_before_nvml_was_opened_gets_that_error(stand: Stand) -> None:
    stand.does(Open="slow=0.5")
    started = stand.start()
    with pytest.raises(NvmlOpening, match="NVML is being opened"):
        started.nvml.count()
    with pytest.raises(NvmlOpening, match="NVML is being opened"):
        started.await_open(0.01)
    started.await_open(20)
    started.reopen("a test wants it")
    wait_for(lambda: started.ends.total())
    stand.does()
    stand.back()


def test_a_start_that_never_returns_is_ended_and_tried_again(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.does(Open="hang")
    started = stand.start(TimeLimits(start_s=0.3))
    with pytest.raises(NvmlAway, match=r"the start of NVML did not return within 0.3 s"):
        started.await_open(20)
    monkeypatch.setattr(started, "_limits", LIMITS)  # one that returns takes as long as the machine needs
    stand.does()
    stand.back()


def test_a_driver_that_is_not_there_is_tried_again_after_longer_and_longer_pauses(stand: Stand) -> None:
    stand.does(Open="refuse")
    started = stand.start()
    with pytest.raises(NvmlAway, match=r"NVML reports no"):
        started.await_open(20)
    wait_for(lambda: started.ends[EndReason.REFUSED] >= 4)
    assert started._pauses.after(EndReason.REFUSED, 0.0) == 0.1
    stand.does()
    stand.back()


def test_closing_answers_every_caller_at_once_whatever_the_child_does(stand: Stand) -> None:
    started = stand.opened(TimeLimits(10.0, 60.0))
    stand.does(Processes="hang")
    errors: list[NvmlError] = []

    def request() -> None:
        try:
            started.nvml.processes(GPU)
        except NvmlError as error:
            errors.append(error)

    asking = threading.Thread(target=request)
    asking.start()
    wait_for(lambda: "Processes" in stand.script.with_suffix(".log").read_text())
    begun_s = time.monotonic()
    started.close()
    asking.join(10)
    assert time.monotonic() - begun_s < 5
    assert [str(error) for error in errors] == ["NVML is closed"]
    with pytest.raises(NvmlAway, match="NVML is closed"):
        started.nvml.count()


def test_a_program_that_cannot_be_started_is_reported_and_tried_again(stand: Stand) -> None:
    stand.supervisor = NvmlSupervisor(Path("/"), command=["/nonexistent/python"], driver=lambda *_: stand.driver)
    stand.supervisor.start()
    with pytest.raises(NvmlAway, match=r"the NVML process cannot be started: .*No such file"):
        stand.supervisor.await_open(20)
    wait_for(lambda: stand.supervisor.ends[EndReason.DIED] >= 3)


def test_a_mistake_of_the_supervisor_or_of_its_log_leaves_no_caller_waiting(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = stand.opened()

    def fails(*_: object) -> None:
        raise ValueError("an unforeseen value")

    monkeypatch.setattr(started, "_report", fails)
    with monkeypatch.context() as patch:
        patch.setattr(started, "_reap", fails)
        wait_for(lambda: started.failing == "the supervisor of NVML failed: ValueError: an unforeseen value")
        with pytest.raises(NvmlAway, match="an unforeseen value"):
            started.nvml.count()
    stand.back()


def test_more_requests_than_may_wait_are_refused(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_WAITING", 0)
    with pytest.raises(NvmlAway, match="0 requests wait for NVML: at most 0 may"):
        stand.opened().nvml.count()
    assert isinstance(m.ErrorReply.of(NvmlAway("x")).error, NvmlAway)
