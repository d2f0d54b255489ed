"""The arbiter examines unconnected processes, reports those that bypass the library, and kills them if the rules allow it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf

import pytest

from arbiter import host
from arbiter.memory.bypass import BypassRules
from arbiter.memory.contexts import NodeMemory
from arbiter.memory.known_processes import KnownProcesses
from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.memory.tracer import Suspect, Tracer
from arbiter.server import ArbiterServer
from arbiter.status import status_of
from nvml.errors import NvmlAway
from nvml.messages import AnyReply, AnyRequest, MapsReply, MapsRequest
from nvml.queries import Nvml
from tests.unit.arbiter.conftest import GPU, MIB, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.api.cgroup import NOWHERE, CgroupOwner
from vgpu.api.enforcement import Reason
from vgpu.memory.bypass import Traces


class Looks:
    """Who reads maps."""

    def __init__(self) -> None:
        self.mapped: bool | None = False
        self.away = False
        self.requested: list[tuple[tuple[int, int], ...]] = []

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        (request,) = requests
        assert isinstance(request, MapsRequest)
        self.requested.append(request.processes)
        if self.away:
            raise NvmlAway("the plugin is away")
        return [MapsReply((self.mapped,) * len(request.processes))]


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def tracer(looks: Looks) -> Iterator[Tracer]:
    made = Tracer(Nvml(looks), KnownProcesses(None, "b", lambda: 0), lambda _: True)
    made.start()
    yield made
    made.close()


def seen(tracer: Tracer, pid: int, started: int) -> Traces | None:
    """But for when."""
    found = tracer.traces(pid, started)
    return replace(found, replaced_s=inf, examined_s=-inf) if found is not None else None


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_is_examined_once_a_second_at_most_and_forgotten_when_it_is_no_suspect(
    tracer: Tracer, looks: Looks
) -> None:
    one = Suspect(7, 5)
    for _ in range(50):
        tracer.suspect([one])
    wait_for(lambda: seen(tracer, 7, 5) == Traces(False, False, True))
    assert looks.requested == [((7, 5),)]
    tracer.suspect([])
    wait_for(lambda: seen(tracer, 7, 5) is None)


def test_a_process_that_was_connected_is_not_taken_for_unknown(tracer: Tracer) -> None:
    me = Suspect(os.getpid(), host.started_at(os.getpid()))
    tracer.connected(me.pid)
    tracer.suspect([me])
    wait_for(lambda: seen(tracer, me.pid, me.started) is not None)
    assert seen(tracer, me.pid, me.started) == Traces(True, False, True)


def test_without_an_answer_maps_are_unknown(tracer: Tracer, looks: Looks) -> None:
    looks.away = True
    tracer.suspect([Suspect(7, 5)])
    wait_for(lambda: seen(tracer, 7, 5) == Traces(False, None, True))


def test_more_processes_than_one_request_names_are_examined_one_after_the_other(tracer: Tracer, looks: Looks) -> None:
    tracer.suspect([Suspect(pid, 5) for pid in range(1, 41)])
    wait_for(lambda: all(tracer.traces(pid, 5) for pid in range(1, 41)))
    assert [len(one) for one in looks.requested] == [16, 16, 8]


class Known:
    """What is known of every process."""

    def __init__(self, traces: Traces) -> None:
        self.known = traces

    def traces(self, _pid: int, _started: int) -> Traces:
        return self.known


BYPASSES = Known(Traces(False, False, True))
START = Callable[[BypassRules], ArbiterServer]


@pytest.fixture
def start(node: ArbiterNode) -> Iterator[tuple[HandMeter, START]]:
    meter = HandMeter()

    def started(rules: BypassRules) -> ArbiterServer:
        node.node_memory = NodeMemory(meter, rules=rules)
        server = node.start()
        node.allocate("k", a_grant())
        wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
        return server

    yield meter, started
    node.stop()
    meter.close()


def reads(server: ArbiterServer, meter: HandMeter, pid: int, mib: int, times: int = 4) -> None:
    for _ in range(times):
        meter.ahead_s += 1
        seen = {pid: SeenProcess(host.started_at(pid), "k", 0)}
        meter._report(MemoryReading(meter._clock(), {GPU: {pid: mib * MIB}}, seen))
        wait_for(lambda: not meter._readings)
        with server.lock:
            pass


RULES = BypassRules("kill", beyond_bytes=100 * MIB, trace_source=BYPASSES)
EXEMPT = {
    "report": replace(RULES, action="report"),
    "evict": replace(RULES, action="evict"),
    "the first minute": replace(RULES, began_s=time.monotonic() + 3600),
    "processes are not seen": replace(RULES, visible=False),
}


def test_it_is_killed_after_three_readings_and_reported_once(
    start: tuple[HandMeter, START], victim: subprocess.Popen[bytes]
) -> None:
    meter, begin = start
    server = begin(RULES)
    reads(server, meter, victim.pid, 1101, times=2)
    assert server.killed() == ()
    reads(server, meter, victim.pid, 1101, times=1)
    assert victim.wait(5) == -9
    reads(server, meter, victim.pid, 1101, times=2)
    (kill,) = server.killed()
    assert (kill.pid, kill.bypass, kill.held_bytes, kill.limit_bytes) == (victim.pid, True, 1101 * MIB, 1000 * MIB)
    assert server.containers["k"].kills == 1


def started_again(
    server: ArbiterServer, meter: HandMeter, stack: ExitStack, times: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Each takes the memory when the one before it has ended."""
    for number in range(times):
        one = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(one.kill)
        reads(server, meter, one.pid, 1101, times=1 if number else 3)
        assert one.wait(5) == -9
        yield one


