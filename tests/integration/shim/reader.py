"""The library's reading of images, called from Python: shim/tests/images.c."""

from __future__ import annotations

import struct
import subprocess
from typing import IO, NamedTuple, cast

from tests.built import shim_build


class Needs(NamedTuple):
    """What the library reads from an image. Bytes, but for the last two."""

    variables: int
    code: int
    function: int
    known: int
    heap: int


class Reader:
    """The library's own readers, in a process: one that reads too far dies, with a report under the sanitizers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [shim_build() / "tests" / "images"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._in, self._out = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def request(self, how: bytes, number: int, data: bytes) -> None:
        """One request; the caller reads the answer."""
        self._in.write(how + struct.pack("=QQ", number, len(data)) + data)
        self._in.flush()

    def take(self, length: int) -> bytes:
        """So many bytes of the answer."""
        answer = self._out.read(length)
        assert len(answer) == length, f"the reader ended: {self.process.wait()}"
        return answer

    def unpack(self, how: bytes, data: bytes, capacity: int) -> bytes:
        """The unpacked data, nothing where the data is damaged."""
        self.request(how, capacity, data)
        return self.take(*struct.unpack("=Q", self.take(8)))

    def end(self) -> None:
        """It ends with its input."""
        self._in.close()

    def needs(self, image: bytes, capability: int = 90) -> Needs:
        """What a module of this image takes on such a GPU."""
        self.request(b"i", capability, image)
        return Needs(*struct.unpack("=5Q", self.take(40)))
