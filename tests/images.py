"""The least images of GPU modules that say what a test needs: cubins and fatbins with variables."""

from __future__ import annotations

import struct


def cubin(**variables: int) -> bytes:
    """The least ELF that has these variables, of so many bytes, in .nv.global."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in variables)
    sections = b"\0.nv.global\0.symtab\0.strtab\0"
    symbols, at = bytes(24), 0
    for name, size in variables.items():
        symbols += struct.pack("<IBBHQQ", names.index(name.encode()), 0x11, 0, 1, at, size)
        at += size
    body = names + sections
    body += bytes(-len(body) % 8)
    start = 64 + len(body)
    table = bytes(64)
    table += struct.pack("<IIQQQQIIQQ", 1, 8, 3, 0, 0, at, 0, 0, 4, 0)
    table += struct.pack("<IIQQQQIIQQ", 12, 2, 0, 0, start, len(symbols), 3, 0, 8, 24)
    table += struct.pack("<IIQQQQIIQQ", 20, 3, 0, 0, 64, len(names), 0, 0, 1, 0)
    table += struct.pack("<IIQQQQIIQQ", 20, 3, 0, 0, 64 + len(names), len(sections), 0, 0, 1, 0)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, start + len(symbols), 0, 64, 0, 0, 64, 5, 4)
    return head + body + symbols + table


PTX, CUBIN = 1, 2


def part(kind: int, architecture: int, data: bytes, flags: int = 0, whole: int = 0) -> bytes:
    """A fatbin's part, for an architecture, 75 is sm_75. Compressed: the way as a flag, and how many bytes it had before."""
    packed = len(data) if flags else 0
    data += bytes(-len(data) % 8)
    head = struct.pack("<HHIQ4I", kind, 0x101, 64, len(data), packed, 0, 0, architecture)
    return head + bytes(8) + struct.pack("<QQQ", flags, 0, whole) + data


def fatbin(*parts: bytes | tuple[int, int, bytes]) -> bytes:
    """Parts, or the kind, architecture and content of each."""
    body = b"".join(one if isinstance(one, bytes) else part(*one) for one in parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
