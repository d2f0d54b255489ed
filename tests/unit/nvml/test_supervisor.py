"""NVML that hangs, dies, lies or is replaced: who asks is answered in time, and a child is there again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvml import messages as m
from nvml import replacing, supervisor
from nvml.driver import Identity
from nvml.errors import NvmlAway, NvmlError, NvmlHung, NvmlOpening
from nvml.replacing import End
from nvml.supervisor import Limits, Supervisor
from tests.built import REPOSITORY
from tests.unit.nvml.double import GPU

DOUBLE = Path(__file__).with_name("double.py")
OTHER = "GPU-00000000-0000-0000-0000-000000000002"
LIMITS = Limits(start_s=10.0, call_s=0.3, end_s=2.0)


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Polls what has no event to wait for."""
    pause = threading.Event()
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, "it did not come about in time"
        pause.wait(0.005)


class Stand:
    """A supervisor whose child does what a test says."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "script"
        self.released = folder / "released"
        self.driver = Identity((1,), "580", 1)
        self.told: list[str] = []
        self.does()

    def does(self, **what: str) -> None:
        """At which request what, from now on."""
        self.script.write_text("".join(f"{kind} {act}\n" for kind, act in what.items()))

    def start(self, limits: Limits = LIMITS) -> Supervisor:
        self.supervisor = Supervisor(
            Path("/nonexistent"), limits, released=self.released, report=lambda _, text: self.told.append(text),
            command=[sys.executable, str(DOUBLE), str(self.script)], driver=lambda *_: self.driver,
        )  # fmt: skip
        self.supervisor.start()
        return self.supervisor

    def opened(self, limits: Limits = LIMITS) -> Supervisor:
        started = self.start(limits)
        started.await_open(20)
        return started

    def back(self) -> None:
        """Return when a child answers again."""
        wait_for(lambda: not self.supervisor.failing)
        assert self.supervisor.nvml.count().count == 1

    @property
    def children(self) -> list[int]:
        """Every pid that ever was asked something, in order."""
        said = self.script.with_suffix(".said")
        return list(dict.fromkeys(int(line.split()[0]) for line in said.read_text().splitlines()))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(supervisor, "TICK_S", 0.05)
    monkeypatch.setattr(replacing, "PAUSES_S", (0.0, 0.05, 0.1))
    monkeypatch.setattr(replacing, "QUARANTINE_S", (0.5, 1.0))
    made = Stand(tmp_path)
    yield made
    made.supervisor.close()
    for pid in made.children if made.script.with_suffix(".said").exists() else []:
        assert not Path(f"/proc/{pid}").exists(), "no child is left, not as a zombie either"


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
    assert stand.supervisor.ends == {End.HUNG: 1}
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


def answers(ask: Callable[[str], object], uuid: str) -> bool:
    try:
        ask(uuid)
    except NvmlError:
        return False
    return True


def test_who_waits_behind_a_call_that_hangs_is_told_that_nobody_answers(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="hang")
    errors: list[NvmlError] = []

    def ask(uuid: str) -> None:
        try:
            nvml.processes(uuid)
        except NvmlError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(f"GPU-{number}",)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(type(error).__name__ for error in errors) == ["NvmlAway"] * 4 + ["NvmlHung"]


def test_who_has_less_time_than_a_call_is_answered_sooner_and_the_child_lives(stand: Stand) -> None:
    started = stand.opened(Limits(10.0, 10.0))
    stand.does(Processes="slow=0.5")
    with pytest.raises(NvmlAway, match=r"NVML did not answer within 0.05 s"):
        started.within(0.05).processes(GPU)
    stand.does()
    assert started.nvml.processes(GPU)[0].pid == 4242, "and no answer is taken for another"
    assert len(stand.children) == 1


@pytest.mark.parametrize("kind", ["Open", "Count", "Answers", "Processes", "Computes", "Xids"])
@pytest.mark.parametrize("act", ["die", "exit", "garbage", "endless", "other"])
def test_a_child_that_dies_or_lies_at_any_step_is_replaced(stand: Stand, kind: str, act: str) -> None:
    stand.does(**{kind: act})
    nvml = stand.start().nvml
    asks: dict[str, Callable[[], object]] = {
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
        asks[kind]()
    stand.does()
    stand.back()
    asks[kind]()
    assert set(stand.supervisor.ends) == {End.DIED if act in ("die", "exit") else End.MALFORMED}


def test_a_child_that_is_killed_while_nobody_asks_is_back_at_once(stand: Stand) -> None:
    started = stand.opened()
    pid = started.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: started.ends == {End.DIED: 1})
    stand.back()
    assert "signal 9 (Killed)" in stand.told[1]


def test_an_answer_of_another_kind_and_one_that_nobody_asked_for(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="wrong")
    with pytest.raises(NvmlAway, match="the answer to Processes is Health: must be Held"):
        nvml.processes(GPU)
    stand.does(Count="unasked")
    assert nvml.count().count == 1
    wait_for(lambda: stand.supervisor.ends == {End.MALFORMED: 1})
    stand.does()
    stand.back()


def test_a_refusal_of_nvml_costs_no_child(stand: Stand) -> None:
    nvml = stand.opened().nvml
    stand.does(Processes="refuse")
    with pytest.raises(NvmlError, match=r"NVML says no \(9\)") as caught:
        nvml.processes(GPU)
    assert type(caught.value) is NvmlError
    assert caught.value.code == 9
    assert len(stand.children) == 1


def test_who_asks_before_nvml_was_opened_is_told_so(stand: Stand) -> None:
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


def test_a_start_that_never_returns_is_ended_and_tried_again(stand: Stand) -> None:
    stand.does(Open="hang")
    started = stand.start(Limits(start_s=0.3))
    with pytest.raises(NvmlAway, match=r"the start of NVML did not return within 0.3 s"):
        started.await_open(20)
    stand.does()
    stand.back()


def test_a_driver_that_is_not_there_is_tried_again_after_longer_and_longer_pauses(stand: Stand) -> None:
    stand.does(Open="refuse")
    started = stand.start()
    with pytest.raises(NvmlAway, match=r"NVML says no"):
        started.await_open(20)
    wait_for(lambda: started.ends[End.REFUSED] >= 4)
    assert started._pauses.after(End.REFUSED, 0.0) == 0.1
    stand.does()
    stand.back()


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40
print(libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, PTRACE_O_TRACEEXIT), flush=True)
sys.stdin.read()
"""


