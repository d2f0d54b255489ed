"""What containers pass is closed without waiting: FUSE files whose daemon does not answer, sockets that linger, in whatever state they arrive."""

from __future__ import annotations

import array
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from arbiter import descriptors
from arbiter.connection import Connection, PeerGone
from arbiter.descriptors import MOST_PASSED, UNREAD_DESCRIPTORS, Closer, Kind, _closer, discard, end, kind_of, receive
from tests.fuse_file import NAME
from vgpu.api.errors import BadDocument
from vgpu.protocol import wire

LINGER_S = 600
PATIENCE_S = 60.0


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The container's end of a connection, and the arbiter's."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    yield theirs, ours
    theirs.close()
    ours.close()


def send(sock: socket.socket, packet: bytes, *fds: int) -> None:
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def in_time(act: Callable[[], object]) -> object:
    """What it returns; it fails if it waits. In a thread, so that a failure ends the test."""
    found: list[object] = []

    def attempt() -> None:
        try:
            found.append(act())
        except (BadDocument, PeerGone) as error:
            found.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it waits for what a container passed"
    return found[0]


@pytest.fixture
def lingering() -> Iterator[Callable[[], int]]:
    """Makes sockets whose close waits for ten minutes: their peer reads nothing."""
    kept: list[socket.socket] = []

    def make() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        kept.extend((listener, other))
        one.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                one.send(bytes(65536))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
        return one.detach()

    yield make
    for sock in kept:
        sock.close()


