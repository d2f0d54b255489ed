"""What a process cannot enforce is in the status and in the metrics within 5 s, and goes when the process goes."""

from __future__ import annotations

import os
import struct

import pytest

from arbiter.enforcement import enforcements
from arbiter.metrics import ArbiterCollector
from arbiter.server import Server
from tests.unit.arbiter.conftest import MIB, HandMeter, Node, a_grant, wait_for
from vgpu.api.enforcement import REPORTED, STALE_S, Enforcement, Finding, Reason, State
from vgpu.protocol import wire

VISIBLE_S = 5.0
"""Specified."""


def found_in(server: Server, key: str = "k") -> Enforcement:
    with server.lock:
        return enforcements(server)[key]


def reasons(server: Server) -> dict[str, float]:
    (family,) = (one for one in ArbiterCollector(server).collect() if one.name == "tangram_container_unenforced")
    return {sample.labels["reason"]: sample.value for sample in family.samples}


@pytest.fixture
def server(node: Node) -> Server:
    node.allocate("k", a_grant())
    return node.start()


@pytest.mark.parametrize(("number", "reason"), REPORTED.items())
def test_what_a_library_reports_is_reported_until_it_says_that_it_ended(
    node: Node, server: Server, number: int, reason: Reason
) -> None:
    process = node.process()
    process.send(wire.Report(number, True))
    process.lease(MIB)
    assert found_in(server).findings == (Finding(reason, (os.getpid(),)),)
    assert reasons(server) == {reason: 1}
    process.send(wire.Report(number, False))
    process.lease(MIB)
    assert found_in(server) == Enforcement(State.ENFORCED, State.ENFORCED)
    assert reasons(server) == {}


def test_a_reason_that_only_a_later_arbiter_knows_is_reported_as_such(node: Node, server: Server) -> None:
    process = node.process()
    process.send(wire.Report(31, True))
    process.lease(MIB)
    assert [one.reason for one in found_in(server).findings] == [Reason.UNKNOWN_REASON]


def test_the_reasons_of_a_process_end_with_it_and_those_of_its_sibling_stay(node: Node, server: Server) -> None:
    first, second = node.process(), node.process()
    first.send(wire.Report(3, True))
    second.send(wire.Report(6, True))
    first.lease(MIB), second.lease(MIB)
    assert [one.reason for one in found_in(server).findings] == [Reason.GRAPHICS, Reason.NO_UUID]
    first.close()
    wait_for(lambda: [one.reason for one in found_in(server).findings] == [Reason.NO_UUID], VISIBLE_S)


def test_a_report_before_the_hello_is_a_bad_packet(node: Node, server: Server) -> None:
    process = node.connect()
    process.send(wire.Report(1, True))
    assert isinstance(process.receive(), wire.Error)
    assert found_in(server).findings == ()


def test_two_processes_without_a_thread_fill_the_limit_and_no_recall_is_sent(node: Node, server: Server) -> None:
    first, second = node.process(), node.process()
    first.send(wire.Report(1, True))
    second.send(wire.Report(1, True))
    for taker in [first, second] * 500:
        assert not taker.lease(MIB, MIB).refused
    for process in (first, second):
        process.send(wire.Lease(0, MIB, MIB))
        answer = process.receive()
        assert isinstance(answer, wire.Leased), "a process without a thread was sent a recall"
        assert answer.refused
    first.send(wire.Return(0, MIB), seq=9)
    assert first.receive_numbered() == (9, wire.Leased(0, False, 0, MIB))
    assert not second.lease(MIB, MIB).refused


def test_a_process_that_loses_its_thread_while_it_owes_an_answer_is_not_waited_for(node: Node, server: Server) -> None:
    holder, asker = node.process(), node.process()
    assert not holder.lease(1000 * MIB).refused
    asker.send(wire.Lease(0, MIB, MIB))
    _, recall = holder.receive_numbered()
    assert isinstance(recall, wire.Recall)
    holder.send(wire.Report(1, True))
    answer = asker.receive()
    assert isinstance(answer, wire.Leased)
    assert answer.refused
    assert Reason.SILENT_PROCESS not in {one.reason for one in found_in(server).findings}


def test_a_process_with_a_lease_that_answers_no_recall_is_reported_until_it_answers(node: Node, server: Server) -> None:
    holder, asker = node.process(), node.process()
    holder.lease(1000 * MIB)
    asker.send(wire.Lease(0, MIB, MIB))
    seq, recall = holder.receive_numbered()
    assert isinstance(recall, wire.Recall)
    wait_for(lambda: [one.reason for one in found_in(server).findings] == [Reason.SILENT_PROCESS], VISIBLE_S)
    holder.send(wire.Return(0, 0), seq)
    wait_for(lambda: found_in(server).findings == (), VISIBLE_S)


@pytest.mark.parametrize("mount", [False, True])
def test_without_nvml_the_memory_of_contexts_is_reported_to_be_unenforced(
    node: Node, meter: HandMeter, mount: bool
) -> None:
    node.allocate("k", a_grant())
    server = node.start()
    meter.says()
    if mount:
        node.process().lease(MIB)
    meter.is_blind()
    assert found_in(server).memory is State.ENFORCED, "what was read within 3 s still counts"
    meter.ahead_s = STALE_S
    found = found_in(server)
    assert found.memory is (State.UNENFORCED if mount else State.ENFORCED)
    assert [one.reason for one in found.findings] == ([Reason.NVML] if mount else [])
    meter.ahead_s = 0.0
    meter.says()
    assert found_in(server).findings == ()


def test_an_arbiter_says_in_the_page_that_it_understands_reports_and_how_long_to_wait(
    node: Node, server: Server
) -> None:
    page = node.process().page
    assert page is not None
    assert struct.unpack_from("<II", page.cast("B"), 1040) == (31, 0)


def test_a_grant_that_cannot_be_read_any_more_is_refused(node: Node, server: Server) -> None:
    node.process().lease(MIB)
    node.write("k", "tangram-grant 1\nnonsense\n")
    wait_for(lambda: found_in(server) == Enforcement(State.REFUSED, State.REFUSED))
