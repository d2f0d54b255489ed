"""What a process states to an arbiter that has come back, seen by an arbiter of the test's own that says no more than it must."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.shim.conftest import CARDS, CONTEXT_MIB, MIB, Stage
from vgpu import wire

WAIT_S = 60


class Peer:
    """One connection of a process, as its arbiter sees it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(WAIT_S)
        self._sock = sock

    def hears(self, kind: type[wire.Message]) -> tuple[int, wire.Message]:
        """The next message of that kind; what comes before it is not answered."""
        while True:
            seq, message = wire.decode(self._sock.recv(4096))
            if isinstance(message, kind):
                return seq, message

    def says(self, seq: int, message: wire.Message) -> None:
        self._sock.send(wire.encode(seq, message))

    def welcomes(self) -> None:
        self.hears(wire.Hello)
        page = os.memfd_create("page")
        os.ftruncate(page, wire.PAGE_BYTES)
        card = wire.WelcomeCard(bytes.fromhex(CARDS[0].removeprefix("GPU-").replace("-", "")), 1000 * MIB, 0, 0)
        socket.send_fds(self._sock, [wire.encode(0, wire.Welcome((card,)))], [page])
        os.close(page)


@contextmanager
def arbiter(stage: Stage) -> Iterator[Peer]:
    """The next process that connects; in the end the arbiter is gone."""
    path = stage.folder / "grants" / stage.key / "arbiter.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(WAIT_S)
        sock, _ = listener.accept()
        with sock:
            peer = Peer(sock)
            peer.welcomes()
            yield peer
    path.unlink()


@pytest.fixture
def stage(bare_stage: Stage) -> Stage:
    bare_stage.grant((CARDS[0], 1000))
    return bare_stage


def test_a_context_that_was_not_measured_yet_is_stated_as_what_was_held_for_it(stage: Stage) -> None:
    worker = stage.bare_worker()
    worker.start("use()")
    with arbiter(stage) as first:
        seq, begun = first.hears(wire.Context)
        assert isinstance(begun, wire.Context)
        assert begun.step == wire.Step.BEGIN
        first.says(seq, wire.Leased(0, False, CONTEXT_MIB * MIB, 0))
        assert worker.finish()[0] == 0
    with arbiter(stage) as second:
        _, stated = second.hears(wire.Context)
        assert stated == wire.Context(0, wire.Step.DONE, CONTEXT_MIB * MIB)