@pytest.mark.parametrize("known", [True, False], ids=["", "with an unknown ID"])
def test_a_container_that_starts_one_after_the_other_is_ended_with_the_third(
    start: tuple[HandMeter, START], victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """The victim stands for what starts them: no reading ever shows it."""
    meter, begin = start
    server = begin(RULES)
    container = server.containers["k"]
    assert container.grant is not None
    at = CgroupOwner(container.grant.uid, "c" * 64)
    monkeypatch.setattr(host, "place", lambda pid: at if pid == victim.pid else NOWHERE)
    container.container_id = at.container if known else ""
    with ExitStack() as stack:
        for number, _ in enumerate(started_again(server, meter, stack, 3)):
            if number < 2:
                assert victim.poll() is None
    assert [kill.whole for kill in server.killed()] == [False, False, known]
    assert (victim.wait(5) == -9) if known else (victim.poll() is None)


def test_what_a_container_starts_while_it_is_ended_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at, there = CgroupOwner("u", "c" * 64), [11]

    def kill(pid: int, started: int) -> bool:
        there.extend([pid + 1] * (started == pid < 13))
        return True

    monkeypatch.setattr(host, "_some_pids", lambda: list(there))
    monkeypatch.setattr(host, "started_at", lambda pid: pid)
    monkeypatch.setattr(host, "place", lambda _: at)
    monkeypatch.setattr(host, "kill", kill)
    assert host.kill_all(at) == len(there) == 3


def test_a_process_that_is_given_the_pid_of_one_of_the_container_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    at, started, killed = CgroupOwner("u", "c" * 64), {11: 5}, list[int]()

    def place(pid: int) -> CgroupOwner:
        """The first time, and the process ends right after it."""
        was, started[pid] = started[pid], 9
        return at if was == 5 else NOWHERE

    monkeypatch.setattr(host, "_some_pids", lambda: [11])
    monkeypatch.setattr(host, "started_at", started.__getitem__)
    monkeypatch.setattr(host, "place", place)
    monkeypatch.setattr(host, "kill", lambda pid, of: of == started[pid] and killed.append(of) is None)
    assert host.kill_all(at) == 0
    assert killed == []


def test_processes_of_others_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To examine all processes of the node takes a second at worst, and the arbiter serves no process meanwhile."""
    at, looked = CgroupOwner("u", "c" * 64), list[int]()
    pids = list(range(100, 200))

    def place(pid: int) -> CgroupOwner:
        looked.append(pid)
        return at if pid >= 199 else NOWHERE

    def kill(pid: int, _: int) -> bool:
        pids.append(pid + 1)
        return True

    monkeypatch.setattr(host, "_some_pids", lambda: list(pids))
    monkeypatch.setattr(host, "started_at", lambda pid: pid)
    monkeypatch.setattr(host, "place", place)
    monkeypatch.setattr(host, "kill", kill)
    assert host.kill_all(at) == host.KILL_ROUNDS
    assert len(looked) == len(set(looked))


def test_a_container_without_a_found_process_is_not_reported_as_killed(
    start: tuple[HandMeter, START], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have restarted, and the ID that is known be the earlier one's."""
    meter, begin = start
    server = begin(RULES)
    server.containers["k"].container_id = "c" * 64
    monkeypatch.setattr(host, "place", lambda _: NOWHERE)
    with ExitStack() as stack:
        assert len(list(started_again(server, meter, stack, 3))) == 3
    assert [kill.whole for kill in server.killed()] == [False, False, False]


@pytest.mark.parametrize("rules", EXEMPT.values(), ids=EXEMPT)
def test_otherwise_it_is_reported_and_lives(
    start: tuple[HandMeter, START], victim: subprocess.Popen[bytes], rules: BypassRules
) -> None:
    meter, begin = start
    server = begin(rules)
    reads(server, meter, victim.pid, 1101)
    (found,) = status_of(server).containers[0].bypasses
    assert (found.gpu, found.pids) == (GPU, (victim.pid,))
    assert found.policy == ("evict" if rules.action == "evict" else "report")
    assert victim.poll() is None
    reads(server, meter, victim.pid, 1100, times=1)
    assert status_of(server).containers[0].bypasses == ()


@pytest.mark.parametrize(
    "traces",
    [None, Traces(), Traces(True, False, False), Traces(None, False, False), Traces(False, True, True)],
    ids=["not looked at", "nothing known", "was connected", "perhaps connected", "has the library"],
)
def test_a_process_that_does_not_bypass_is_unconnected_and_lives_over_any_limit(
    start: tuple[HandMeter, START], victim: subprocess.Popen[bytes], traces: Traces | None
) -> None:
    meter, begin = start
    server = begin(replace(RULES, began_s=-inf, trace_source=Known(traces) if traces is not None else None))
    reads(server, meter, victim.pid, 9000, times=6)
    (status,) = status_of(server).containers
    assert {one.reason for one in status.unenforced} == {Reason.UNCONNECTED, Reason.OVER_LIMIT}
    assert status.bypasses == ()
    assert victim.poll() is None


def test_every_container_reports_that_processes_are_not_visible(start: tuple[HandMeter, START]) -> None:
    _, begin = start
    (status,) = status_of(begin(replace(RULES, visible=False))).containers
    assert [(one.reason, one.limits) for one in status.unenforced] == [(Reason.UNATTRIBUTED, ("memory",))]


def test_a_tracer_that_cannot_examine_a_process_continues(looks: Looks) -> None:
    broken = threading.Event()

    def fails(_: int) -> bool:
        broken.set()
        raise ValueError("an unexpected error")

    tracer = Tracer(Nvml(looks), KnownProcesses(None, "b", lambda: 0), fails)
    tracer.start()
    tracer.suspect([Suspect(7, 5)])
    assert broken.wait(5)
    broken.clear()
    wait_for(lambda: tracer.suspect([Suspect(7, 5)]) or broken.is_set())
    tracer.close()


def test_a_tracer_whose_thread_could_not_start_keeps_each_process_once(looks: Looks) -> None:
    tracer = Tracer(Nvml(looks), KnownProcesses(None, "b", lambda: 0), lambda _: True)
    for _ in range(1000):
        tracer.connected(7)
    assert len(tracer._connected) == 1
    tracer.close()