@pytest.fixture
def unanswered(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Opens a FUSE file whose daemon answers nothing after that: once, because the next open would wait."""
    folder = tmp_path / "fuse"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.fuse_file", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        if daemon.stdout.readline() != "mounted\n":
            pytest.skip("FUSE cannot be mounted here")
        try:
            yield lambda: os.open(folder / NAME, os.O_RDONLY)
        finally:
            daemon.kill()
            daemon.wait()
            assert _closer.settled(PATIENCE_S)
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_memory_is_told_from_everything_else(tmp_path: Path) -> None:
    memory = os.memfd_create("block")
    read, write = os.pipe()
    named_like_memory = tmp_path / "memfd:block"
    named_like_memory.touch()
    others = [
        read, write, os.open("/dev/null", os.O_RDWR), os.open("/", os.O_PATH), os.open("/", os.O_RDONLY), os.eventfd(0),
        socket.socket().detach(), os.open("/proc/self/stat", os.O_RDONLY), os.open(f"/proc/self/fd/{memory}", os.O_PATH),
    ]  # fmt: skip
    assert kind_of(memory) is Kind.MEMORY
    assert {kind_of(fd) for fd in others} == {Kind.FOREIGN}
    assert kind_of(100_000) is Kind.FOREIGN
    discard([memory, *others], "k")
    assert _closer.settled(PATIENCE_S)
    for fd in (memory, *others):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_fuse_file_with_the_path_of_memory_is_foreign_and_nobody_waits_for_its_daemon(
    pair: Pair,
    unanswered: Callable[[], int],
) -> None:
    fd = unanswered()
    assert in_time(lambda: kind_of(fd)) is Kind.FOREIGN
    theirs, ours = pair
    send(theirs, b"packet", fd)
    assert isinstance(in_time(lambda: receive(ours, 100, "k")), BadDocument)
    in_time(lambda: end(ours, "k"))
    assert _closer.unclosed == _closer.unclosed_of("k") == 1, "its daemon does not answer"
    memory = os.memfd_create("block")
    in_time(lambda: discard([memory], "k"))
    discard([fd], "k")  # the test's own: the closer closes it when the daemon has ended


@pytest.mark.parametrize("count", [1, 100, MOST_PASSED])
def test_a_socket_that_lingers_is_refused_and_closed_wherever_it_is_in_the_message(
    pair: Pair, lingering: Callable[[], int], count: int
) -> None:
    theirs, ours = pair
    null = os.open("/dev/null", os.O_RDONLY)
    last = lingering()
    send(theirs, b"packet", *[null] * (count - 1), last)
    os.close(null)
    os.close(last)  # it does not wait: the message has another one
    assert isinstance(in_time(lambda: receive(ours, 100, "k")), BadDocument)
    assert _closer.settled(PATIENCE_S)


@pytest.mark.parametrize("before", [[], [b""], [b"x", b"", b"y"]], ids=["nothing", "empty", "some"])
def test_what_is_unread_when_a_connection_is_closed_is_not_waited_for(
    pair: Pair, lingering: Callable[[], int], before: list[bytes]
) -> None:
    theirs, ours = pair
    for packet in before:
        theirs.send(packet)
    fd = lingering()
    send(theirs, b"", fd)
    os.close(fd)  # it does not wait: the message has another one
    in_time(lambda: end(ours, "k"))
    assert _closer.settled(PATIENCE_S)
    with pytest.raises(BrokenPipeError):
        theirs.send(b"later")


def test_a_socket_full_of_descriptors_is_closed_by_the_thread(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    theirs.setblocking(False)
    looked_at: list[int] = []

    def noted(fd: int) -> Kind:
        looked_at.append(fd)
        return kind_of(fd)

    monkeypatch.setattr(descriptors, "kind_of", noted)
    null = os.open("/dev/null", os.O_RDONLY)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            send(theirs, b"", *[null] * MOST_PASSED)
            sent += 1
    os.close(null)
    assert sent * MOST_PASSED > 2 * UNREAD_DESCRIPTORS
    in_time(lambda: end(ours, "k"))
    assert UNREAD_DESCRIPTORS <= len(looked_at) < UNREAD_DESCRIPTORS + MOST_PASSED
    assert ours.fileno() == -1
    with pytest.raises(ConnectionError):  # a reset once the thread has closed it
        theirs.send(b"later")
    assert _closer.settled(PATIENCE_S)
    with suppress(ConnectionResetError):
        assert theirs.recv(1) == b"", "it knows that the connection has ended"


@pytest.mark.parametrize("kind", ["memory connection", "GPU time"])
def test_a_connection_ends_for_a_foreign_descriptor_and_keeps_the_drivers(
    pair: Pair, lingering: Callable[[], int], kind: str
) -> None:
    theirs, ours = pair
    connection = Connection(ours, number=1, pid=1, hello_until_s=0.0, exports=1)
    read = connection.receive if kind == "memory connection" else connection.receive_with_fd
    memory = os.memfd_create("block")
    packet = wire.encode(1, wire.Return(0, 0, 0))
    send(theirs, packet, memory)
    received = in_time(read)
    assert isinstance(received, tuple)
    (kept,) = connection.passed if kind == "memory connection" else received[:1]
    assert kind_of(kept) is Kind.MEMORY
    if kind != "memory connection":
        os.close(kept)
    fd = lingering()
    send(theirs, packet, fd, memory)
    os.close(fd)
    os.close(memory)
    assert isinstance(in_time(read), BadDocument)
    in_time(connection.close)
    assert _closer.settled(PATIENCE_S)


def test_descriptors_on_a_connection_that_expects_none_are_closed(pair: Pair) -> None:
    theirs, ours = pair
    connection = Connection(ours, number=1, pid=1, hello_until_s=0.0)
    memory = os.memfd_create("block")
    send(theirs, wire.encode(1, wire.Return(0, 0, 0)), memory)
    assert connection.receive() is not None
    assert connection.passed == []
    connection.close()
    os.close(memory)


def test_without_its_thread_what_is_foreign_stays_open_and_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    closer, (read, write) = Closer(), os.pipe()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        closer.close([read], "k")
    assert closer.unclosed == 1
    closer.close([write], "k")
    assert closer.settled(PATIENCE_S)


def closing_threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Descriptor -> the thread that closed it, from now on."""
    closed: dict[int, str] = {}
    plain = os.close

    def close(fd: int) -> None:
        closed[fd] = threading.current_thread().name
        plain(fd)

    monkeypatch.setattr(os, "close", close)
    return closed


def test_memory_is_freed_by_the_thread_that_may_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    closed = closing_threads(monkeypatch)
    connection = Connection(ours, number=1, pid=1, hello_until_s=0.0, exports=1, container="k")
    memory = os.memfd_create("block")
    for _ in range(3):
        send(theirs, wire.encode(1, wire.Return(0, 0, 0)), memory)
    assert connection.receive() is not None
    (expected,) = connection.passed
    connection.close_passed()
    connection.exports = 0
    assert connection.receive() is not None, "it expects none"
    assert connection.receive_with_fd() is not None
    assert _closer.settled(PATIENCE_S)
    assert closed[expected] == "closer"
    assert set(closed.values()) == {"closer"}
    os.close(memory)


def test_a_device_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closing_threads(monkeypatch)
    null = os.open("/dev/null", os.O_RDWR)
    monkeypatch.setattr(descriptors, "kind_of", lambda _: Kind.DEVICE)
    discard([null], "k")
    assert closed == {null: threading.current_thread().name}


class HungClose:
    """The closer's close of one descriptor, which waits until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: int) -> None:
        self.going = threading.Event()
        plain = os.close

        def close(fd: int) -> None:
            if fd == waits:
                assert self.going.wait(PATIENCE_S)
            plain(fd)

        monkeypatch.setattr(os, "close", close)


def test_a_container_whose_descriptors_are_not_closed_is_full_until_all_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "unclosed_of", lambda: 3)
    theirs, ours = pair
    hung = os.eventfd(0)
    close = HungClose(monkeypatch, hung)
    discard([hung, os.eventfd(0), os.eventfd(0)], "k")
    assert not descriptors.is_full("k"), "it has its part"
    discard([os.eventfd(0)], "other")
    discard([os.eventfd(0)], "k")
    assert descriptors.is_full("k")
    assert not descriptors.is_full("other")
    memory = os.memfd_create("block")
    send(theirs, b"packet", memory)
    with pytest.raises(BadDocument, match="passed 4 descriptors that are not closed yet"):
        receive(ours, 100, "k")
    end(ours, "k")
    assert ours.fileno() == -1
    assert _closer.unclosed_of("k") == 5, "its socket, and nothing that is in it"
    assert theirs.recv(1) == b"", "it knows that the connection has ended"
    close.going.set()
    assert _closer.settled(PATIENCE_S)
    assert not descriptors.is_full("k")
    os.close(memory)
