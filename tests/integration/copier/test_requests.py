"""Requests that are wrong change nothing, and connections that may not be served are not."""

from __future__ import annotations

import array
import os
import resource
import select
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from arbiter.swap.copier import Copier, CopierAway
from tests.integration.copier.harness import LIMIT_S, Node, Owner, done, receive, save, state
from tests.integration.copier.owner import MIB
from vgpu.protocol import copier
from vgpu.protocol.copier import Reason, Result

POOL = 16 * MIB


class Raw:
    """A connection that sends any bytes."""

    def __init__(self, node: Node) -> None:
        node.connect(node.run(pool_bytes=POOL)).close()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        node.links.append(self.sock)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(str(node.socket))
        assert isinstance(self.send(copier.encode(copier.Status())), copier.State)

    def send(self, packet: bytes, *fds: int) -> copier.Message:
        """Its answer."""
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([packet], passed)
        return copier.decode(self.sock.recv(512))


@pytest.fixture
def owner(node: Node) -> Owner:
    made = node.owner()
    made.make("a", 4 * MIB, seed=1)
    return made


def open_files(node: Node) -> int:
    """Of the copier."""
    return len(list(Path(f"/proc/{node.processes[-1].pid}/fd").iterdir()))


SLOTS = [
    pytest.param(0, 0, Result.BAD_SIZE, id="nothing"),
    pytest.param(0, 2**44 + 2 * MIB, Result.BAD_SIZE, id="above-16-tib"),
    pytest.param(0, 2**64 - 2 * MIB, Result.BAD_SIZE, id="size-that-wraps"),
    pytest.param(0, 4 * MIB - 1, Result.BAD_SIZE, id="part-of-a-grain"),
    pytest.param(0, 2**44, Result.BAD_SLOT, id="larger-than-the-pool"),
    pytest.param(14 * MIB, 4 * MIB, Result.BAD_SLOT, id="behind-the-end"),
    pytest.param(2**64 - 2 * MIB, 4 * MIB, Result.BAD_SLOT, id="end-that-wraps"),
    pytest.param(4096, 4 * MIB, Result.BAD_SLOT, id="inside-a-grain"),
]


@pytest.mark.parametrize("kind", [copier.Save, copier.Restore])
@pytest.mark.parametrize(("offset", "size", "result"), SLOTS)
def test_a_slot_outside_the_pool_and_an_impossible_size_are_refused(
    node: Node, owner: Owner, kind: type[copier.Save], offset: int, size: int, result: Result
) -> None:
    raw, fd = Raw(node), owner.export("a")
    assert raw.send(copier.encode(kind(7, offset, size)), fd) == copier.Done(7, result, 0, 0, 0)
    os.close(fd)
    assert not any(node.pool.read_bytes())


@pytest.mark.parametrize("count", [0, 2, 20])
def test_a_job_needs_exactly_one_descriptor(node: Node, owner: Owner, count: int) -> None:
    raw, fd = Raw(node), owner.export("a")
    before = open_files(node)
    answer = raw.send(copier.encode(copier.Save(7, 0, 4 * MIB)), *[fd] * count)
    assert answer == copier.Done(7, Result.NO_DESCRIPTOR, 0, 0, 0)
    assert open_files(node) == before
    os.close(fd)


SAVE = copier.encode(copier.Save(7, 0, 4 * MIB))
PACKETS = [
    pytest.param(b"x" + SAVE[1:], "does not begin with the header", id="magic"),
    pytest.param(SAVE[:10], "does not begin with the header", id="short"),
    pytest.param(SAVE[:4] + b"\2" + SAVE[5:], "another version than 1", id="version"),
    pytest.param(SAVE[:6] + b"\5" + SAVE[7:], "no request", id="answer"),
    pytest.param(SAVE[:6] + b"\0" + SAVE[7:], "no request", id="type-0"),
    pytest.param(SAVE + b"\0", "length is not that of its type", id="long"),
    pytest.param(SAVE[:-8], "length is not that of its type", id="cut"),
    pytest.param(SAVE + bytes(300), "longer than any request", id="endless"),
]


@pytest.mark.parametrize(("packet", "text"), PACKETS)
def test_a_packet_that_is_no_request_changes_nothing_and_the_connection_stays(
    node: Node, owner: Owner, packet: bytes, text: str
) -> None:
    raw, fd = Raw(node), owner.export("a")
    before = open_files(node)
    answer = raw.send(packet, fd)
    assert isinstance(answer, copier.Error)
    assert answer.reason == Reason.BAD_PACKET
    assert text in answer.text
    assert open_files(node) == before
    assert isinstance(raw.send(copier.encode(copier.Status())), copier.State)
    assert not any(node.pool.read_bytes())
    os.close(fd)


def test_a_slot_of_a_job_that_is_not_answered_is_refused(node: Node, owner: Owner) -> None:
    link, fd = node.start(faults="hang cuEventRecord seconds=30"), owner.export("a")
    link.save(1, 4 * MIB, 4 * MIB, fd)
    for job, offset, size in ((2, 2 * MIB, 4 * MIB), (3, 6 * MIB, 4 * MIB), (4, 0, 16 * MIB), (5, 4 * MIB, 2 * MIB)):
        link.restore(job, offset, size, fd)
        assert done(link) == copier.Done(job, Result.SLOT_IN_USE, 0, 0, 0)
    os.close(fd)


