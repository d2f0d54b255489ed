"""A limit that a process cannot enforce is in the status and in the metrics within 5 s, until the process ends."""

from __future__ import annotations

import os
import struct

import pytest

from arbiter.enforcement import enforcements
from arbiter.metrics import ArbiterCollector
from arbiter.server import ArbiterServer
from tests.unit.arbiter.conftest import MIB, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.api.enforcement import REPORTED, STALE_S, Enforcement, Finding, LimitState, Reason
from vgpu.protocol import wire

VISIBLE_S = 5.0
"""Specified."""


def found_in(server: ArbiterServer, key: str = "k") -> Enforcement:
    with server.lock:
        return enforcements(server)[key]


def reasons(server: ArbiterServer) -> dict[str, float]:
    (family,) = (one for one in ArbiterCollector(server).collect() if one.name == "tangram_container_unenforced")
    return {sample.labels["reason"]: sample.value for sample in family.samples}


@pytest.fixture
def server(node: ArbiterNode) -> ArbiterServer:
    node.allocate("k", a_grant())
    return node.start()


@pytest.mark.parametrize(("number", "reason"), REPORTED.items())
def test_a_reason_is_reported_until_the_library_reports_its_end(
    node: ArbiterNode, server: ArbiterServer, number: int, reason: Reason
) -> None:
    process = node.process()
    process.send(wire.Report(number, True))
    process.lease(MIB)
    assert found_in(server).findings == (Finding(reason, (os.getpid(),)),)
    assert reasons(server) == {reason: 1}
    process.send(wire.Report(number, False))
    process.lease(MIB)
    assert found_in(server) == Enforcement(LimitState.ENFORCED, LimitState.ENFORCED)
    assert reasons(server) == {}


def test_a_reason_that_only_a_later_arbiter_knows_is_reported_as_such(node: ArbiterNode, server: ArbiterServer) -> None:
    process = node.process()
    process.send(wire.Report(31, True))
    process.lease(MIB)
    assert [one.reason for one in found_in(server).findings] == [Reason.UNKNOWN_REASON]


def test_the_reasons_of_a_process_end_with_it_and_those_of_its_sibling_stay(
    node: ArbiterNode, server: ArbiterServer
) -> None:
    first, second = node.process(), node.process()
    first.send(wire.Report(3, True))
    second.send(wire.Report(6, True))
    first.lease(MIB), second.lease(MIB)
    assert [one.reason for one in found_in(server).findings] == [Reason.GRAPHICS, Reason.NO_UUID]
    first.close()
    wait_for(lambda: [one.reason for one in found_in(server).findings] == [Reason.NO_UUID], VISIBLE_S)


def test_a_report_before_the_hello_is_a_bad_packet(node: ArbiterNode, server: ArbiterServer) -> None:
    process = node.connect()
    process.send(wire.Report(1, True))
    assert isinstance(process.receive(), wire.Error)
    assert found_in(server).findings == ()


def test_two_processes_without_a_thread_fill_the_limit_and_no_recall_is_sent(
    node: ArbiterNode, server: ArbiterServer
) -> None:
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


def test_a_process_that_loses_its_thread_while_it_owes_an_answer_is_not_waited_for(
    node: ArbiterNode, server: ArbiterServer
) -> None:
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


def test_a_process_with_a_lease_that_answers_no_recall_is_reported_until_it_answers(
    node: ArbiterNode, server: ArbiterServer
) -> None:
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
    node: ArbiterNode, meter: HandMeter, mount: bool
) -> None:
    node.allocate("k", a_grant())
    server = node.start()
    meter.lists()
    if mount:
        node.process().lease(MIB)
    meter.is_blind()
    assert found_in(server).memory is LimitState.ENFORCED, "what was read within 3 s still counts"
    meter.ahead_s = STALE_S
    found = found_in(server)
    assert found.memory is (LimitState.UNENFORCED if mount else LimitState.ENFORCED)
    assert [one.reason for one in found.findings] == ([Reason.NVML] if mount else [])
    meter.ahead_s = 0.0
    meter.lists()
    assert found_in(server).findings == ()


def test_the_page_shows_the_feature_of_reports_and_how_long_to_wait(node: ArbiterNode, server: ArbiterServer) -> None:
    page = node.process().page
    assert page is not None
    assert struct.unpack_from("<II", page.cast("B"), 1040) == (991, 0)


def test_a_grant_that_cannot_be_read_any_more_is_refused(node: ArbiterNode, server: ArbiterServer) -> None:
    node.process().lease(MIB)
    node.write("k", "tangram-grant 1\nnonsense\n")
    wait_for(lambda: found_in(server) == Enforcement(LimitState.REFUSED, LimitState.REFUSED))
