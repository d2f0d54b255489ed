"""Bad input: it ends its own connection with a sentence, and nothing else."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arbiter.page import FEATURES
from tests.examples import examples
from tests.unit.arbiter.conftest import MIB, ArbiterNode, a_grant, open_files
from vgpu.memory.recalls import RECALLS
from vgpu.protocol import wire

LIMIT = 1000 * MIB


@pytest.fixture
def started(node: ArbiterNode) -> ArbiterNode:
    node.start()
    node.allocate("k", a_grant())
    return node


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (wire.Lease(5, 1, 1), "packet names GPU 5: this container has 1, from 0"),
        (wire.Return(0, 1), "RETURN of 1 bytes of GPU 0: 0 to 0 are leased"),
        (wire.Hello(1, 0, "x"), "HELLO twice on one connection"),
        (wire.Recall(0, 1), "RECALL is invalid on a connection for memory"),
        (wire.Context(5, wire.Step.BEGIN, 0), "packet names GPU 5: this container has 1, from 0"),
        (wire.Context(5, wire.Step.DONE, 0), "packet names GPU 5: this container has 1, from 0"),
        (wire.Processes(5), "packet names GPU 5: this container has 1, from 0"),
        (wire.Swappable(0, 0, 0, 0), "SWAPPABLE is invalid on a connection for memory"),
        (wire.Measured(0, True, 0, 0), "MEASURED is invalid on a connection for memory"),
        (wire.ProcessList(0, ()), "PROCESSLIST is invalid on a connection for memory"),
        (wire.Usage(0, 0, 2**50 + 1), f"USAGE of {2**50 + 1} bytes leased of GPU 0: at most {2**50}"),
    ],
)
def test_a_message_out_of_place_is_answered_with_a_sentence_and_a_hang_up(
    started: ArbiterNode, message: wire.Message, sentence: str
) -> None:
    process = started.process()
    process.send(message)
    assert process.receive() == wire.Error(1, sentence)
    assert process.hung_up()


def test_a_lease_before_hello_is_refused(started: ArbiterNode) -> None:
    process = started.connect()
    process.send(wire.Lease(0, 1, 1))
    assert process.receive() == wire.Error(1, "LEASE before WELCOME: HELLO comes first")


def test_a_connection_for_bursts_is_refused_while_the_page_offers_none(started: ArbiterNode) -> None:
    assert not FEATURES & wire.UNDERSTANDS_BURST
    process = started.connect()
    process.send(wire.Hello(1, wire.FOR_BURST, "x"))
    error = process.receive()
    assert isinstance(error, wire.Error)
    assert error.text.startswith("HELLO for bursts")


def test_bad_packets_are_counted(started: ArbiterNode) -> None:
    process = started.process()
    process.send_bytes(b"garbage that is no packet")
    assert isinstance(process.receive(), wire.Error)
    assert started.server is not None
    assert started.server.containers["k"].bad_packets == 1


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=200),
            st.builds(
                lambda kind, seq, body: b"TNGR"[:4] + kind.to_bytes(4, "big") + seq.to_bytes(4, "little") + body,
                st.integers(0, 2**32 - 1),
                st.integers(0, 2**32 - 1),
                st.binary(max_size=64),
            ),
            st.builds(
                wire.encode,
                st.integers(0, 2**32 - 1),
                st.one_of(
                    st.builds(wire.Lease, st.integers(0, 63), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
                    st.builds(wire.Return, st.integers(0, 63), st.integers(0, 2**64 - 1)),
                    st.builds(wire.Usage, st.integers(0, 63), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
                    st.builds(wire.Context, st.integers(0, 1), st.sampled_from(wire.Step), st.integers(0, 2**64 - 1)),
                    st.builds(wire.Processes, st.integers(0, 1)),
                    st.builds(wire.Hello, st.integers(0, 9), st.integers(0, 9), st.just("x")),
                ),
            ),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_garbage_of_one_process_never_reaches_another_container(
    started: ArbiterNode, packets: list[bytes], greet: bool
) -> None:
    if started.folder.joinpath("good").exists() is False:
        started.allocate("good", a_grant(pod="good"))
    good = started.process("good")
    good.lease(100 * MIB)
    noisy = started.process() if greet else started.connect()
    try:
        for packet in packets:
            noisy.send_bytes(packet)
    except (BrokenPipeError, ConnectionResetError):
        pass  # hung up on: as it should be
    noisy.close()
    assert good.lease(100 * MIB).granted_bytes == 100 * MIB
    good.close()
    last = started.process("k")
    assert last.lease(LIMIT).granted_bytes == LIMIT, "what garbage leased is back after its hang-up"
    last.close()


def test_descriptors_that_come_with_a_packet_are_closed(started: ArbiterNode) -> None:
    process = started.process()
    before = open_files()
    memory = os.memfd_create("block")
    for _ in range(100):
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory] * 50))]
        process.sock.sendmsg([wire.encode(RECALLS | 1, wire.Return(0, 0))], passed)  # not answered
    os.close(memory)
    assert process.lease(1).granted_bytes >= 1
    assert open_files() == before


def test_a_packet_that_is_larger_than_any_request_is_refused(started: ArbiterNode) -> None:
    process = started.process()
    process.send(wire.ProcessList(0, tuple(wire.ListedProcess(n, n) for n in range(1024))))
    answer = process.receive()
    assert isinstance(answer, wire.Error)
    assert "announces a body" in answer.text


def test_a_process_that_reads_nothing_is_hung_up_on_and_the_others_go_on(started: ArbiterNode) -> None:
    deaf, good = started.process(), started.process()
    deaf.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        while True:
            deaf.send(wire.Lease(0, 0, 0))
    assert good.lease(10 * MIB).granted_bytes == 10 * MIB


def test_one_process_too_many_is_reported(node: ArbiterNode) -> None:
    from arbiter.memory.container import ContainerOptions

    node.limits = ContainerOptions(connections=2)
    node.start()
    node.allocate("k", a_grant())
    first, second = node.process(), node.process()
    third = node.connect()
    assert third.receive() == wire.Error(3, "more than 2 processes of one container")
    assert third.hung_up()
    assert first.lease(1).granted_bytes == 1
    assert second.lease(1).granted_bytes == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tangram-grant 2\n", "grant is of version '2': this Tangram reads version 1"),
        ("tangram-grant 1\npod x\n", "grant line 2: found 'pod x'"),
        ("", "grant line 1: found ''"),
        ("x" * 70_000, "grant has 70000 bytes: at most 65536 are read"),
    ],
)
def test_a_corrupt_grant_rejects_processes_with_the_reason(node: ArbiterNode, text: str, sentence: str) -> None:
    node.start()
    node.allocate("k", text)
    process = node.connect()
    process.send(wire.Hello(1, 0, "x"))
    answer = process.receive()
    assert isinstance(answer, wire.Error)
    assert (answer.code, "cannot be read" in answer.text) == (2, True)
    assert sentence[:40] in answer.text or len(answer.text) >= wire.ERROR_TEXT_BYTES - 1


def test_a_grant_that_becomes_corrupt_takes_nothing_from_connected_processes(started: ArbiterNode) -> None:
    process = started.process()
    process.lease(100 * MIB)
    started.write("k", "not a grant\n")
    late = started.connect()
    late.send(wire.Hello(1, 0, "x"))
    assert isinstance(late.receive(), wire.Error)
    assert process.lease(100 * MIB).granted_bytes == 100 * MIB
    started.write("k", a_grant())
    assert process.lease(100 * MIB).granted_bytes == 100 * MIB


def test_files_in_the_grants_folder_are_left_alone(node: ArbiterNode) -> None:
    (node.folder / "a-file").write_text("x")
    (node.folder / "a-link").symlink_to("/")
    server = node.start()
    node.allocate("k", a_grant())
    node.process()
    assert list(server.containers) == ["k"]


def test_a_socket_of_the_wrong_kind_gets_nothing(started: ArbiterNode) -> None:
    started.process()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, pytest.raises(OSError, match="rotocol"):
        stream.connect(str(started.folder / "k" / "arbiter.sock"))


def test_hundreds_that_stopped_reading_end_one_after_the_other(started: ArbiterNode) -> None:
    """What the first gives back goes to one that cannot be sent a packet, so to the next, and so on."""
    first = started.process()
    assert first.lease(1000 * MIB).granted_bytes == 1000 * MIB
    deaf = [started.process() for _ in range(400)]
    for one in deaf:
        one.sock.shutdown(socket.SHUT_RD)
        one.send(wire.Lease(0, 1000 * MIB, 0))
    first.send(wire.Return(0, 1000 * MIB))
    good = started.process()
    assert good.lease(1000 * MIB).granted_bytes == 1000 * MIB


def test_a_grant_that_is_no_plain_file_blocks_no_process(node: ArbiterNode) -> None:
    node.allocate("pipe")
    os.mkfifo(node.folder / "pipe" / "grant")
    node.allocate("link")
    (node.folder / "link" / "grant").symlink_to("/dev/zero")
    node.allocate("k", a_grant())
    node.start()
    for key in ("pipe", "link"):
        refused = node.connect(key)
        refused.send(wire.Hello(1, 0, "test"))
        answer = refused.receive()
        assert isinstance(answer, wire.Error)
        assert "grant" in answer.text
    assert node.process("k").lease(MIB).granted_bytes == MIB


def test_a_process_that_an_ending_arbiter_hangs_up_on_can_no_longer_connect(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be hung up on once more, and a program without descriptors has few sockets to spend."""
    node.allocate(grant=a_grant())
    container, codes = node.start().containers["k"], []
    process, hang_up = node.process(), container.connections.close

    def hangs_up() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            codes.append(sock.connect_ex(str(node.folder / "k/arbiter.sock")))
        hang_up()

    monkeypatch.setattr(container.connections, "close", hangs_up)
    node.stop()
    assert process.hung_up()
    assert codes == [errno.ECONNREFUSED]
