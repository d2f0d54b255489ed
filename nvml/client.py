"""Query the NVML child of another program, through its server. Every call has a time limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nvml.errors import NvmlAway
from nvml.messages import MALFORMED, REPLY_BYTES, TOGETHER, AnyReply, AnyRequest, RequestPacket, decode_reply, encode
from nvml.queries import Nvml

FULL_S: Final = 0.01
"""Between two tries to connect while the socket's queue is full. Guessed."""


class NvmlClient:
    """Not for several threads: each has its own. `wait_s`: for one answer."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self._path, self._wait_s = path, wait_s
        self._sock: socket.socket | None = None
        self._number = 0

    @property
    def nvml(self) -> Nvml:
        """NVML through this client."""
        return Nvml(self)

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        """A reply for each. Raises NvmlAway."""
        try:
            parts = (requests[at : at + TOGETHER] for at in range(0, len(requests), TOGETHER))
            return [reply for part in parts for reply in self._answered(part)]
        except (TimeoutError, BlockingIOError):
            self.close()
            raise NvmlAway(f"{self._path}: no answer within {self._wait_s:g} s") from None
        except OSError as error:
            self.close()
            raise NvmlAway(f"{self._path}: {error.strerror or error}: the device plugin serves this socket") from None
        except (*MALFORMED, ValueError) as error:
            self.close()
            raise NvmlAway(f"{self._path}: what came is no answer: {str(error)[:200]}") from None

    def close(self) -> None:
        """The next request connects anew."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _answered(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        """All are sent before the first reply is read: the server reads what is there at once."""
        sock, first = self._connected(), self._number + 1
        for request in requests:
            self._number += 1
            sock.send(encode(RequestPacket(self._number, request)), socket.MSG_NOSIGNAL)
        return [self._reply(sock, number) for number in range(first, self._number + 1)]

    def _reply(self, sock: socket.socket, number: int) -> AnyReply:
        packet = sock.recv(REPLY_BYTES + 1)
        if not packet:
            raise ConnectionResetError("connection closed")
        if len(packet) > REPLY_BYTES:
            raise ValueError(f"more than {REPLY_BYTES} bytes")
        answered = decode_reply(packet)
        if answered.number != number:
            raise ValueError(f"number {answered.number}, not {number}")
        return answered.reply

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(self._wait_s)
            try:
                self._connect(sock)
            except OSError:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def _connect(self, sock: socket.socket) -> None:
        """Again while the server has not accepted those that connected before. Raises OSError, TimeoutError."""
        until_s = time.monotonic() + self._wait_s
        while True:
            try:
                sock.connect(str(self._path))
                return
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(FULL_S)
