"""Drops the first packets of new connections from some addresses, in the kernel: a flood's connections then cost this process nothing.

A classic BPF program on the listening socket (SO_ATTACH_FILTER, which needs no privilege) sees the packets that begin a connection. It drops those of the
given addresses; such a client tries again after 1 s, 3 s and 7 s. Open connections and handshakes under way are not touched, and an accepted socket inherits a program
that lets all its packets pass. Which addresses those are, `connection_rates` decides.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable
from typing import Final

SO_ATTACH_FILTER: Final = 26
SO_DETACH_FILTER: Final = 27
"""<asm-generic/socket.h>"""

FILTERED_MOST: Final = 512
"""Addresses. The kernel takes programs of 4,096 instructions (BPF_MAXINSNS), and an IPv6 prefix has five."""

_INSTRUCTION: Final = struct.Struct("=HBBI")
"""struct sock_filter of <linux/filter.h>: code, jump if true, jump if false, operand."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT = 0x30, 0x20, 0x74
_JUMP, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x05, 0x15, 0x45, 0x06
_IP_HEADER: Final = 0xFFF00000
"""SKF_NET_OFF: offsets from it are into the IP header, others into TCP's."""
_FLAGS, _SYN = 13, 0x02
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_DROP, _PASS = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)

Instruction = tuple[int, int, int, int]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def source_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 address, as one host has all of that. Other text is its own."""
    if ":" not in address:
        return address
    try:
        parsed: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.IPv6Address(int(parsed) >> 64 << 64))
        parsed = parsed.ipv4_mapped
    return str(parsed)


def program(sources: Iterable[str]) -> bytes:
    """The instructions that drop SYN packets of these sources (as `source_of` has them) and pass everything else. Sources that are no addresses pass."""
    four: list[Instruction] = []
    six: list[Instruction] = []
    for source in sources:
        try:
            parsed: Address = ipaddress.ip_address(source)
        except ValueError:
            continue
        if isinstance(parsed, ipaddress.IPv4Address):
            four += [(_JUMP_EQUAL, 0, 1, int(parsed)), _DROP]
        else:
            high, low = int(parsed) >> 96, int(parsed) >> 64 & 0xFFFFFFFF
            six += [(_LOAD_WORD, 0, 0, _IP_HEADER + _IPV6_SOURCE), (_JUMP_EQUAL, 0, 3, high)]
            six += [(_LOAD_WORD, 0, 0, _IP_HEADER + _IPV6_SOURCE + 4), (_JUMP_EQUAL, 0, 1, low), _DROP]
    code: list[Instruction] = [
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_JUMP_ANY_BIT, 1, 0, _SYN),
        _PASS,
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, 4),
        (_JUMP, 0, 0, len(four) + 2),  # the load and the end of the part for IPv4
        (_LOAD_WORD, 0, 0, _IP_HEADER + _IPV4_SOURCE),
        *four,
        _PASS,
        *six,
        _PASS,
    ]
    return b"".join(_INSTRUCTION.pack(*one) for one in code)


def attach(sock: socket.socket, sources: Iterable[str]) -> None:
    """From now on new connections of these sources are dropped, and no others. Raises OSError."""
    code = program(sources)
    kept = ctypes.create_string_buffer(code, len(code))
    pointer = struct.pack("@HP", len(code) // _INSTRUCTION.size, ctypes.addressof(kept))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, pointer)


def detach(sock: socket.socket) -> None:
    """Drop nothing. Raises OSError where nothing was attached."""
    sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