class Kept:
    """A tracer keeps a process at its exit: SIGKILL does not end it, as in an uninterruptible sleep of a driver."""

    def __init__(self, pid: int) -> None:
        self._tracer = subprocess.Popen(
            [sys.executable, "-c", TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._tracer.stdout is not None
        if self._tracer.stdout.readline() != "0\n":
            self.let_go()
            pytest.skip("no process may be traced here")

    def let_go(self) -> None:
        self._tracer.communicate()


def hang_for_good(stand: Stand) -> Kept:
    """The child that answers now hangs, and cannot be killed."""
    pid = stand.supervisor.pid
    assert pid is not None
    kept = Kept(pid)
    stand.does(Count="hang")
    with pytest.raises(NvmlHung):
        stand.supervisor.nvml.count()
    stand.does()
    wait_for(lambda: stand.supervisor.abandoned and stand.supervisor.pid != pid)
    return kept


def test_a_child_that_cannot_be_killed_is_abandoned_and_a_third_waits_until_one_ends(stand: Stand) -> None:
    started = stand.opened(Limits(10.0, 0.3, end_s=0.3))
    first = hang_for_good(stand)
    stand.back()
    second = hang_for_good(stand)
    wait_for(lambda: "cannot be killed: no other is started until one ends" in started.failing)
    assert started.abandoned == 2
    assert len(stand.children) == 2
    with pytest.raises(NvmlAway, match=r"2 NVML processes \(\d+, \d+\) hang in the driver"):
        started.nvml.count()
    first.let_go()
    stand.back()
    assert started.abandoned == 1
    second.let_go()
    wait_for(lambda: started.abandoned == 0)
    assert len(stand.children) == 3


def test_another_driver_ends_the_wait_for_children_that_cannot_be_killed(stand: Stand) -> None:
    started = stand.opened(Limits(10.0, 0.3, end_s=0.3))
    kept = [hang_for_good(stand)]
    stand.back()
    kept.append(hang_for_good(stand))
    wait_for(lambda: "cannot be killed" in started.failing)
    stand.driver = Identity((1,), "595", 2)
    stand.back()
    assert started.abandoned == 2
    for one in kept:
        one.let_go()
    wait_for(lambda: started.abandoned == 0)


@pytest.mark.parametrize(
    "driver", [Identity((2,), "580", 1), Identity((1,), "595", 1), Identity((1,), "580", 2)], ids=["library", "version", "module"]
)  # fmt: skip
def test_a_child_that_has_another_driver_open_than_the_one_that_is_there_is_replaced(
    stand: Stand, driver: Identity
) -> None:
    started = stand.opened()
    stand.does(Processes="hang")
    with pytest.raises(NvmlHung):
        started.nvml.processes(GPU)
    stand.does()
    stand.back()
    stand.driver = driver
    wait_for(lambda: started.ends[End.DRIVER] == 1)
    stand.back()
    assert started.nvml.processes(GPU), "what hung with the driver before says nothing of this one"
    assert len(stand.children) == 3


def test_a_driver_that_changes_while_it_is_opened_is_opened_again(stand: Stand) -> None:
    stand.does(Open="slow=0.5")
    stand.start()
    wait_for(lambda: stand.script.with_suffix(".said").exists() and stand.children)
    stand.driver = Identity((2,), "595", 2)
    stand.does()
    wait_for(lambda: stand.supervisor.ends == {End.DRIVER: 1})
    stand.back()


def test_while_nvml_is_released_there_is_no_child(stand: Stand) -> None:
    started = stand.opened()
    (pid,) = stand.children
    stand.released.touch()
    wait_for(lambda: started.failing.startswith("NVML is released, as the file"))
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(NvmlAway, match="remove it when the GPUs may be used again"):
        started.await_open(0.2)
    assert len(stand.children) == 1
    stand.released.unlink()
    stand.back()


def test_a_start_ends_when_nvml_is_released(stand: Stand) -> None:
    stand.does(Open="hang")
    started = stand.start(Limits(start_s=60.0))
    wait_for(lambda: started.pid)
    stand.released.touch()
    wait_for(lambda: started.ends == {End.RELEASED: 1})
    stand.does()
    stand.released.unlink()
    stand.back()


def test_closing_answers_everybody_at_once_whatever_the_child_does(stand: Stand) -> None:
    started = stand.opened(Limits(10.0, 60.0))
    stand.does(Processes="hang")
    errors: list[NvmlError] = []

    def ask() -> None:
        try:
            started.nvml.processes(GPU)
        except NvmlError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: "Processes" in stand.script.with_suffix(".said").read_text())
    begun_s = time.monotonic()
    started.close()
    asking.join(10)
    assert time.monotonic() - begun_s < 5
    assert [str(error) for error in errors] == ["NVML is closed"]
    with pytest.raises(NvmlAway, match="NVML is closed"):
        started.nvml.count()


def test_a_program_that_cannot_be_started_is_said_and_tried_again(stand: Stand) -> None:
    stand.supervisor = Supervisor(Path("/"), command=["/nonexistent/python"], driver=lambda *_: stand.driver)
    stand.supervisor.start()
    with pytest.raises(NvmlAway, match=r"the NVML process cannot be started: .*No such file"):
        stand.supervisor.await_open(20)
    wait_for(lambda: stand.supervisor.ends[End.DIED] >= 3)


def test_more_requests_than_may_wait_are_refused(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_WAITING", 0)
    with pytest.raises(NvmlAway, match="0 requests wait for NVML: at most 0 may"):
        stand.opened().nvml.count()
    assert isinstance(m.Failed.of(NvmlAway("x")).error, NvmlAway)
