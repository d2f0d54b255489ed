"""The status socket: one document, for the arbiter's own user, also beside slow readers."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arbiter.server import ArbiterServer
from arbiter.status import DOCUMENTS_A_SECOND, DOCUMENTS_AT_ONCE, READERS, Documents, Readers, StatusSocket
from deviceplugin.pods.status_watch import read_document
from tests.flooder import descriptors, flooded
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.protocol import wire
from vgpu.protocol.status import BRIEF, GpuStatus, ProcessGpu, StatusDocument, decode_status


@pytest.fixture
def reported(node: ArbiterNode) -> Iterator[Callable[[], StatusDocument]]:
    """Reads the status of a running arbiter."""
    socket_ = StatusSocket(path := node.folder / ".status.sock", node.start())
    yield lambda: request(path)
    socket_.close()
    assert not path.exists()


def request(path: Path, name: str = "") -> StatusDocument:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        if name:
            sock.bind(name)
        sock.connect(str(path))
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return decode_status(b"".join(parts))


def test_it_reports_limits_leases_and_processes(node: ArbiterNode, reported: Callable[[], StatusDocument]) -> None:
    node.allocate("k", a_grant(uuids=(GPU, OTHER_GPU)))
    process = node.process()
    process.lease(300 * MIB)
    process.send(wire.Usage(0, 200 * MIB, 300 * MIB))
    process.lease(50 * MIB, gpu=1)
    (container,) = reported().containers
    assert (container.key, container.pod, container.uid, container.container) == ("k", "default/a", "uid-a", "main")
    assert (container.service_class, container.level, container.over_limit_action, container.over) == (
        "standard",
        2,
        "report",
        False,
    )
    assert container.gpus == (
        GpuStatus(GPU, 1000 * MIB, 0, 300 * MIB, 200 * MIB, 0, guarantee_bytes=1000 * MIB),
        GpuStatus(OTHER_GPU, 1000 * MIB, 0, 50 * MIB, 0, 0, guarantee_bytes=1000 * MIB),
    )
    (seen,) = container.processes
    assert (seen.pid, seen.pid_in_container) == (os.getpid(), 1)
    assert seen.command.split()[0] == sys.orig_argv[0]
    assert seen.gpus == (ProcessGpu(GPU, 200 * MIB, 0), ProcessGpu(OTHER_GPU, 0, 0))


def test_a_brief_document_has_the_containers_of_which_there_is_something_to_report(
    node: ArbiterNode, meter: HandMeter, reported: Callable[[], StatusDocument]
) -> None:
    path, brief = node.folder / ".status.sock", f"{BRIEF}{secrets.token_hex(8)}"
    node.allocate("k", a_grant())
    node.allocate("other", a_grant(pod="b"))
    process = node.process()
    meter.lists()
    process.lease(MIB)
    assert [one.key for one in reported().containers] == ["k", "other"]
    assert request(path, brief) == StatusDocument(())
    process.send(wire.Report(1, True))
    process.lease(2 * MIB)
    assert request(path, brief).containers == reported().containers[:1], "all of the container, for the Event's text"
    process.send(wire.Report(1, False))
    process.lease(3 * MIB)
    assert request(path, brief) == StatusDocument(())
    for _ in range(2):
        meter.lists("k", me=2000)
    wait_for(lambda: [one.over for one in request(path, brief).containers] == [True])


def test_memory_whose_maker_is_gone_is_reported_until_the_last_has_let_go(
    node: ArbiterNode, reported: Callable[[], StatusDocument]
) -> None:
    node.allocate("k", a_grant())
    maker, opener = node.process(), node.process()
    key = (wire.Space.IPC, 40 * MIB, bytes(wire.KEY_BYTES))
    maker.lease(40 * MIB)
    maker.send(wire.Hold(0, wire.HoldState.MADE, *key))
    maker.lease(0)
    opener.send(wire.Hold(0, wire.HoldState.OPENED, *key))
    opener.receive()
    assert reported().containers[0].gpus[0].shared_bytes == 0, "the maker's lease pays"
    maker.close()
    wait_for(lambda: reported().containers[0].gpus[0].shared_bytes == 40 * MIB)
    opener.send(wire.Drop(0, wire.HoldState.OPENED, wire.Space.IPC, 0, bytes(wire.KEY_BYTES)))
    opener.receive()
    assert reported().containers[0].gpus[0].shared_bytes == 0


def test_a_directory_without_a_grant_is_left_out(node: ArbiterNode, reported: Callable[[], StatusDocument]) -> None:
    node.allocate("k")
    assert reported() == StatusDocument(())


def test_only_the_arbiters_own_user_may_connect(node: ArbiterNode, reported: Callable[[], StatusDocument]) -> None:
    assert stat.S_IMODE((node.folder / ".status.sock").stat().st_mode) == 0o600


def test_a_status_reader_that_does_not_read_delays_no_lease(
    node: ArbiterNode, reported: Callable[[], StatusDocument]
) -> None:
    node.allocate("k", a_grant())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.connect(str(node.folder / ".status.sock"))
        assert not node.process().lease(MIB).refused
        assert reported().containers[0].gpus[0].leased_bytes == MIB


@pytest.mark.parametrize("kind", ["silent", "unread", "reconnect"])
def test_in_a_flood_the_device_plugin_reads_the_status_in_time_and_no_lease_waits(
    node: ArbiterNode, reported: Callable[[], StatusDocument], kind: str
) -> None:
    node.allocate("k", a_grant())
    process = node.process()
    with flooded(path := node.folder / ".status.sock", kind):
        for _ in range(10):
            began_s = time.monotonic()
            assert not process.lease(MIB).refused
            assert time.monotonic() - began_s < 1
            decode_status(asyncio.run(read_document(path)))  # within its own limit
            assert descriptors() < 200


def test_readers_that_do_not_read_are_hung_up_on_and_others_have_their_document_at_once() -> None:
    readers, document = Readers(), b"a" * 10_000_000
    pairs = [socket.socketpair() for _ in range(READERS + 3)]
    for ours, _ in pairs:
        readers.add(ours, document)
    assert [ours.fileno() == -1 for ours, _ in pairs] == [True] * 3 + [False] * READERS
    listener, other = socket.socket(socket.AF_UNIX), socket.socketpair()
    listener.bind("")
    listener.listen()
    readers.add(other[0], b"short")
    assert other[1].recv(100) == b"short"
    readers._sending = {one: (rest, since_s - 3) for one, (rest, since_s) in readers._sending.items()}
    assert not readers.wait(listener, 0)
    assert all(ours.fileno() == -1 for ours, _ in pairs)
    for _, theirs in (*pairs, other):
        theirs.close()
    listener.close()


def test_a_reader_that_reads_slowly_has_all_of_its_document() -> None:
    readers, document = Readers(), os.urandom(3_000_000)
    ours, theirs = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    readers.add(ours, document)
    read = b""
    while len(read) < len(document):
        read += theirs.recv(100_000)
        readers.wait(listener, 0)
    assert read == document
    assert theirs.recv(1) == b""
    theirs.close()
    listener.close()


def test_in_a_flood_of_readers_few_documents_are_made(node: ArbiterNode) -> None:
    now_s = [0.0]
    documents = Documents(node.start(), lambda: now_s[0])
    made = 0
    for _ in range(1000):
        now_s[0] += 0.001
        if documents.get(brief=False) is not None:
            made += 1
        else:
            assert 0 < documents.wait_s([False], 1.0) <= 1 / DOCUMENTS_A_SECOND
    assert DOCUMENTS_AT_ONCE <= made <= DOCUMENTS_AT_ONCE + DOCUMENTS_A_SECOND + 1
    assert documents.get(brief=True) is not None, "each kind has its own"
    assert documents.wait_s([], 1.0) == 1.0


def test_in_a_flood_of_readers_no_document_is_older_than_its_reader(
    node: ArbiterNode, reported: Callable[[], StatusDocument]
) -> None:
    node.allocate("k", a_grant())
    process = node.process()
    for mib in range(1, 2 * int(DOCUMENTS_AT_ONCE)):
        process.lease(MIB)
        assert reported().containers[0].gpus[0].leased_bytes == mib * MIB


def test_the_socket_of_a_dead_arbiter_is_replaced_and_a_successors_is_left(node: ArbiterNode) -> None:
    path = node.folder / ".status.sock"
    server = ArbiterServer(node.folder)
    first = StatusSocket(path, server)
    second = StatusSocket(path, server)
    first.close()
    assert request(path) == StatusDocument(())
    second.close()
    server.stop()
    server.run()


def test_a_status_socket_that_somebody_removes_is_back_within_seconds(
    node: ArbiterNode, reported: Callable[[], StatusDocument]
) -> None:
    path = node.folder / ".status.sock"
    path.unlink()
    wait_for(path.exists)
    assert reported().containers == ()


def test_nothing_is_put_into_a_directory_that_is_being_removed(
    node: ArbiterNode, reported: Callable[[], StatusDocument]
) -> None:
    node.allocate("k", a_grant())
    other = node.allocate("other", a_grant())
    node.process().lease(1 * MIB)
    (node.folder / "k/grant").unlink()
    (node.folder / "k/arbiter.sock").unlink()
    (other / "arbiter.sock").unlink()
    wait_for((other / "arbiter.sock").exists)  # so the arbiter has looked at both
    (node.folder / "k").rmdir()
    wait_for(lambda: len(reported().containers) == 1)


def test_a_grants_socket_that_somebody_removes_is_back_and_those_connected_stay(
    node: ArbiterNode, reported: Callable[[], StatusDocument]
) -> None:
    node.allocate("k", a_grant())
    before = node.process()
    before.lease(300 * MIB)
    (node.folder / "k/arbiter.sock").unlink()
    after = node.process()  # waits for the socket
    before.lease(100 * MIB)
    after.lease(100 * MIB)
    (container,) = reported().containers
    assert container.gpus[0].leased_bytes == 500 * MIB
    assert len(container.processes) == 2
