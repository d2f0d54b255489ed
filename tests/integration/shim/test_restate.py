"""What a process states to a restarted arbiter, and how it acts on an arbiter's answers: seen by the test's own arbiter,
which sends no more than it must."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, OUT_OF_MEMORY, Stage, Worker
from tests.signals import send_signal
from vgpu.protocol import wire

WAIT_S = 60
PROMISE_MS = 500
"""For so long after HELLO a library relies on the reservation; specified."""
PATIENCE_S = 2.0
"""How long a request waits for the answer of a silent arbiter; specified."""
TRIES = 5
"""To have a process begin within that time, on a busy machine."""


class Peer:
    """One connection of a process, as its arbiter sees it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(WAIT_S)
        self._sock = sock

    def receive(self, kind: type[wire.Message]) -> tuple[int, wire.Message]:
        """The next message of that kind; what comes before it is not answered."""
        while True:
            seq, message = wire.decode(self._sock.recv(4096))
            if isinstance(message, kind):
                return seq, message

    def send(self, seq: int, message: wire.Message) -> None:
        self._sock.send(wire.encode(seq, message))

    def welcomes(self, promised_mib: int = 0) -> None:
        self.receive(wire.Hello)
        page = os.memfd_create("page")
        os.ftruncate(page, wire.PAGE_BYTES)
        gpu = wire.WelcomeGpu(bytes.fromhex(GPUS[0].removeprefix("GPU-").replace("-", "")), 1000 * MIB, 0, 0)
        socket.send_fds(self._sock, [wire.encode(0, wire.Welcome((gpu,), promised_mib))], [page])
        os.close(page)


def memory_connection(listener: socket.socket) -> socket.socket:
    """The next that is not for GPU time: a process with a context opens that one as well, in no order."""
    while True:
        sock, _ = listener.accept()
        sock.settimeout(WAIT_S)
        _, hello = wire.decode(sock.recv(4096, socket.MSG_PEEK))
        if isinstance(hello, wire.Hello) and not hello.flags & wire.FOR_GPU_TIME:
            return sock
        sock.close()


@contextmanager
def arbiter(
    stage: Stage, begin: Callable[[], None] = lambda: None, welcome: Callable[[Peer], None] = Peer.welcomes
) -> Iterator[Peer]:
    """The next process that connects; in the end the arbiter is gone. `begin`: when one can."""
    path = stage.folder / "grants" / stage.key / "arbiter.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(WAIT_S)
        begin()
        sock = memory_connection(listener)
        with sock:
            peer = Peer(sock)
            welcome(peer)
            yield peer
    path.unlink()


@pytest.fixture
def stage(bare_stage: Stage) -> Stage:
    bare_stage.grant((GPUS[0], 1000))
    return bare_stage


def test_a_context_that_was_not_measured_yet_is_stated_as_what_was_held_for_it(stage: Stage) -> None:
    worker = stage.bare_worker()
    worker.start("use()")
    with arbiter(stage) as first:
        seq, begun = first.receive(wire.Context)
        assert isinstance(begun, wire.Context)
        assert begun.step == wire.Step.BEGIN
        first.send(seq, wire.Leased(0, False, CONTEXT_MIB * MIB, 0))
        assert worker.finish()[0] == 0
    with arbiter(stage) as second:
        _, stated = second.receive(wire.Context)
        assert stated == wire.Context(0, wire.Step.DONE, CONTEXT_MIB * MIB)


def test_a_context_that_was_promised_is_made_without_waiting_for_an_answer(stage: Stage) -> None:
    for _ in range(TRIES):
        worker = stage.bare_worker()
        worker.request("[0]")  # it is up
        began_s = time.monotonic()
        with arbiter(
            stage, lambda worker=worker: worker.start("use()"), lambda peer: peer.welcomes(CONTEXT_MIB)
        ) as first:  # type: ignore[misc]
            seq, begun = first.receive(wire.Context)
            in_time = time.monotonic() - began_s < PROMISE_MS / 2000  # the library reads the clock a little later
            first.send(seq, wire.Leased(0, True, 0, 0))  # a refusal, so that a process that waits for it shows
            assert begun == wire.Context(0, wire.Step.BEGIN, 0)
            if in_time:
                assert worker.finish()[0] == 0
                _, made = first.receive(wire.Context)
                assert made == wire.Context(0, wire.Step.DONE, CONTEXT_MIB * MIB)
                return
    pytest.fail(f"this machine is too slow: in {TRIES} tries no BEGIN came within {PROMISE_MS // 2} ms")


