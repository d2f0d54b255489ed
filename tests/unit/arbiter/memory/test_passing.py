"""Memory that is opened through the arbiter: by two processes that speak its protocol by hand, one of which may lie."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path

import pytest

from arbiter.memory.container import ContainerOptions
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, Process, a_grant, open_files, wait_for
from vgpu.protocol import wire
from vgpu.protocol.passing_wire import HANDLE_MAGIC, key_of

HANDLE = HANDLE_MAGIC + bytes(range(24)) + bytes(32)
PAGE = 2 * MIB
ANSWER = wire.Exported(0, 3 * PAGE, 2, 0, (2 * PAGE, PAGE))


def memory() -> int:
    """Something that looks like exported memory of the fake driver."""
    return os.memfd_create("block")


@pytest.fixture
def quick(node: ArbiterNode) -> ArbiterNode:
    """An arbiter that knows at once what its processes have."""
    node.limits = ContainerOptions(grant_wait_s=0.5, grace_s=0)
    node.start()
    return node


def pod(node: ArbiterNode, key: str = "k", pod_name: str = "a", uuids: tuple[str, ...] = (GPU,)) -> None:
    node.allocate(key, a_grant(pod=pod_name, uuids=uuids))


def maker(node: ArbiterNode, key: str = "k", handle: bytes = HANDLE) -> Process:
    one = node.process(key)
    one.lease(20 * MIB)
    owned = key_of(handle)
    assert owned is not None
    one.send(wire.Hold(0, wire.HoldState.MADE, wire.Space.IPC, 6 * MIB, owned))
    one.send(wire.Convert(0, 6 * MIB), 77)
    assert one.receive_numbered() == (77, wire.Leased(0, False, 6 * MIB, 980 * MIB))
    return one


def asked(one: Process, handle: bytes = HANDLE) -> int:
    seq, message = one.receive_numbered()
    assert message == wire.Export(handle)
    return seq


def answer(one: Process, seq: int, message: wire.Message, fds: list[int]) -> None:
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    one.sock.sendmsg([wire.encode(seq, message)], passed)
    for fd in fds:
        os.close(fd)


def received(one: Process) -> tuple[int, wire.Message, list[int]]:
    packet, control, _, _ = one.sock.recvmsg(8192, socket.CMSG_SPACE(64 * 4))
    fds = array.array("i")
    for _, _, data in control:
        fds.frombytes(data)
    seq, message = wire.decode(packet)
    return seq, message, list(fds)


def refused(one: Process) -> wire.UnopenedReason | None:
    _, message, fds = received(one)
    assert isinstance(message, wire.Exported)
    assert (message.blocks, fds) == ((), [])
    return message.reason


def test_descriptors_go_from_one_process_to_the_other_and_none_stays(quick: ArbiterNode) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    before = open_files()
    other.send(wire.Open(HANDLE), 9)
    fds = [memory(), memory()]
    numbers = [os.fstat(fd).st_ino for fd in fds]
    answer(one, asked(one), ANSWER, fds)
    seq, message, passed = received(other)
    assert (seq, message) == (9, ANSWER)
    assert [os.fstat(fd).st_ino for fd in passed] == numbers
    for fd in passed:
        os.close(fd)
    other.send(wire.Processes(0))
    other.receive()
    wait_for(lambda: open_files() == before)


def test_a_long_answer_comes_in_parts(quick: ArbiterNode) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    other.send(wire.Open(HANDLE), 9)
    seq = asked(one)
    for first in range(0, 130, 64):
        blocks = (PAGE,) * min(64, 130 - first)
        part = wire.Exported(0, 130 * PAGE, 130, first, blocks)
        answer(one, seq, part, [memory() for _ in blocks])
        got = received(other)
        assert got[:2] == (9, part)
        assert len(got[2]) == len(blocks)
        for fd in got[2]:
            os.close(fd)


def test_containers_of_one_pod_share_and_those_of_another_do_not(quick: ArbiterNode) -> None:
    for key, name in (("k", "a"), ("b", "a"), ("c", "other")):
        pod(quick, key, name)
    one, sibling, outsider = maker(quick), quick.process("b"), quick.process("c")
    outsider.send(wire.Open(HANDLE))
    assert refused(outsider) is wire.UnopenedReason.UNKNOWN
    sibling.send(wire.Open(HANDLE))
    answer(one, asked(one), ANSWER, [memory(), memory()])
    assert received(sibling)[1] == ANSWER


def test_gpus_are_numbered_as_the_process_that_opens_knows_them(quick: ArbiterNode) -> None:
    pod(quick, "k", uuids=(GPU,))
    pod(quick, "b", uuids=(OTHER_GPU, GPU))
    pod(quick, "c", uuids=(OTHER_GPU,))
    one, other, elsewhere = maker(quick), quick.process("b"), quick.process("c")
    other.send(wire.Open(HANDLE))
    answer(one, asked(one), ANSWER, [memory(), memory()])
    _, message, _ = received(other)
    assert isinstance(message, wire.Exported)
    assert message.gpu == 1
    elsewhere.send(wire.Open(HANDLE))
    assert refused(elsewhere) is wire.UnopenedReason.NO_GPU


@pytest.mark.parametrize("handle", [bytes(64), HANDLE_MAGIC + bytes(56), b"TNGRIPC\2" + HANDLE[8:]])
def test_a_handle_that_no_process_stated_is_refused(quick: ArbiterNode, handle: bytes) -> None:
    pod(quick)
    maker(quick)
    other = quick.process()
    other.send(wire.Open(handle))
    assert refused(other) is wire.UnopenedReason.UNKNOWN


def test_a_process_that_does_not_answer_costs_a_second_and_a_half(quick: ArbiterNode) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    other.send(wire.Open(HANDLE))
    seq = asked(one)
    assert refused(other) is wire.UnopenedReason.NO_ANSWER
    answer(one, seq, ANSWER, [memory(), memory()])  # too late: nothing comes of it
    other.send(wire.Open(HANDLE), 10)
    answer(one, asked(one), ANSWER, [memory(), memory()])
    assert received(other)[:2] == (10, ANSWER)


@pytest.mark.parametrize("when", ["before", "asked"])
def test_the_end_of_the_process_that_has_it_refuses_at_once(quick: ArbiterNode, when: str) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    if when == "before":
        one.close()
        wait_for(lambda: quick.server is not None and len(quick.server.containers["k"].connections) == 1)
        other.send(wire.Open(HANDLE))
    else:
        other.send(wire.Open(HANDLE))
        asked(one)
        one.close()
    assert refused(other) is wire.UnopenedReason.UNKNOWN


def test_the_end_of_the_process_that_opens_leaves_nothing(quick: ArbiterNode) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    before = open_files()
    other.send(wire.Open(HANDLE))
    seq = asked(one)
    other.close()
    wait_for(lambda: quick.server is not None and len(quick.server.containers["k"].connections) == 1)
    answer(one, seq, ANSWER, [memory(), memory()])
    assert one.lease(MIB).granted_bytes >= MIB, "it is served as before"
    wait_for(lambda: open_files() == before - 3)  # the two ends of the connection, and its page


def test_a_second_open_before_the_answer_ends_the_connection(quick: ArbiterNode) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    other.send(wire.Open(HANDLE))
    asked(one)
    other.send(wire.Open(HANDLE))
    error = other.receive()
    assert isinstance(error, wire.Error)
    assert "one at a time" in error.text


@pytest.mark.parametrize(
    ("message", "count"),
    [
        (ANSWER, 1),
        (ANSWER, 0),
        (wire.Exported(0, 3 * PAGE, 2, 0, (2 * PAGE, PAGE)), 3),
    ],
)
def test_an_answer_without_its_descriptors_is_a_refusal(quick: ArbiterNode, message: wire.Exported, count: int) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    before = open_files()
    other.send(wire.Open(HANDLE))
    answer(one, asked(one), message, [memory() for _ in range(count)])
    assert refused(other) is wire.UnopenedReason.NO_DESCRIPTOR
    assert one.lease(MIB).granted_bytes >= MIB
    wait_for(lambda: open_files() == before)


@pytest.mark.parametrize(
    "message",
    [
        wire.Exported(0, 4 * PAGE, 2, 0, (2 * PAGE, PAGE)),
        wire.Exported(0, 4 * PAGE, 3, 1, (2 * PAGE, PAGE)),
    ],
)
def test_sizes_that_do_not_fit_end_the_connection_of_the_process_that_lies(
    quick: ArbiterNode, message: wire.Exported
) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    other.send(wire.Open(HANDLE))
    answer(one, asked(one), message, [memory(), memory()])
    assert refused(other) is wire.UnopenedReason.NO_ANSWER
    assert isinstance(one.receive(), wire.Error)
    assert one.hung_up()
    assert other.lease(MIB).granted_bytes >= MIB


@pytest.mark.parametrize("what", ["file", "socket", "null"])
def test_a_foreign_descriptor_ends_the_connection_and_is_not_passed_on(
    quick: ArbiterNode, what: str, tmp_path: Path
) -> None:
    pod(quick)
    one, other = maker(quick), quick.process()
    path = tmp_path / "file"
    path.write_bytes(b"")
    made = {
        "file": lambda: os.open(path, os.O_RDONLY),
        "socket": lambda: socket.socket().detach(),
        "null": lambda: os.open("/dev/null", os.O_RDWR),
    }
    other.send(wire.Open(HANDLE))
    answer(one, asked(one), ANSWER, [memory(), made[what]()])
    assert refused(other) is wire.UnopenedReason.UNKNOWN, "its connection has ended"
    error = one.receive()
    assert isinstance(error, wire.Error)
    assert "neither of the NVIDIA driver" in error.text


def test_an_answer_that_nobody_waits_for_is_ignored(quick: ArbiterNode) -> None:
    pod(quick)
    one = maker(quick)
    before = open_files()
    answer(one, 5, ANSWER, [memory(), memory()])
    assert one.lease(MIB).granted_bytes >= MIB
    wait_for(lambda: open_files() == before)


def test_another_process_cannot_answer_for_the_one_that_has_it(quick: ArbiterNode) -> None:
    pod(quick)
    one, other, liar = maker(quick), quick.process(), quick.process()
    other.send(wire.Open(HANDLE), 3)
    seq = asked(one)
    answer(liar, seq, ANSWER, [memory(), memory()])
    assert liar.lease(MIB).granted_bytes >= MIB
    answer(one, seq, ANSWER, [memory(), memory()])
    assert received(other)[:2] == (3, ANSWER)


def test_a_process_owes_at_most_so_many_exports(quick: ArbiterNode) -> None:
    pod(quick)
    one = maker(quick)
    openers = [quick.process() for _ in range(17)]
    for opener in openers[:-1]:
        opener.send(wire.Open(HANDLE))
        opener.send(wire.Processes(0))
        assert isinstance(opener.receive(), wire.ProcessList), "it is waiting before the next request"
    openers[-1].send(wire.Open(HANDLE))
    assert refused(openers[-1]) is wire.UnopenedReason.BUSY
    assert [asked(one) for _ in range(16)]


def test_an_arbiter_that_just_started_waits_for_statements(node: ArbiterNode) -> None:
    node.limits = ContainerOptions(grant_wait_s=0.5, grace_s=0.5)
    pod(node)
    node.start()
    other = node.process()
    other.send(wire.Open(HANDLE), 4)
    one = node.process()
    owned = key_of(HANDLE)
    assert owned is not None
    one.send(wire.Usage(0, 20 * MIB, 20 * MIB))
    one.send(wire.Hold(0, wire.HoldState.MADE, wire.Space.IPC, 6 * MIB, owned))
    answer(one, asked(one), ANSWER, [memory(), memory()])
    assert received(other)[:2] == (4, ANSWER)
