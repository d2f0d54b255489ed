"""Programs that start and end faster than readings, and programs that replace themselves: the verdict is by container, and no innocent process is killed."""

from __future__ import annotations

import select
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack

import pytest

from arbiter import host
from arbiter.memory.bypass import BypassRules
from arbiter.memory.contexts import NodeMemory
from arbiter.memory.known_processes import KnownProcesses
from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.memory.tracer import Tracer
from arbiter.status import status_of
from nvml.messages import AnyReply, AnyRequest, MapsReply, MapsRequest
from nvml.queries import Nvml
from tests.unit.arbiter.conftest import GPU, MIB, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.api.enforcement import Reason
from vgpu.api.names import OverLimitAction

LIMIT_MIB = 1000


class Looks:
    """A reader of maps: for every process except those in `mapped` and `unknown`, it reports that the library is not mapped."""

    def __init__(self) -> None:
        self.mapped: set[int] = set()
        self.unknown: set[int] = set()

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        (request,) = requests
        assert isinstance(request, MapsRequest)
        return [MapsReply(tuple(map(self._has, request.processes)))]

    def _has(self, process: tuple[int, int]) -> bool | None:
        pid, started = process
        return None if pid in self.unknown or host.started_at(pid) != started else pid in self.mapped


class Relay:
    """An arbiter with readings and processes of the test's making."""

    def __init__(self, node: ArbiterNode, meter: HandMeter, stack: ExitStack, action: OverLimitAction) -> None:
        self.node, self.meter, self.results, self._stack = node, meter, Looks(), stack
        known = KnownProcesses(None, "b", lambda: 0)
        self.tracer = Tracer(Nvml(self.results), known, lambda _: True, meter._clock)
        self.tracer.start()
        stack.callback(self.tracer.close)
        rules = BypassRules(action, beyond_bytes=100 * MIB, trace_source=self.tracer)
        node.node_memory = NodeMemory(meter, tracer=self.tracer, rules=rules)
        self.server = node.start()
        stack.callback(node.stop)  # before the tracer, whose descriptor it polls
        node.allocate("k", a_grant(LIMIT_MIB))
        wait_for(lambda: "k" in self.server.containers and self.server.containers["k"].grant)

    def process(self) -> subprocess.Popen[bytes]:
        made = self._stack.enter_context(subprocess.Popen(["sleep", "600"]))
        self._stack.callback(made.kill)
        return made

    def reads(self, *held: subprocess.Popen[bytes], mib: int = 1500) -> None:
        """A second passes, and a reading lists these. Returns when those that are not connected were looked at."""
        self.meter.ahead_s += 1
        at_s = self.meter._clock()
        seen = {one.pid: SeenProcess(host.started_at(one.pid), "k", 0) for one in held}
        self.meter._report(MemoryReading(at_s, {GPU: dict.fromkeys(seen, mib * MIB)}, seen))
        wait_for(lambda: not self.meter._readings and self._examined(at_s, seen))

    def _examined(self, at_s: float, pids: Collection[int]) -> bool:
        with self.server.lock:
            unconnected_usage = self.server.containers["k"].contexts.suspects() & set(pids)
        results = self.tracer._results
        examined = all(pid in results and results[pid].traces.examined_s > at_s for pid in unconnected_usage)
        return examined and not select.select([self.tracer.fd], [], [], 0)[0]

    def connects(self, one: subprocess.Popen[bytes]) -> None:
        """As a process whose connection has ended since."""
        self.tracer.connected(one.pid)
        wait_for(lambda: self.tracer._known.of(one.pid, host.started_at(one.pid)))


MAKE = Callable[..., Relay]


@pytest.fixture
def make(node: ArbiterNode) -> Iterator[MAKE]:
    with ExitStack() as stack:
        meter = HandMeter()
        stack.callback(meter.close)
        yield lambda action="kill": Relay(node, meter, stack, action)


def ended(one: subprocess.Popen[bytes]) -> bool:
    """By the arbiter, within a moment."""
    try:
        return one.wait(5) == -9
    except subprocess.TimeoutExpired:
        return False


def replaced(one: subprocess.Popen[bytes]) -> None:
    """It ends by itself, before the next reading."""
    one.kill()
    one.wait()


def test_programs_of_which_no_reading_finds_one_twice_are_ended_from_the_third_reading_on(make: MAKE) -> None:
    relay = make()
    for _ in range(2):
        one = relay.process()
        relay.reads(one)
        assert one.poll() is None
        replaced(one)
    third, fourth = relay.process(), relay.process()
    relay.reads(third)
    assert ended(third)
    relay.reads()
    relay.reads(fourth)
    assert ended(fourth), "at the first reading: the container is known to bypass"
    assert [kill.pid for kill in relay.server.killed()] == [third.pid, fourth.pid]
    assert relay.server.containers["k"].kills == 2