def test_jobs_beyond_the_limit_are_refused(node: Node, owner: Owner) -> None:
    link, fd = node.start(faults="hang cuEventRecord seconds=30", pool_bytes=258 * MIB), owner.export("a")
    for job in range(copier.JOBS_LIMIT):
        (link.save if job % 2 else link.restore)(job, 2 * MIB * job, 2 * MIB, fd)
    link.unanswered.clear()  # as an arbiter that does not count
    link.save(500, 256 * MIB, 2 * MIB, fd)
    os.close(fd)
    assert link.unanswered.keys() == {500}
    assert done(link) == copier.Done(500, Result.TOO_MANY_JOBS, 0, 0, 0)


def test_a_number_that_is_not_answered_is_no_new_job(node: Node, owner: Owner) -> None:
    link, fd = node.start(faults="hang cuEventRecord seconds=30"), owner.export("a")
    link.save(1, 0, 4 * MIB, fd)
    link.unanswered.clear()
    link.save(1, 8 * MIB, 4 * MIB, fd)
    os.close(fd)
    with pytest.raises(CopierAway, match="a job of that number is not answered yet"):
        done(link)


def test_jobs_wait_for_a_pool_that_is_ready(node: Node, owner: Owner) -> None:
    process = node.run(faults="hang cuCtxCreate_v2 seconds=30")
    assert process.stderr is not None
    while "64 of 64 MiB of the pool are allocated" not in (line := process.stderr.readline()):
        assert line
    link, fd = node.link(), owner.export("a")
    link.save(1, 0, 4 * MIB, fd)
    os.close(fd)
    assert done(link) == copier.Done(1, Result.NOT_READY, 0, 0, 0)
    seen = state(link)
    assert (seen.ready, seen.allocated_bytes, seen.registered_bytes) == (False, 64 * MIB, 0)


def test_a_second_connection_is_rejected_while_one_is_served(node: Node) -> None:
    link = node.start(pool_bytes=POOL)
    second = node.link()
    with pytest.raises(CopierAway, match=r"another connection is served \(OCCUPIED\)"):
        receive(second)
    assert state(link).ready
    link.close()
    assert state(node.link()).ready


def test_the_jobs_of_a_connection_that_ended_are_forgotten(node: Node, owner: Owner) -> None:
    link = node.start(faults="hang cuEventRecord seconds=1")
    for job in range(10):
        save(link, owner, "a", job, 4 * MIB * job, 4 * MIB)
    assert state(link).ready, "it has read the jobs"
    link.close()
    again = node.link()
    while state(again).jobs:
        pass
    save(again, owner, "a", 1, 0, 4 * MIB)
    assert done(again).result == Result.COPIED
    with node.pool.open("rb") as pool:
        pool.seek(4 * MIB * 9)
        assert not any(pool.read(4 * MIB))


OTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    sys.exit("permission")
sys.stdout.buffer.write(sock.recv(512) + b"|" + sock.recv(512))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_user_than_root_is_rejected_even_if_the_socket_lets_it_in(node: Node) -> None:
    link = node.start(pool_bytes=POOL)
    link.close()
    node.folder.chmod(0o755)
    command = [sys.executable, "-c", OTHER_USER, str(node.socket)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == "permission\n"
    node.socket.chmod(0o666)
    packet, _, rest = subprocess.run(command, capture_output=True, check=True).stdout.rpartition(b"|")
    assert copier.decode(packet) == copier.Error(Reason.NOT_ALLOWED, "only root may connect")
    assert rest == b"", "the connection ends"


LISTENER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind(sys.argv[1])
sock.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_another_user_than_root_listens_at_is_no_copier(node: Node) -> None:
    node.folder.chmod(0o777)
    words = [sys.executable, "-c", LISTENER, str(node.socket)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(CopierAway, match="uid 65534 listens there, not root"):
            Copier(node.socket)
        process.communicate()


def test_where_no_copier_is_the_arbiter_is_told_so(node: Node) -> None:
    with pytest.raises(CopierAway, match="No such file"):
        Copier(node.socket)


def ticks(node: Node) -> int:
    """Of a processor that the copier has used."""
    fields = Path(f"/proc/{node.processes[-1].pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_connection_that_finds_no_descriptor_waits_and_the_copier_rests(node: Node) -> None:
    link = node.start(pool_bytes=POOL)
    pid = node.processes[-1].pid
    assert state(link).ready, "it is accepted"
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    first_free = max(int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir()) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, most))
    second = node.link()
    before = ticks(node)
    assert select.select([second.fd], [], [], 1)[0] == []
    assert ticks(node) - before < 20, "a fifth of that second"
    assert state(link).ready
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    with pytest.raises(CopierAway, match=r"another connection is served \(OCCUPIED\)"):
        receive(second)


def flood(raw: Raw) -> None:
    """Requests until the copier reads none any more, because its answers are not read."""
    raw.sock.settimeout(0.5)
    status = copier.encode(copier.Status())
    with suppress(TimeoutError):
        while True:
            raw.sock.send(status)


def test_a_connection_that_reads_no_answers_is_ended(node: Node) -> None:
    raw = Raw(node)
    flood(raw)
    poll = select.poll()
    poll.register(raw.sock, 0)
    assert poll.poll(LIMIT_S * 1000), "the connection ends"
    assert state(node.link()).ready


def test_a_copier_that_is_ended_does_not_wait_for_answers_to_be_read(node: Node) -> None:
    flood(Raw(node))
    node.processes[-1].terminate()
    assert node.processes[-1].wait(LIMIT_S) == 0
