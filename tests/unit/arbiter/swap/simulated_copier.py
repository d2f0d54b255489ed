"""A simulated copier, which takes one step at a time, and the connection to it. A block of the GPU is a file whose first 8 bytes are its content."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from arbiter.swap.copier import CopierAway
from vgpu.protocol import copier

GRAIN = 2 * 2**20
"""Bytes of the smallest block."""
TOKEN = struct.Struct("<Q")
"""The content of a block."""


class SimulatedCopier:
    """The program: it outlives connections, and `pool` outlives it. Jobs end one at a time, by `step`."""

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.pool: dict[int, int] = {}
        """Grain -> content."""
        self.file: copier.PoolFile | None = copier.PoolFile(1, 1, 1)
        self.there = self.ready = True
        self.context_mib = 0
        self.silent = False
        self.link: CopierLink | None = None
        self.forgotten: set[int] = set()
        self.orphans: set[int] = set()
        """id() of the jobs of an ended connection: they are answered to nobody."""
        self.fail_next = 0
        self.jobs: list[tuple[copier.Save | copier.Restore, int]] = []

    def connect(self, _: Path) -> Any:
        if not self.there or self.link is not None:
            raise CopierAway("no copier")
        self.link = CopierLink(self)
        return self.link

    def kill(self) -> None:
        """The copies in progress end half done."""
        self.there = False
        for job, fd in self.jobs:
            self._spoil(job, fd)
        self.jobs.clear()
        if self.link is not None:
            self.link.lose()

    def lose_pool(self) -> None:
        """Its file is removed. The next copier makes another."""
        self.kill()
        self.pool.clear()
        assert self.file is not None
        self.file = copier.PoolFile(1, self.file.inode, self.file.born_ns + 1)

    def disconnected(self) -> None:
        """The arbiter ended; the copies in progress go on until their step."""
        self.link = None
        self.forgotten.update(job.job for job, _ in self.jobs)
        self.orphans.update(id(job) for job, _ in self.jobs)

    def step(self) -> bool:
        """One job ends."""
        if not self.jobs:
            return False
        job, fd = self.jobs.pop(0)
        result = copier.Result.COPIED
        answers = id(job) not in self.orphans
        if job.job in self.forgotten:
            self._spoil(job, fd)
            result = copier.Result.FORGOTTEN
            self.forgotten.discard(job.job)
            self.orphans.discard(id(job))
        elif self.fail_next:
            self.fail_next -= 1
            self._spoil(job, fd)
            result = copier.Result.DRIVER_FAILED
        else:
            self._copy(job, fd)
            os.close(fd)
        if self.link is not None and answers:
            self.link.answer(copier.Done(job.job, result, 0, job.bytes if not result else 0, 1))
        return True

    def _copy(self, job: copier.Save | copier.Restore, fd: int) -> None:
        grains = range(job.slot_offset // GRAIN, (job.slot_offset + job.bytes) // GRAIN)
        if isinstance(job, copier.Save):
            content = TOKEN.unpack(os.pread(fd, 8, 0))[0]
            self.pool.update(dict.fromkeys(grains, content))
        else:
            contents = {self.pool.get(grain, 0) for grain in grains}
            assert len(contents) == 1, f"a slot of several contents: {contents}"
            os.pwrite(fd, TOKEN.pack(contents.pop()), 0)

    def _spoil(self, job: copier.Save | copier.Restore, fd: int) -> None:
        if isinstance(job, copier.Save):
            self.pool[job.slot_offset // GRAIN] = 1
        else:
            os.pwrite(fd, TOKEN.pack(1), 0)
        os.close(fd)


class CopierLink:
    """What `arbiter.swap.copier.Copier` is to the node."""

    def __init__(self, copier_: SimulatedCopier) -> None:
        self.unanswered: dict[int, copier.Save | copier.Restore] = {}
        self._copier: SimulatedCopier | None = copier_
        self._answers: list[copier.Done | copier.State] = []
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def room(self) -> int:
        return copier.JOBS_LIMIT - len(self.unanswered)

    def save(self, job: int, slot_offset: int, size_bytes: int, block_fd: int) -> None:
        self._begin(copier.Save(job, slot_offset, size_bytes), block_fd)

    def restore(self, job: int, slot_offset: int, size_bytes: int, block_fd: int) -> None:
        self._begin(copier.Restore(job, slot_offset, size_bytes), block_fd)

    def forget(self, job: int) -> None:
        program = self._there()
        program.forgotten.update(one.job for one, _ in program.jobs if one.job == job)

    def request_state(self) -> None:
        program = self._there()
        if not program.silent:
            size = program.pool_bytes
            jobs = len(program.jobs)
            self.answer(
                copier.State(
                    size, size, size, program.context_mib, program.ready, copier.Pages.PLAIN_PAGES, jobs, program.file
                )
            )

    def receive(self) -> copier.Done | copier.State | None:
        if self._answers:
            answer = self._answers.pop(0)
            if isinstance(answer, copier.Done):
                del self.unanswered[answer.job]
            return answer
        if self._copier is None:
            raise CopierAway("the copier ended")
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return None

    def close(self) -> None:
        if self._copier is not None:
            self._copier.disconnected()
        self._copier = None
        os.close(self.fd)

    def lose(self) -> None:
        assert self._copier is not None
        self._copier.link = None
        self._copier = None
        os.eventfd_write(self.fd, 1)

    def answer(self, answer: copier.Done | copier.State) -> None:
        self._answers.append(answer)
        os.eventfd_write(self.fd, 1)

    def _there(self) -> SimulatedCopier:
        if self._copier is None:
            raise CopierAway("the copier ended")
        return self._copier

    def _begin(self, job: copier.Save | copier.Restore, fd: int) -> None:
        program = self._there()
        ours = range(job.slot_offset, job.slot_offset + job.bytes)
        for other, _ in program.jobs:
            theirs = range(other.slot_offset, other.slot_offset + other.bytes)
            assert ours.stop <= theirs.start or theirs.stop <= ours.start, "two jobs for one slot"
        program.jobs.append((job, os.dup(fd)))
        self.unanswered[job.job] = job