def test_a_promise_that_came_late_is_not_relied_on(stage: Stage) -> None:
    worker = stage.bare_worker()

    def welcome(peer: Peer) -> None:
        threading.Event().wait(PROMISE_MS / 1000)
        peer.welcomes(CONTEXT_MIB)

    with arbiter(stage, lambda: worker.start("use()"), welcome) as first:
        seq, begun = first.receive(wire.Context)
        assert isinstance(begun, wire.Context)
        first.send(seq, wire.Leased(0, True, 0, 0))
        assert worker.finish()[0] == OUT_OF_MEMORY


def test_a_request_that_waits_for_other_containers_is_waited_for_as_long_as_the_arbiter_reports_it(
    stage: Stage,
) -> None:
    """Longer than for an arbiter that is silent."""
    worker = stage.bare_worker()
    worker.start("use() and alloc(100)")
    with arbiter(stage) as peer:
        seq, lease = begun_and_first_lease(peer)
        assert lease.kind is wire.LeaseKind.RESIDENT
        for _ in range(6):
            threading.Event().wait(PATIENCE_S / 4)
            peer.send(seq, wire.Pending(0, MIB))
        peer.send(seq, wire.Leased(0, False, lease.need_bytes, 0))
        assert worker.finish()[0] == 0


def test_a_request_of_which_the_arbiter_reports_nothing_any_more_is_refused(stage: Stage) -> None:
    worker = stage.bare_worker()
    worker.start("use() and alloc(100)")
    with arbiter(stage) as peer:
        seq, _ = begun_and_first_lease(peer)
        peer.send(seq + 1, wire.Pending(0, MIB))  # of another request
        threading.Event().wait(PATIENCE_S / 4)
        peer.send(seq, wire.Pending(0, MIB))
        began_s = time.monotonic()
        assert worker.finish()[0] == OUT_OF_MEMORY
        assert time.monotonic() - began_s >= PATIENCE_S * 0.9, "since the last report"


def begun_and_first_lease(peer: Peer) -> tuple[int, wire.Lease]:
    """The context is granted; the request that a thread waits for."""
    while True:
        seq, message = peer.receive(wire.Context | wire.Lease)  # type: ignore[arg-type]
        if isinstance(message, wire.Lease) and message.need_bytes > 0:
            return seq, message
        if isinstance(message, wire.Lease):
            peer.send(seq, wire.Leased(0, True, 0, 0))
        elif isinstance(message, wire.Context) and message.step == wire.Step.BEGIN:
            peer.send(seq, wire.Leased(0, False, CONTEXT_MIB * MIB, 0))
        elif isinstance(message, wire.Context) and message.step == wire.Step.DONE:
            peer.send(seq, wire.Measured(0, True, CONTEXT_MIB * MIB, 0))


def stops_and_goes_on(worker: Worker) -> None:
    """For longer than an arbiter may be silent, as on a machine whose processors others have. Then a process that counted that time has given up."""
    send_signal(worker.pid, signal.SIGSTOP)
    threading.Event().wait(PATIENCE_S * 1.2)
    os.kill(worker.pid, signal.SIGCONT)
    threading.Event().wait(PATIENCE_S / 4)


def test_time_in_which_the_process_does_not_run_is_no_silence_of_the_arbiter(stage: Stage) -> None:
    worker = stage.bare_worker()
    worker.start("use() and alloc(100)")
    with arbiter(stage) as peer:
        seq, lease = begun_and_first_lease(peer)
        stops_and_goes_on(worker)
        peer.send(seq, wire.Leased(0, False, lease.need_bytes, 0))
        assert worker.finish()[0] == 0


def test_nor_is_it_before_the_first_answer(stage: Stage) -> None:
    worker = stage.bare_worker()
    worker.request("[0]")  # it is up

    def welcome(peer: Peer) -> None:
        stops_and_goes_on(worker)
        peer.welcomes()

    with arbiter(stage, lambda: worker.start("use()"), welcome) as peer:
        seq, begun = peer.receive(wire.Context)
        assert isinstance(begun, wire.Context)
        assert begun.step == wire.Step.BEGIN
        peer.send(seq, wire.Leased(0, False, MIB, 0))
        assert worker.finish()[0] == 0
