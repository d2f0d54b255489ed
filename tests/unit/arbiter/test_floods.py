"""One container floods its socket: the others are served, and the arbiter's memory for the flood is bounded."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from arbiter import attention, host
from arbiter.attention import Attention
from arbiter.budget import MessageBudget
from arbiter.connection import SEND_BUFFER_BYTES, UNREAD_BYTES
from arbiter.memory import container
from arbiter.memory.meter import HURRIED_S, Meter
from arbiter.metrics import ArbiterCollector
from nvml.messages import AnyReply, AnyRequest, ProcessesReply
from nvml.queries import Nvml
from tests.unit.arbiter.conftest import GPU, MIB, ArbiterNode, Process, a_grant, wait_for
from vgpu.api.contract import CONTAINER_DIR
from vgpu.protocol import wire


@pytest.fixture
def two(node: ArbiterNode) -> ArbiterNode:
    """Containers `k` and `other`."""
    node.allocate("k", a_grant())
    node.allocate("other", a_grant(pod="other"))
    node.start()
    return node


def flooding(act: Callable[[], None]) -> Callable[[], None]:
    """Calls it again and again from a thread, until what this returns is called."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            with suppress(OSError):
                act()

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        ends.set()
        thread.join()

    return end


class Work:
    """Something to attend to that takes so many seconds of a processor each time, by its own clock."""

    def __init__(self, takes_s: float) -> None:
        self.now_s, self._takes_s, self.done = 0.0, takes_s, 0
        self._read, self._written = socket.socketpair()
        self._written.send(b"x")
        self.attention = Attention(0.0, lambda: self.now_s)
        self.attention.add(self._read.fileno(), self._act)

    def _act(self) -> None:
        self.now_s += self._takes_s
        self.done += 1

    def close(self) -> None:
        self.attention.close()
        self._read.close()
        self._written.close()


