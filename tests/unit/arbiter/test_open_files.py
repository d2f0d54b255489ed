"""The arbiter limits each container's open files, so that enough are left for the others."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter import descriptors
from arbiter.memory.container import ServedContainer
from arbiter.open_files import PART, SPARE, connections_of, raise_limit
from arbiter.status import StatusSocket
from tests.unit.arbiter.conftest import MIB, ArbiterNode, Process, a_grant, wait_for
from tests.unit.arbiter.test_status import request
from vgpu.protocol import wire

FILES = 160
"""Of the arbiter. Some thirty are open in a test before anybody connects."""


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Lets this process, which is the arbiter here, have so many files open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_is_what_the_kernel_lets(limit: Callable[[int], None]) -> None:
    limit(FILES)
    assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@given(st.integers(1, 65_536), st.integers(0, 1 << 20))
def test_a_container_gets_what_was_requested_or_its_part(requested: int, files: int) -> None:
    most = connections_of(requested, files)
    assert 1 <= most <= requested
    assert most == 1 or most * PART + SPARE <= files


def test_connections_of_all_containers_leave_the_last_files_to_the_arbiter(
    node: ArbiterNode, limit: Callable[[int], None]
) -> None:
    node.allocate("k", a_grant())
    container = node.start().containers["k"]
    first = node.process()
    limit(FILES + 2 * len(list(Path("/proc/self/fd").iterdir())))  # the other ends are this process's too
    crowd: list[Process] = []

    def rejected() -> bool:
        return bool(select.select([crowd[-1].sock], [], [], 0)[0])

    while not crowd or not rejected():
        assert len(crowd) < FILES, "no process was rejected"
        crowd.append(node.connect())
        wait_for(lambda: len(container.connections) == len(crowd) + 1 or rejected(), 20)
    answer = crowd[-1].receive()
    assert isinstance(answer, wire.Error)
    assert (answer.code, "files open" in answer.text) == (3, True)
    node.allocate("late", a_grant(pod="late"))  # is seen, and has a socket: folders can still be read
    wait_for((node.folder / "late/arbiter.sock").exists, 20)
    assert first.lease(10 * MIB).granted_bytes == 10 * MIB
    for process in crowd:
        process.close()
    node.process("late")


def test_a_container_whose_descriptors_are_not_closed_connects_again_when_they_are(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.allocate("k", a_grant())
    node.allocate("other", a_grant(pod="other"))
    node.start()
    first, other = node.process(), node.process("other")
    monkeypatch.setattr(descriptors, "unclosed_of", lambda: 3)
    going, plain = threading.Event(), os.close
    hung = os.eventfd(0)

    def close(fd: int) -> None:
        if fd == hung:
            assert going.wait(60)
        plain(fd)

    monkeypatch.setattr(os, "close", close)
    descriptors.discard([hung, *(os.eventfd(0) for _ in range(3))], "k")
    first.send(wire.Usage(0, 0, 0))
    while not isinstance(answer := first.receive(), wire.Error):
        pass
    assert "not closed yet" in answer.text
    assert first.hung_up()
    waiting = node.connect()
    waiting.send(wire.Hello(1, 0, "test"))
    server = node.server
    assert server is not None
    wait_for(lambda: bool(server._listeners.paused))
    assert other.lease(MIB).granted_bytes == MIB
    assert node.process("other").lease(MIB).granted_bytes == MIB
    assert len(server.containers["k"].connections) == 0
    going.set()
    waiting.sock.settimeout(20)
    assert waiting.welcomed().lease(MIB).granted_bytes == MIB


class Short:
    """Fails as an accept does when too many files are open, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self) -> None:
        if self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_folder_that_cannot_be_read_for_want_of_files_is_read_at_the_next_check(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    short, scandir = Short(1), os.scandir

    def scanned(path: Path) -> object:
        short()
        return scandir(path)

    monkeypatch.setattr("arbiter.server.os.scandir", scanned)
    node.allocate("k", a_grant())
    assert node.process().lease(MIB).granted_bytes == MIB
    assert short.times == 0


def test_a_process_that_connects_while_files_are_short_is_accepted_later(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.allocate("k", a_grant())
    node.start()
    node.process()
    short, accept = Short(2), ServedContainer.accept

    def accepted(container: ServedContainer) -> object:
        short()
        return accept(container)

    monkeypatch.setattr(ServedContainer, "accept", accepted)
    waiting = node.connect()
    waiting.sock.settimeout(20)
    assert waiting.hello().lease(MIB).granted_bytes == MIB
    assert short.times == 0


def test_a_directory_that_goes_while_files_are_short_leaves_the_others_served(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.allocate("k", a_grant())
    node.allocate("other", a_grant(pod="other"))
    node.start()
    other = node.process("other")
    short, accept = Short(1), ServedContainer.accept

    def accepted(container: ServedContainer) -> object:
        short()
        return accept(container)

    monkeypatch.setattr(ServedContainer, "accept", accepted)
    node.connect()
    wait_for(lambda: short.times == 0)
    for path in (node.folder / "k").iterdir():
        path.unlink()
    (node.folder / "k").rmdir()
    server = node.server
    assert server is not None
    wait_for(lambda: "k" not in server.containers, 20)
    assert other.lease(MIB).granted_bytes == MIB


def test_the_status_is_reported_again_after_an_accept_that_failed(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = StatusSocket(path := node.folder / ".status.sock", node.start())
    short, accept = Short(1), socket.socket.accept

    def accepted(listener: socket.socket) -> object:
        if listener.getsockname() == str(path.with_name("..status.sock.new")):
            short()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    assert request(path).containers == ()  # by the accept that was waiting already
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
        late.settimeout(20)
        late.connect(str(path))
        assert late.recv(65536)
    assert short.times == 0
    status.close()