@pytest.mark.parametrize("action", ["report", "evict"])
def test_under_another_action_the_status_names_them_and_they_live(make: MAKE, action: OverLimitAction) -> None:
    relay = make(action)
    for _ in range(4):
        one = relay.process()
        relay.reads(one)
    (status,) = status_of(relay.server).containers
    assert [(found.pids, found.policy) for found in status.bypasses] == [((one.pid,), action)]
    assert (Reason.BYPASSING, (one.pid,)) in [(found.reason, found.pids) for found in status.unenforced]
    assert one.poll() is None
    assert relay.server.killed() == ()


def test_one_that_bypasses_is_reported_after_its_first_reading(make: MAKE) -> None:
    relay = make()
    one = relay.process()
    relay.reads(one, mib=1)
    (status,) = status_of(relay.server).containers
    assert (Reason.BYPASSING, (one.pid,)) in [(found.reason, found.pids) for found in status.unenforced]


def test_what_was_found_stands_while_the_gpu_does_not_answer(make: MAKE) -> None:
    relay = make("report")
    one = relay.process()
    for _ in range(3):
        relay.reads(one)
    found = status_of(relay.server).containers[0]
    assert found.bypasses
    relay.meter._report(MemoryReading(relay.meter._clock()))
    wait_for(lambda: not relay.meter._readings)
    assert status_of(relay.server).containers[0].bypasses == found.bypasses
    assert status_of(relay.server).containers[0].unenforced == found.unenforced


def test_programs_that_are_gone_before_they_are_examined_break_no_row(make: MAKE) -> None:
    relay = make()
    for seen in (True, False, True, False, True):
        one = relay.process()
        if not seen:
            relay.results.unknown.add(one.pid)
        relay.reads(one)
    assert ended(one)


def test_an_innocent_process_that_starts_where_others_bypassed_lives(make: MAKE) -> None:
    """It has the library, has memory in a reading and has not connected yet; then it connects."""
    relay = make()
    for _ in range(3):
        one = relay.process()
        relay.reads(one)
    assert ended(one)
    innocent, unread, late = relay.process(), relay.process(), relay.process()
    relay.results.mapped.add(innocent.pid)
    relay.results.unknown.add(unread.pid)
    for _ in range(5):
        relay.reads(innocent, unread, mib=5000)
    relay.tracer.connected(late.pid)
    relay.results.mapped.add(late.pid)
    for _ in range(3):
        relay.reads(innocent, unread, late, mib=5000)
    assert [kill.pid for kill in relay.server.killed()] == [one.pid]
    assert [process.poll() for process in (innocent, unread, late)] == [None, None, None]


def test_beside_one_that_bypasses_the_innocent_live(make: MAKE) -> None:
    relay = make()
    innocent, bypasses = relay.process(), relay.process()
    relay.results.mapped.add(innocent.pid)
    for _ in range(3):
        relay.reads(innocent, bypasses, mib=5000)
    assert ended(bypasses)
    for _ in range(3):
        relay.reads(innocent, mib=5000)
    assert innocent.poll() is None


def test_a_program_that_connected_and_became_another_is_ended(make: MAKE) -> None:
    relay = make()
    one = relay.process()
    relay.results.mapped.add(one.pid)
    relay.connects(one)
    relay.reads(one)
    relay.reads(one)
    relay.results.mapped.discard(one.pid)  # execve
    relay.reads(one)
    assert status_of(relay.server).containers[0].bypasses == ()
    for _ in range(2):
        relay.reads(one)
    assert one.poll() is None, "without the library it held memory in two readings"
    relay.reads(one)
    assert ended(one)


def test_a_program_that_becomes_another_with_the_library_lives(make: MAKE) -> None:
    """It is looked at before the loader has mapped the library; a reading still shows what the former program had. Then it connects anew, each time."""
    relay = make()
    one = relay.process()
    relay.connects(one)
    for _ in range(6):
        relay.results.mapped.discard(one.pid)
        relay.reads(one, mib=5000)
        relay.results.mapped.add(one.pid)
        relay.reads(one, mib=5000)
        relay.connects(one)
    assert one.poll() is None
    assert relay.server.killed() == ()


def test_what_was_seen_of_a_process_before_it_connected_anew_counts_no_more(make: MAKE) -> None:
    """Each of its programs is looked at once before the library is mapped, and each connects. The last one never has the library."""
    relay = make()
    one = relay.process()
    for _ in range(6):
        relay.connects(one)
        relay.reads(one, mib=5000)
    assert one.poll() is None
    for _ in range(4):
        relay.reads(one, mib=5000)
    assert ended(one)