@pytest.fixture
def work() -> Iterator[Callable[[float], Work]]:
    made: list[Work] = []

    def make(takes_s: float) -> Work:
        made.append(Work(takes_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_container_that_had_its_part_rests_until_it_has_some_again(work: Callable[[float], Work]) -> None:
    one = work(attention.MS_AT_ONCE / 1000 / 4)
    for _ in range(3):
        one.attention.serve()
        assert one.attention.rest_s(0.0) is None
    one.attention.serve()
    until_s = one.attention.rest_s(0.0) or 0.0
    assert until_s == pytest.approx(attention.MS_AGAIN / attention.MS_A_SECOND)
    assert one.attention.throttles == 1
    assert one.attention.rest_s(until_s) is None


def test_the_container_that_had_less_comes_first(work: Callable[[float], Work]) -> None:
    much, little = work(0.02), work(0.001)
    for one in (much, little):
        one.attention.serve()
    assert sorted([much.attention, little.attention], key=lambda one: one.had) == [little.attention, much.attention]


def test_a_bucket_is_ready_again_at_the_wanted_level() -> None:
    budget = MessageBudget(0.0, 100, 1000, again=10)
    budget.spend(1000)
    assert not budget.may(0.0)
    assert budget.again_s(0.0) == pytest.approx(0.1)
    assert budget.may(0.1)


def test_a_container_that_floods_waits_while_another_is_served(
    two: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MS_A_SECOND", 0.001)
    monkeypatch.setattr(attention, "MS_AT_ONCE", 20.0)
    node = two
    node.allocate("late", a_grant(pod="late"))
    node.allocate("flood", a_grant(pod="flood"))
    flood, late = node.process("flood"), node.process("late")
    assert node.server is not None
    server = node.server
    flood.sock.setblocking(False)
    end = flooding(lambda: flood.send(wire.Usage(0, 0, 0)))
    try:
        wait_for(lambda: server.throttles().get("flood"), 20)
        assert late.lease(MIB).granted_bytes == MIB
    finally:
        end()
    assert "late" not in server.throttles()
    flood.sock.setblocking(True)
    flood.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        flood.receive()


def test_a_neighbour_is_served_at_once_while_a_container_connects_again_and_again(two: ArbiterNode) -> None:
    neighbour = two.process("other")

    def reconnect() -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(str(two.folder / "k/arbiter.sock"))
            sock.send(wire.encode(1, wire.Hello(1, 0, "flood")))
        finally:
            sock.close()

    end = flooding(reconnect)
    took_s = []
    try:
        for _ in range(50):
            began_s = time.monotonic()
            assert neighbour.lease(MIB).granted_bytes == MIB
            took_s.append(time.monotonic() - began_s)
    finally:
        end()
    assert sorted(took_s)[len(took_s) // 2] < 0.05


def test_a_connection_without_hello_is_closed_with_a_reason(two: ArbiterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "HELLO_S", 0.1)
    greeted, silent = two.process(), two.connect()
    answer = silent.receive()
    assert isinstance(answer, wire.Error)
    assert (answer.code, answer.text) == (1, "no HELLO within 0.1 s")
    assert silent.hung_up()
    assert two.server is not None
    assert two.server.containers["k"].refused == {"no-hello": 1}
    assert greeted.lease(MIB).granted_bytes == MIB


def sends_until_full(one: Process) -> int:
    """Questions until the kernel takes no more; how many it took, numbered from 0."""
    for sent in itertools.count():
        try:
            one.send(wire.Processes(0), sent)
        except BlockingIOError:
            return sent
    raise AssertionError


def test_a_process_that_does_not_read_its_answers_is_not_read_until_it_does(two: ArbiterNode) -> None:
    assert two.server is not None
    one = two.process()
    (connection,) = two.server.containers["k"].connections.values()
    one.sock.setblocking(False)
    sent = sends_until_full(one)
    wait_for(lambda: connection.full)
    assert UNREAD_BYTES < 2 * SEND_BUFFER_BYTES
    one.sock.settimeout(5)
    answers = [one.receive_numbered()[0] for _ in range(sent)]
    assert answers == list(range(sent))
    wait_for(lambda: not connection.full)  # the arbiter sees it after the last answer has come
    assert two.server.containers["k"].refused == {}


def test_a_process_with_more_mounts_than_are_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"1 2 0:99 /grants/k {CONTAINER_DIR} ro - ext4 /dev/sda rw\n"
    monkeypatch.setattr(host, "READ_BYTES", 1)
    reads: list[int] = []

    def read(_descriptor: int, _size: int) -> bytes:
        reads.append(1)
        return b"1 2 0:1 / /elsewhere rw - tmpfs x rw\n" if len(reads) == 1 else line.encode()

    monkeypatch.setattr(os, "read", read)
    monkeypatch.setattr(host, "_threads", lambda _pid, _name: [])
    assert host.grant_in(host.mounts_of(os.getpid()), "grants") is None
    assert len(reads) == 1


def test_refusals_are_counted_also_when_the_directory_is_gone(two: ArbiterNode) -> None:
    assert two.server is not None
    server = two.server
    one: Process = two.process()
    one.send_bytes(b"\0" * 64)
    assert isinstance(one.receive(), wire.Error)
    assert server.refused() == {"bad-packet": 1}
    for path in (two.folder / "k").iterdir():
        path.unlink()
    (two.folder / "k").rmdir()
    wait_for(lambda: "k" not in server.containers)
    with server.lock:
        refused = server.refused()
    assert refused == {"bad-packet": 1}


def test_metrics_name_the_container_that_waits_and_count_refusals_by_reason(
    two: ArbiterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert two.server is not None
    server = two.server
    one = two.process()
    one.send_bytes(b"\0" * 64)
    assert isinstance(one.receive(), wire.Error)
    monkeypatch.setattr(server, "throttles", lambda: {"k": 3})
    families = {family.name: family for family in ArbiterCollector(server).collect()}
    (throttled,) = families["tangram_container_throttles"].samples
    assert (throttled.labels["pod"], throttled.value) == ("a", 3)
    (refused,) = families["tangram_arbiter_refused"].samples
    assert (refused.labels, refused.value) == ({"listener": "containers", "reason": "bad-packet"}, 1)


class Counting:
    """NVML without a process; how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        self.calls += 1
        return [ProcessesReply(())] * len(requests)


def test_readings_that_containers_hurry_come_twenty_times_a_second_at_most(node: ArbiterNode) -> None:
    calls = Counting()
    meter = Meter(Nvml(calls), node.folder)
    meter.want([GPU])
    meter.start()
    wait_for(lambda: calls.calls > 0)
    began_s, before = time.monotonic(), calls.calls
    while time.monotonic() - began_s < 0.5:
        meter.hurry()
        time.sleep(0.001)
    passed_s, came = time.monotonic() - began_s, calls.calls - before
    meter.close()
    assert 1 <= came <= passed_s / HURRIED_S + 1
