"""The arbiter's end of a copier's connection, whatever the other end does."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.swap.copier import Copier, CopierAway
from vgpu.api.errors import Refused
from vgpu.protocol import copier
from vgpu.protocol.copier import Done, Error, Pages, Reason, Restore, Result, Save, State, Status

MIB = 2**20


class Pair:
    """A link, and the socket that it leads to."""

    def __init__(self, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(folder / "s"))
            listener.listen()
            self.link = Copier(folder / "s")
            self.theirs, _ = listener.accept()
        self.block_fd = os.memfd_create("block")

    def answer(self, message: copier.Message) -> None:
        self.theirs.send(copier.encode(message))

    def close(self) -> None:
        self.link.close()
        self.theirs.close()
        os.close(self.block_fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="copier-"))
    made = Pair(folder)
    yield made
    made.close()
    shutil.rmtree(folder)


def test_a_job_goes_with_its_descriptor_and_is_unanswered_until_its_done(pair: Pair) -> None:
    pair.link.save(7, 4 * MIB, 2 * MIB, pair.block_fd)
    pair.link.restore(8, 8 * MIB, 2 * MIB, pair.block_fd)
    for job in (Save(7, 4 * MIB, 2 * MIB), Restore(8, 8 * MIB, 2 * MIB)):
        packet, (fd,), _, _ = socket.recv_fds(pair.theirs, 512, 2)
        assert copier.decode(packet) == job
        assert os.fstat(fd).st_ino == os.fstat(pair.block_fd).st_ino
        os.close(fd)
    assert pair.link.unanswered.keys() == {7, 8}
    assert pair.link.room == copier.JOBS_LIMIT - 2
    pair.answer(Done(7, Result.COPIED, 0, 2 * MIB, 40))
    assert pair.link.receive() == Done(7, Result.COPIED, 0, 2 * MIB, 40)
    assert pair.link.receive() is None
    assert pair.link.unanswered.keys() == {8}


def test_state_and_forget_have_no_descriptor(pair: Pair) -> None:
    pair.link.request_state()
    pair.link.forget(3)
    assert socket.recv_fds(pair.theirs, 512, 1)[:2] == (copier.encode(Status()), [])
    assert socket.recv_fds(pair.theirs, 512, 1)[:2] == (copier.encode(copier.Forget(3)), [])
    said = State(4 * MIB, 4 * MIB, 0, 300, False, Pages.HUGETLB_PAGES, 0)
    pair.answer(said)
    assert pair.link.receive() == said


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (copier.encode(Done(9, Result.COPIED, 0, 0, 0)), "answered job 9, which it was not given"),
        (copier.encode(Error(Reason.OCCUPIED, "busy")), r"rejects this arbiter: busy \(OCCUPIED\)"),
        (copier.encode(Status()), "sent a request: Status"),
        (b"x" * 40, "answer cannot be read: packet begins with 0x78787878"),
        (b"x" * 5000, "answer cannot be read"),
    ],
)
def test_a_copier_that_answers_what_it_may_not_is_away(pair: Pair, answer: bytes, error: str) -> None:
    pair.theirs.send(answer)
    with pytest.raises(CopierAway, match=error):
        pair.link.receive()


def test_answers_that_came_before_the_end_are_read_and_what_is_left_is_counted(pair: Pair) -> None:
    for job in (1, 2):
        pair.link.save(job, 0, 2 * MIB, pair.block_fd)
        _, (fd,), _, _ = socket.recv_fds(pair.theirs, 512, 2)
        os.close(fd)
    pair.answer(Done(1, Result.COPIED, 0, 2 * MIB, 1))
    pair.theirs.close()
    assert pair.link.receive() == Done(1, Result.COPIED, 0, 2 * MIB, 1)
    with pytest.raises(CopierAway, match="ended with 1 jobs not answered"):
        pair.link.receive()
    with pytest.raises(CopierAway, match="cannot be sent a request"):
        pair.link.save(3, 0, 2 * MIB, pair.block_fd)
    assert pair.link.unanswered.keys() == {2}


def request_states(link: Copier, count: int) -> None:
    for _ in range(count):
        link.request_state()


def test_a_copier_that_does_not_read_is_away_and_never_waited_for(pair: Pair) -> None:
    with pytest.raises(CopierAway, match="cannot be sent a request"):
        request_states(pair.link, 100_000)


def test_all_jobs_that_it_takes_fit_its_socket(pair: Pair) -> None:
    for job in range(copier.JOBS_LIMIT):
        pair.link.save(job, 2 * MIB * job, 2 * MIB, pair.block_fd)
    assert pair.link.room == 0
    with pytest.raises(Refused, match="job 128: the copier has 128 jobs that are not answered"):
        pair.link.save(128, 0, 2 * MIB, pair.block_fd)
    pair.link.unanswered.clear()
    pair.link.unanswered[5] = Save(5, 0, 2 * MIB)
    with pytest.raises(Refused, match="job 5 is not answered yet"):
        pair.link.restore(5, 0, 2 * MIB, pair.block_fd)


def test_no_copier_is_away(tmp_path: Path) -> None:
    with pytest.raises(CopierAway, match="No such file or directory"):
        Copier(tmp_path / "none")
