"""The connection to the copier of one GPU, which saves blocks of GPU memory to its pool and restores them.

It passes requests and answers on, and decides nothing. A job without a DONE counts as not done: after the copier has ended, a slot that was being saved
has old or new content or some of both, and one whose DONE came has what was saved, also for the next copier (docs/reference/copier.md).
"""

from __future__ import annotations

import array
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from vgpu.api.errors import BadDocument, Refused
from vgpu.protocol import copier

_CREDENTIALS: Final = struct.Struct("3i")


class CopierAway(Exception):
    """It does not serve this arbiter, or no longer. Its jobs count as not done."""


class Copier:
    """One connection. Nothing here waits, and every method but `close` may raise CopierAway: then close it."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises CopierAway."""
        self.unanswered: dict[int, copier.Save | copier.Restore] = {}
        """Jobs without a DONE, by number."""
        self.pid = 0
        """Of the copier, on the host."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        try:
            self._sock.connect(str(path))
            self.pid, uid, _ = _CREDENTIALS.unpack(
                self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
        except OSError as error:
            self.close()
            raise CopierAway(f"copier at {path}: {error}") from None
        if uid not in (0, os.geteuid()):
            self.close()
            raise CopierAway(f"copier at {path}: uid {uid} listens there, not root")

    @property
    def fd(self) -> int:
        """Readable when there is an answer, or when the connection has ended."""
        return self._sock.fileno()

    @property
    def room(self) -> int:
        """How many further jobs it takes now."""
        return copier.JOBS_LIMIT - len(self.unanswered)

    def save(self, job: int, slot_offset: int, size_bytes: int, block_fd: int) -> None:
        """Copy a block to a slot. The descriptor stays the caller's. Raises Refused if there is no room, or a job of that number is not answered."""
        self._begin(copier.Save(job, slot_offset, size_bytes), block_fd)

    def restore(self, job: int, slot_offset: int, size_bytes: int, block_fd: int) -> None:
        """Copy a slot to a block; otherwise as `save`."""
        self._begin(copier.Restore(job, slot_offset, size_bytes), block_fd)

    def forget(self, job: int) -> None:
        """End a job early. Its DONE comes as ever, with FORGOTTEN if it was not complete."""
        self._send(copier.Forget(job))

    def request_state(self) -> None:
        """Its answer is a State."""
        self._send(copier.Status())

    def receive(self) -> copier.Done | copier.State | None:
        """The next answer; None if there is none now."""
        try:
            packet = self._sock.recv(copier.PACKET_LIMIT + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise CopierAway(f"the copier cannot be read: {error}") from None
        if not packet:
            raise CopierAway(f"the copier ended with {len(self.unanswered)} jobs not answered")
        try:
            answer = copier.decode(packet)
        except BadDocument as error:
            raise CopierAway(f"the copier's answer cannot be read: {error}") from None
        match answer:
            case copier.Done():
                if self.unanswered.pop(answer.job, None) is None:
                    raise CopierAway(f"the copier answered job {answer.job}, which it was not given")
                return answer
            case copier.State():
                return answer
            case copier.Error():
                raise CopierAway(f"the copier rejects this arbiter: {answer.text} ({answer.reason.name})")
            case _:
                raise CopierAway(f"the copier sent a request: {type(answer).__name__}")

    def close(self) -> None:
        """The copier forgets the jobs that are not answered."""
        with suppress(OSError):
            self._sock.close()

    def _begin(self, job: copier.Save | copier.Restore, block_fd: int) -> None:
        if job.job in self.unanswered:
            raise Refused(f"job {job.job} is not answered yet: a job needs a number of its own")
        if self.room == 0:
            raise Refused(f"job {job.job}: the copier has {copier.JOBS_LIMIT} jobs that are not answered")
        self._send(job, block_fd)
        self.unanswered[job.job] = job

    def _send(self, message: copier.Request, fd: int | None = None) -> None:
        passed = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._sock.sendmsg([copier.encode(message)], passed, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise CopierAway(f"the copier cannot be sent a request: {error}") from None
