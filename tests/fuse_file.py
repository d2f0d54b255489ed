"""A FUSE file system with one file, whose daemon stops answering once the file is open: `python -m tests.fuse_file FOLDER`.

It speaks the kernel's protocol (<linux/fuse.h>) itself, as far as one open needs it. Attributes are never valid for longer than their answer. It prints `mounted`, and each
request that it leaves unanswered. Its end ends what waits for it.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from typing import Final

INIT, LOOKUP, GETATTR, OPEN, FLUSH = 26, 1, 3, 14, 25
ROOT, FILE = 1, 2
NAME: Final = "memfd:file"
_IN: Final = struct.Struct("IIQQIIII")
_OUT: Final = struct.Struct("IiQ")
_ENOENT: Final = 2


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    return struct.pack("QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int, body: bytes) -> bytes | int:
    """The body of an answer, or an error."""
    if opcode == INIT:
        return struct.pack("IIIIHHII28x4x", 7, 31, 65536, 0, 16, 12, 65536, 1)
    if opcode == LOOKUP:
        if body.rstrip(b"\0") != NAME.encode():
            return -_ENOENT
        return struct.pack("QQQQII", FILE, 0, 1, 0, 0, 0) + _attributes(FILE)
    if opcode == GETATTR:
        return struct.pack("QII", 0, 0, 0) + _attributes(node)
    if opcode == OPEN:
        return struct.pack("QII", 1, 0, 0)
    return -38


def main(folder: str) -> None:
    """Until it is killed."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"test", folder.encode(), b"fuse", 0, options) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    opened = False
    while True:
        packet = os.read(device, 1 << 20)
        _, opcode, unique, node, *_ = _IN.unpack_from(packet)
        if opened and opcode not in (2, 18, 29, 42):  # FORGET and the like want no answer
            print(opcode, flush=True)
            continue
        answer = _answer(opcode, node, packet[_IN.size :])
        if opcode in (2, 42):
            continue
        error, body = (answer, b"") if isinstance(answer, int) else (0, answer)
        os.write(device, _OUT.pack(_OUT.size + len(body), error, unique) + body)
        opened = opened or opcode == OPEN


if __name__ == "__main__":
    main(sys.argv[1])
