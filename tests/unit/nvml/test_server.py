"""Access to the child through the socket; a peer that misbehaves costs others nothing."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nvml import messages as m
from nvml import server as servers
from nvml.client import NvmlClient
from nvml.errors import NvmlAway, NvmlError, NvmlHung, NvmlOpening
from nvml.mapped import started_at
from nvml.server import CONNECTIONS, NvmlServer
from tests.flooder import descriptors, flooded
from tests.unit.nvml.double import GPU
from tests.unit.nvml.stand import wait_for
from vgpu.health.conditions import Reading

ARBITER_S = 3.0
"""The arbiter waits so long for an answer."""


class RequestCache:
    """A supervisor that answers as a test sets."""

    def __init__(self) -> None:
        self.answer: Callable[[m.AnyRequest], m.AnyReply] = lambda _: m.ProcessesReply((m.ProcessUsage(7, GPU, 1),))
        self.requested: list[m.AnyRequest] = []

    def call_all(self, requests: Sequence[m.AnyRequest], _wait_s: float | None = None) -> list[m.AnyReply]:
        self.requested += requests
        return [self.answer(request) for request in requests]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="nvml-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def requests() -> RequestCache:
    return RequestCache()


@pytest.fixture
def server(folder: Path, requests: RequestCache) -> Iterator[NvmlServer]:
    made = NvmlServer(folder / "nvml.sock", requests)
    yield made
    made.close()


def peer(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(str(folder / "nvml.sock"))
    return sock


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(10) == b""
    except ConnectionError:
        return True


def test_a_client_is_answered_and_errors_keep_their_kind(
    folder: Path, requests: RequestCache, server: NvmlServer
) -> None:
    client = NvmlClient(folder / "nvml.sock", 10)
    assert client.nvml.processes(GPU) == (m.ProcessUsage(7, GPU, 1),)
    for error in (NvmlError("refused", 9), NvmlHung("hung"), NvmlAway("away"), NvmlOpening("opening")):

        def fail(_: m.AnyRequest, error: NvmlError = error) -> m.AnyReply:
            raise error

        requests.answer = fail
        with pytest.raises(type(error)) as caught:
            client.nvml.processes(GPU)
        assert (type(caught.value), str(caught.value), caught.value.code) == (type(error), str(error), error.code)
    client.close()


def test_maps_are_read_by_the_program_that_serves_and_not_by_a_child(
    folder: Path, requests: RequestCache, server: NvmlServer
) -> None:
    me = os.getpid(), started_at(os.getpid())
    client = NvmlClient(folder / "nvml.sock", 10)
    assert client.nvml.mapped((me, (me[0], 1))) == (False, None)
    client.close()
    assert requests.requested == []


def test_health_is_answered_with_what_the_program_read_last_and_without_that_by_the_child(
    folder: Path, requests: RequestCache
) -> None:
    read = m.HealthReply(None, Reading(temperature_c=61), heat="hot")
    for health, expected in ((lambda _: read, read), (None, m.HealthReply("silent"))):
        server = NvmlServer(folder / "nvml.sock", requests, health=health)
        requests.answer, requests.requested = lambda _: m.HealthReply("silent"), []
        client = NvmlClient(folder / "nvml.sock", 10)
        assert client.nvml.health_of([GPU]) == {GPU: expected}
        assert requests.requested == ([] if health else [m.HealthRequest(GPU)])
        client.close()
        server.close()


def test_an_answer_comes_within_50_ms(folder: Path, server: NvmlServer) -> None:
    client, took_ms = NvmlClient(folder / "nvml.sock", 10), []
    for _ in range(100):
        begun_s = time.perf_counter()
        client.nvml.processes(GPU)
        took_ms.append(1000 * (time.perf_counter() - begun_s))
    client.close()
    assert statistics.median(took_ms) < 50


def test_only_our_own_user_may_connect(folder: Path, requests: RequestCache) -> None:
    reported: list[str] = []
    server = NvmlServer(folder / "nvml.sock", requests, user=os.geteuid() + 1, report=reported.append)
    try:
        assert (folder / "nvml.sock").stat().st_mode & 0o777 == 0o600
        with peer(folder) as sock:
            assert hung_up(sock)
        assert reported == [
            f"process {os.getpid()} is of user {os.geteuid()}: must be of {os.geteuid() + 1} (1 so far)"
        ]
        assert not requests.requested
    finally:
        server.close()


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff",
        b"\x92" * 10_000,
        bytes(m.REQUEST_BYTES + 1),
        m.encode(m.RequestPacket(1, m.OpenRequest("/"))),
        m.encode(m.RequestPacket(1, m.XidsRequest((GPU,)))),
        m.encode(m.RequestPacket(1, m.MigDestroyRequest(GPU, 1))),
        m.encode([1, {"type": "Processes", "uuid": 5}]),
    ],
    ids=["no message", "deep", "too long", "opens", "events", "changes a GPU", "wrong type"],
)
def test_a_peer_that_sends_what_it_must_not_is_hung_up_on(
    folder: Path, requests: RequestCache, server: NvmlServer, packet: bytes
) -> None:
    with peer(folder) as sock:
        sock.send(packet)
        assert hung_up(sock)
    assert not requests.requested, "none of it reaches the child"
    client = NvmlClient(folder / "nvml.sock", 10)
    assert client.nvml.processes(GPU)
    client.close()


def test_requests_that_are_there_together_are_read_together_within_a_bound() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        for number in range(m.TOGETHER + 2):
            theirs.send(bytes([number]))
        assert servers._packets(ours) == [bytes([number]) for number in range(m.TOGETHER)]
        assert len(servers._packets(ours)) == 2
        theirs.send(b"last")
        theirs.close()
        assert servers._packets(ours) == [b"last"]
        assert servers._packets(ours) == []


def test_a_client_has_the_reply_to_each_of_more_requests_than_are_carried_together(
    folder: Path, requests: RequestCache, server: NvmlServer
) -> None:
    requests.answer = lambda one: m.ProcessesReply((m.ProcessUsage(int(one.key), one.key, 1),))
    client = NvmlClient(folder / "nvml.sock", 10)
    wanted = [str(number) for number in range(3 * m.TOGETHER + 1)]
    found = client.nvml.held_of(wanted)
    client.close()
    assert found == {name: m.ProcessesReply((m.ProcessUsage(int(name), name, 1),)) for name in wanted}


def test_what_needs_the_rights_of_the_program_alone_is_answered_without_the_child(
    folder: Path, requests: RequestCache, server: NvmlServer
) -> None:
    def refuses(request: m.AnyRequest) -> m.AnyReply:
        raise AssertionError(request)

    requests.answer = refuses
    client = NvmlClient(folder / "nvml.sock", 10)
    with subprocess.Popen(["sleep", "60"]) as process:
        lives = process.pid, started_at(process.pid)
        another = lives[0], lives[1] + 1
        assert client.nvml.gpu_open((lives, another)) == (False, None)
        assert client.nvml.mapped((lives, another)) == (False, None)
        with pytest.raises(NvmlError, match="the descriptors of processes: 17 processes, at most 16 are examined"):
            client.nvml.gpu_open((lives,) * (m.MOST_MAPS + 1))
        process.kill()
    client.close()


def test_peers_beyond_the_limit_are_turned_away_until_one_leaves(folder: Path, server: NvmlServer) -> None:
    inside = [peer(folder) for _ in range(CONNECTIONS)]
    with peer(folder) as sock:
        assert hung_up(sock)
    inside.pop().close()
    client = NvmlClient(folder / "nvml.sock", 10)
    wait_for(lambda: answered(client))
    client.close()
    for sock in inside:
        sock.close()


def test_a_process_that_takes_all_connections_loses_some_to_another_process(folder: Path, server: NvmlServer) -> None:
    with flooded(folder / "nvml.sock", "silent", b"a"):
        wait_for(lambda: server.refused > 0)
        clients = [NvmlClient(folder / "nvml.sock", 10) for _ in range(3)]
        for client in clients:
            wait_for(lambda client=client: answered(client))  # type: ignore[misc]
        assert all(client.nvml.processes(GPU) for client in clients)
        for client in clients:
            client.close()


def test_a_peer_that_was_silent_for_long_is_closed_for_another(
    folder: Path, server: NvmlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = [peer(folder) for _ in range(CONNECTIONS)]
    wait_for(lambda: len(server._connections) == CONNECTIONS)
    monkeypatch.setattr(servers, "SILENT_S", 0.0)
    client = NvmlClient(folder / "nvml.sock", 10)
    assert client.nvml.processes(GPU)
    assert hung_up(inside[0])
    client.close()
    for sock in inside:
        sock.close()


@pytest.mark.parametrize("kind", ["silent", "requests", "unread", "reconnect"])
def test_in_a_flood_the_arbiter_is_answered_in_time_with_few_descriptors_and_threads(
    folder: Path, server: NvmlServer, kind: str
) -> None:
    before, most_threads = descriptors(), 0
    kept = NvmlClient(folder / "nvml.sock", ARBITER_S)
    assert kept.nvml.processes(GPU)
    with flooded(folder / "nvml.sock", kind, m.encode(m.RequestPacket(1, m.ProcessesRequest(GPU)))):
        for _ in range(10):
            assert kept.nvml.processes(GPU)
            starting = NvmlClient(folder / "nvml.sock", ARBITER_S)
            wait_for(lambda starting=starting: answered(starting))  # type: ignore[misc]
            assert descriptors() - before <= servers.THREADS + 4
            most_threads = max(most_threads, sum(one.name.startswith("nvml-") for one in threading.enumerate()))
            starting.close()
    assert most_threads <= servers.THREADS + 1
    kept.close()


def answered(client: NvmlClient) -> bool:
    try:
        return bool(client.nvml.processes(GPU))
    except NvmlAway:
        return False


def test_a_peer_that_does_not_read_is_hung_up_on(
    folder: Path, requests: RequestCache, server: NvmlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SEND_S", 0.2)
    monkeypatch.setattr(servers, "AT_ONCE", 1e9)
    requests.answer = lambda _: m.ProcessesReply(tuple(m.ProcessUsage(pid, GPU, 2**40) for pid in range(1000)))
    with peer(folder) as sock:
        sock.settimeout(0.1)
        try:
            for number in range(10_000):
                sock.send(m.encode(m.RequestPacket(number, m.ProcessesRequest(GPU))))
        except OSError:
            pass
        wait_for(lambda: server.refused == 1)
    client = NvmlClient(folder / "nvml.sock", 10)
    assert client.nvml.processes(GPU)
    client.close()


def test_a_peer_that_requests_without_end_is_slowed_down_and_others_are_answered(
    folder: Path, requests: RequestCache, server: NvmlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "AT_ONCE", 10.0)
    monkeypatch.setattr(servers, "A_SECOND", 20.0)
    begun_s = time.monotonic()
    with peer(folder) as sock:
        stop = threading.Event()

        def flood() -> None:
            number = 0
            while not stop.is_set() and time.monotonic() - begun_s < 1.0:
                sock.send(m.encode(m.RequestPacket(number, m.ProcessesRequest(GPU))))
                sock.recv(m.REPLY_BYTES)
                number += 1

        flooding = threading.Thread(target=flood)
        flooding.start()
        client = NvmlClient(folder / "nvml.sock", 10)
        requested_s = time.monotonic()
        assert client.nvml.processes(GPU)
        assert time.monotonic() - requested_s < 1.0
        client.close()
        flooding.join(10)
        stop.set()
    assert len(requests.requested) < 50, "at most 10 at once and 20 a second"


def test_a_socket_without_a_program_and_a_late_answer_are_no_answer(
    folder: Path, requests: RequestCache, server: NvmlServer
) -> None:
    with pytest.raises(NvmlAway, match=r"none.sock: No such file or directory"):
        NvmlClient(folder / "none.sock", 1).nvml.processes(GPU)
    go_on = threading.Event()

    def late(_: m.AnyRequest) -> m.AnyReply:
        go_on.wait(20)
        return m.ProcessesReply((m.ProcessUsage(1, GPU, 1),))

    before, requests.answer = requests.answer, late
    client = NvmlClient(folder / "nvml.sock", 0.1)
    with pytest.raises(NvmlAway, match=r"no answer within 0.1 s"):
        client.nvml.processes(GPU)
    requests.answer = before
    go_on.set()
    assert client.nvml.processes(GPU)[0].pid == 7, "the late answer is not taken for this one's"
    client.close()


@pytest.mark.parametrize(
    "packet", [b"\xff", bytes(m.REPLY_BYTES + 1), m.encode(m.ReplyPacket(99, m.HealthReply(None)))]
)
def test_a_client_rejects_answers_that_do_not_fit_its_requests(folder: Path, packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / "nvml.sock"))
        listening.listen()
        client = NvmlClient(folder / "nvml.sock", 10)

        def answer_wrongly() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * m.REPLY_BYTES)
                sock.recv(1000)
                sock.send(packet)

        answering = threading.Thread(target=answer_wrongly)
        answering.start()
        with pytest.raises(NvmlAway, match="what came is no answer"):
            client.nvml.processes(GPU)
        answering.join(10)


def test_a_server_that_is_closed_hangs_up_and_leaves_what_another_program_put_in_its_place(
    folder: Path, requests: RequestCache
) -> None:
    server = NvmlServer(folder / "nvml.sock", requests)
    with peer(folder) as sock:
        server.close()
        assert hung_up(sock)
    assert not (folder / "nvml.sock").exists()
    first = NvmlServer(folder / "nvml.sock", requests)
    second = NvmlServer(folder / "nvml.sock", requests)
    first.close()
    client = NvmlClient(folder / "nvml.sock", 10)
    assert client.nvml.processes(GPU)
    client.close()
    second.close()


def test_a_removed_socket_is_back_within_seconds(folder: Path, requests: RequestCache) -> None:
    reported: list[str] = []
    server = NvmlServer(folder / "nvml.sock", requests, report=reported.append)
    try:
        client = NvmlClient(folder / "nvml.sock", 10)
        client.nvml.processes(GPU)
        (folder / "nvml.sock").unlink()
        wait_for((folder / "nvml.sock").exists)
        assert client.nvml.processes(GPU) == (m.ProcessUsage(7, GPU, 1),), "a connected client stays so"
        client.close()
        later = NvmlClient(folder / "nvml.sock", 10)
        assert later.nvml.processes(GPU) == (m.ProcessUsage(7, GPU, 1),)
        later.close()
        assert reported == [f"the socket {folder / 'nvml.sock'} was missing and is put back"]
    finally:
        server.close()
    assert not (folder / "nvml.sock").exists()
