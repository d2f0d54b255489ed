"""Contexts, and containers over their limit, with a meter whose readings the test writes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any

from arbiter import host
from arbiter.memory.contexts import MEASURED_WITHIN_S, MeasureRequest, NodeMemory
from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.memory.over_limit import REMEMBERED_S
from arbiter.server import ArbiterServer
from arbiter.status import status_of
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, HandMeter, Process, a_grant, wait_for
from vgpu.protocol import wire
from vgpu.protocol.wire import Step


class SetClock:
    """Seconds, set by the test."""

    now_s = 0.0
    armed = False

    def __call__(self) -> float:
        return self.now_s


def begin(process: Process) -> wire.Message:
    process.send(wire.Context(0, Step.BEGIN, 0), 0x40000007)
    seq, answer = process.receive_numbered()
    assert seq == 0x40000007
    return answer


def done(process: Process, step: Step = Step.DONE, reported: int = 0) -> None:
    process.send(wire.Context(0, step, reported), 0x40000008)


def test_the_first_context_is_measured_and_the_next_is_held_for(node: ArbiterNode, meter: HandMeter) -> None:
    node.start()
    node.allocate("k", a_grant())
    first = node.process()
    assert begin(first) == wire.Leased(0, False, 0, 1000 * MIB)
    done(first)
    wait_for(lambda: meter.hurries == 1)
    meter.lists(me=300)
    assert first.receive() == wire.Measured(0, True, 300 * MIB, 700 * MIB)
    assert first.page is not None
    assert first.page[0] == 700 * MIB
    second = node.process()
    assert begin(second) == wire.Leased(0, False, 300 * MIB, 400 * MIB)


def test_what_a_process_allocates_that_waits_no_longer_for_its_measure_is_no_context(
    node: ArbiterNode, meter: HandMeter
) -> None:
    """It states nothing before its next second."""
    node.start()
    node.allocate("k", a_grant())
    first = node.process()
    begin(first)
    done(first)
    wait_for(lambda: meter.hurries == 1)
    first.lease(600 * MIB)
    meter.lists(me=900)
    assert first.receive() == wire.Measured(0, True, 300 * MIB, 100 * MIB)
    assert begin(node.process()) == wire.Leased(0, False, 0, 100 * MIB), "what one takes is not known yet"


def test_a_measure_that_came_too_late_is_not_waited_for() -> None:
    request = MeasureRequest(1, 0, 8, 10.0, exact=True, made=True)
    assert request.at(10.0 + MEASURED_WITHIN_S - 0.01) == request
    late = request.at(10.0 + MEASURED_WITHIN_S)
    assert (late.exact, late.gave_up) == (False, True)
    held = replace(request, exact=False)
    assert held.at(20.0) == held, "what it takes was reserved: it waited for nothing"


def test_a_context_that_does_not_fit_is_refused(node: ArbiterNode, meter: HandMeter) -> None:
    server = node.start()
    server.node_memory.costs[GPU] = 300 * MIB
    node.allocate("k", a_grant())
    node.process().lease(701 * MIB)
    late = node.process()
    late.sock.settimeout(10)
    answer = begin(late)
    assert isinstance(answer, wire.Leased)
    assert (answer.refused, answer.granted_bytes) == (True, 0)


def test_a_process_that_initialises_the_driver_is_promised_a_context_for_a_while(
    node: ArbiterNode, meter: HandMeter
) -> None:
    server = node.start()
    server.node_memory.costs[GPU] = 300 * MIB - 1
    node.allocate("k", a_grant())
    first = node.connect().hello(wire.FOR_CONTEXT)
    assert first.page is not None
    assert (first.promised_mib, first.page[0]) == (300, 1000 * MIB), "the page does not show it: it is not used yet"
    assert node.process().promised_mib == 0, "that one has requested none"
    assert begin(first) == wire.Leased(0, False, 300 * MIB, 700 * MIB)
    assert node.connect().hello(wire.FOR_CONTEXT).promised_mib == 300
    assert first.lease(401 * MIB).granted_bytes == 401 * MIB, "it waits until the second promise has ended"


def test_a_begin_that_was_sent_before_a_promise_ended_is_read_before_it_ends(
    node: ArbiterNode, meter: HandMeter
) -> None:
    node.allocate("k", a_grant())
    clock = SetClock()
    server = ArbiterServer(node.folder, node.limits, clock, NodeMemory(meter, {GPU: 300 * MIB}))
    promised, other = node.connect(), node.connect()
    clock.now_s = 10.0  # it has opened
    select = server._poller.select

    def late(pause_s: float | None = None) -> list[Any]:
        """While the loop is between its look at the sockets and its look at the clock, BEGIN comes and the promise ends."""
        ready = select(0.2)
        if clock.armed and not ready:
            clock.armed, clock.now_s = False, 11.5
            promised.send(wire.Context(0, Step.BEGIN, 0), 0x40000007)
        return ready

    server._poller.select = late  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert promised.hello(wire.FOR_CONTEXT).promised_mib == 300
        other.hello().send(wire.Lease(0, 701 * MIB, 0))
        clock.armed = True
        assert promised.receive() == wire.Leased(0, False, 300 * MIB, 700 * MIB)
        assert other.receive() == wire.Leased(0, True, 0, 700 * MIB)
    finally:
        server.stop()
        thread.join()


def test_where_there_are_several_gpus_no_context_is_promised(node: ArbiterNode, meter: HandMeter) -> None:
    server = node.start()
    server.node_memory.costs |= {GPU: 300 * MIB, OTHER_GPU: 300 * MIB}
    node.allocate("k", a_grant(uuids=(GPU, OTHER_GPU)))
    assert node.connect().hello(wire.FOR_CONTEXT).promised_mib == 0


def test_without_nvml_nothing_is_known_and_no_process_waits(node: ArbiterNode) -> None:
    node.start()
    node.allocate("k", a_grant())
    process = node.process()
    assert begin(process) == wire.Leased(0, False, 0, 1000 * MIB)
    done(process)
    assert process.receive() == wire.Measured(0, False, 0, 1000 * MIB)


def test_an_nvml_failure_answers_the_processes_that_wait(node: ArbiterNode, meter: HandMeter) -> None:
    node.start()
    node.allocate("k", a_grant())
    process = node.process()
    begin(process)
    done(process)
    wait_for(lambda: meter.hurries == 1)
    meter.is_blind()
    assert process.receive() == wire.Measured(0, False, 0, 1000 * MIB)


def test_a_context_made_while_nvml_is_being_opened_waits_for_its_measure(node: ArbiterNode, meter: HandMeter) -> None:
    meter.trouble = "NVML is not open yet"
    node.start()
    node.allocate("k", a_grant())
    process = node.process()
    begin(process)
    done(process)
    wait_for(lambda: meter.hurries == 1)
    meter.trouble = ""
    meter.lists(me=300)
    assert process.receive() == wire.Measured(0, True, 300 * MIB, 700 * MIB)


def test_a_process_that_hangs_up_before_it_is_measured_teaches_nothing(node: ArbiterNode, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    process = node.process()
    begin(process)
    done(process)
    wait_for(lambda: meter.hurries == 1)
    process.close()
    meter.lists()
    assert node.process().lease(1000 * MIB).granted_bytes == 1000 * MIB
    assert server.node_memory.costs == {}


def test_a_process_that_does_not_read_and_is_dropped_while_it_is_answered_ends_nothing_else(
    node: ArbiterNode, meter: HandMeter
) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    deaf, other = node.process(), node.process()
    begin(deaf)
    done(deaf)
    wait_for(lambda: meter.hurries == 1)
    with server.lock:  # the reading is there first, and its answer has no receiver
        meter.lists(me=300)
        deaf.sock.close()
    assert other.lease(1).granted_bytes >= 1


def test_a_pid_that_connects_twice_is_charged_once(node: ArbiterNode, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    first, second = node.process(), node.process()
    meter.lists(me=300)
    wait_for(lambda: server.containers["k"].ledger.context_bytes(0) == 300 * MIB)
    assert first.lease(1).granted_bytes >= 1
    assert second.lease(1).granted_bytes >= 1


def test_the_list_of_processes_names_those_with_memory(node: ArbiterNode, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    process, _idle = node.process(), node.process()
    process.lease(100 * MIB)
    meter.lists("k", me=300, p999999=50)
    wait_for(lambda: server.containers["k"].ledger.context_bytes(0))
    process.send(wire.Processes(0), 5)
    assert process.receive_numbered() == (5, wire.ProcessList(0, (wire.ListedProcess(1, 300 * MIB),)))


def test_two_readings_over_the_limit_are_over_and_policy_report_kills_no_process(
    node: ArbiterNode, meter: HandMeter
) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    sleeper = subprocess.Popen(["sleep", "60"])
    wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
    container = server.containers["k"]
    meter.lists("k", **{f"p{sleeper.pid}": 1001})
    wait_for(lambda: container.contexts.unconnected_usage.get(GPU))
    assert container.over_limit.excesses == ()
    meter.lists("k", **{f"p{sleeper.pid}": 1001})
    wait_for(lambda: container.over_limit.excesses)
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_a_kill_is_in_the_status_after_the_container_is_gone(node: ArbiterNode, meter: HandMeter) -> None:
    """With the process its excess ends, and often the container, perhaps before any reader sees it."""
    server = node.start()
    node.allocate("k", replace(a_grant(), over_limit_action="kill"))
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
        started = host.started_at(sleeper.pid)
        for _ in range(2):
            meter._report(
                MemoryReading(
                    time.monotonic(), {GPU: {sleeper.pid: 1001 * MIB}}, {sleeper.pid: SeenProcess(started, "k", 0)}
                )
            )
        assert sleeper.wait(10) == -signal.SIGKILL
    meter.lists("k")
    shutil.rmtree(node.folder / "k")
    wait_for(lambda: not server.containers)
    (kill,) = status_of(server).kills
    assert (kill.id, kill.uid, kill.pod, kill.container) == (f"{sleeper.pid}-{started}", "uid-a", "default/a", "main")
    assert (kill.gpu, kill.command, kill.held_bytes, kill.limit_bytes) == (GPU, "sleep 60", 1001 * MIB, 1000 * MIB)
    assert server.node_memory.kills.lately(time.monotonic() + REMEMBERED_S) == ()
