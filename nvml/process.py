"""One child as a process: start it, exchange packets with it within a time, end it. Independent of NVML; its callers decide when."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from nvml.messages import ENOUGH_BYTES, REPLY_BYTES

COMMAND: Final = (sys.executable, "-P", "-m", "nvml")
PACKET_BYTES: Final = ENOUGH_BYTES + REPLY_BYTES
"""The largest that a child sends."""
END_S: Final = 2.0
"""A killed process ends within milliseconds, one whose GPUs are closed with it within some hundred. Guessed."""


class Ended(Exception):
    """The child ended or closed its socket; the text describes how."""


class Wake:
    """Interrupts a waiting thread, from any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def rang(self) -> None:
        """Be silent until it rings again."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def wait(self, seconds: float) -> None:
        """Until it rings, at most so long."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(seconds * 1000)
        self.rang()

    def close(self) -> None:
        os.close(self.fd)


class Child:
    """A started child. Raises OSError when it cannot be started."""

    def __init__(self, command: Sequence[str] = COMMAND, env: Mapping[str, str] | None = None) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._answered: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reported = False
        """Has it got that number?"""
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=env
            )
        except OSError:
            self._close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, packet: bytes) -> None:
        """Raises Ended; also when its buffer is full, which a child that answers each request never lets happen."""
        self.answered()
        try:
            if self._reported or self._answered is None:
                self._sock.send(packet, socket.MSG_NOSIGNAL)
            else:
                socket.send_fds(self._sock, [packet], [self._answered], socket.MSG_NOSIGNAL)
            self._reported = True
        except OSError as error:
            raise Ended(self._how(str(error))) from None

    def answered(self) -> int:
        """How many requests it has answered since the last call of this, or since the last `send`; their answers may be on their way still."""
        try:
            return os.eventfd_read(self._answered) if self._answered is not None else 0
        except BlockingIOError:
            return 0

    def receive(self, until_s: float, wake: Wake | None = None) -> bytes | None:
        """The next packet; None when there is none by then (time.monotonic), or when `wake` rang. Raises Ended."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if wake is not None:
            poll.register(wake.fd, select.POLLIN)
        ready = dict(poll.poll(max(0.0, until_s - time.monotonic()) * 1000))
        if wake is not None and wake.fd in ready:
            wake.rang()
        if self._sock.fileno() not in ready:
            return None
        try:
            packet = self._sock.recv(PACKET_BYTES + 1)
        except OSError as error:
            raise Ended(self._how(str(error))) from None
        if not packet:
            raise Ended(self._how("it closed its socket"))
        return packet

    def kill(self, wait_s: float = END_S) -> bool:
        """End it. Returns whether it has ended: one in an uninterruptible sleep of the driver does not."""
        self._close()
        self._process.kill()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> bool:
        """Has one that was killed ended by now?"""
        return self._process.poll() is not None

    def _close(self) -> None:
        self._sock.close()
        if self._answered is not None:
            os.close(self._answered)
        self._answered = None

    def _how(self, otherwise: str) -> str:
        try:
            code = self._process.wait(END_S / 10)
        except subprocess.TimeoutExpired:
            return otherwise
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"status {code}"
