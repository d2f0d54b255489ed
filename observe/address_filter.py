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

FILTERED_MOST: Final = 448
"""Addresses. The kernel takes programs of 4,096 instructions (BPF_MAXINSNS), and an IPv6 address has nine."""

_INSTRUCTION: Final = struct.Struct("=HBBI")
"""struct sock_filter of <linux/filter.h>: code, jump if true, jump if false, operand."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT = 0x30, 0x20, 0x74
_LOAD_KEPT, _KEEP = 0x60, 0x02
_JUMP, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x05, 0x15, 0x45, 0x06
_IP_HEADER: Final = 0xFFF00000
"""SKF_NET_OFF: offsets from it are into the IP header, others into TCP's."""
_FLAGS, _SYN = 13, 0x02
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_DROP, _PASS = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)

Instruction = tuple[int, int, int, int]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def source_of(address: str) -> str:
    """What counts as one client: an address, in one form. Other text is its own. A prefix of IPv6 is no client: all pods of a node have one /64, often with the
    address from which the kubelet probes them, and all nodes of a subnet another, with the API server's."""
    if ":" not in address:
        return address
    try:
        parsed: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


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
            for number, word in enumerate(struct.unpack(">4I", parsed.packed)):
                otherwise = 7 - 2 * number  # past the other words and the drop
                six += [(_LOAD_KEPT, 0, 0, number), (_JUMP_EQUAL, 0, otherwise, word)]
            six.append(_DROP)
    kept = [  # once: what the kernel makes of a load from the packet is several times as large as of another
        one
        for number in range(4)
        for one in ((_LOAD_WORD, 0, 0, _IP_HEADER + _IPV6_SOURCE + 4 * number), (_KEEP, 0, 0, number))
    ]
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
        *kept,
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
