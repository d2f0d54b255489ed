"""A library of before REPORT with this arbiter, packet by packet as its bytes were."""

from __future__ import annotations

import struct

from tests.unit.arbiter.conftest import MIB, ArbiterNode, a_grant
from vgpu.protocol import wire

HEADER = struct.Struct("<IHHII")
HELLO, WELCOME, LEASE, LEASED, RETURN, USAGE, CONTEXT, MEASURED = 1, 2, 3, 4, 5, 7, 9, 10


def packet(kind: int, seq: int, body: bytes) -> bytes:
    return HEADER.pack(0x52474E54, 1, kind, seq, len(body)) + body


def test_an_old_library_leases_returns_and_states_as_before(node: ArbiterNode) -> None:
    node.allocate("k", a_grant())
    node.start()
    process = node.connect()
    process.send_bytes(packet(HELLO, 0, struct.pack("<II32s", 7, 0, b"0.1.0")))
    welcome = process.sock.recv(8192)
    assert HEADER.unpack_from(welcome) == (0x52474E54, 1, WELCOME, 0, 40)
    assert struct.unpack_from("<II16sQII", welcome, 16)[0::3] == (1, 1000 * MIB)
    process.send_bytes(packet(LEASE, 5, struct.pack("<IIQQ", 0, 0, 8 * MIB, 8 * MIB)))
    assert process.sock.recv(8192) == packet(LEASED, 5, struct.pack("<IIQQ", 0, 0, 8 * MIB, 992 * MIB))
    process.send_bytes(packet(USAGE, 6, struct.pack("<IIQQ", 0, 0, 4 * MIB, 8 * MIB)))
    process.send_bytes(packet(RETURN, 7, struct.pack("<IIQ", 0, 0, 4 * MIB)))
    assert process.sock.recv(8192) == packet(LEASED, 7, struct.pack("<IIQQ", 0, 0, 0, 996 * MIB))
    process.send_bytes(packet(CONTEXT, 8, struct.pack("<IIQ", 0, 1, 0)))
    assert HEADER.unpack_from(process.sock.recv(8192))[2:4] == (LEASED, 8)
    process.send_bytes(packet(CONTEXT, 9, struct.pack("<IIQ", 0, 2, 0)))
    assert HEADER.unpack_from(process.sock.recv(8192))[2:4] == (MEASURED, 9)


def test_an_old_library_is_still_sent_what_it_does_not_use(node: ArbiterNode) -> None:
    node.allocate("k", a_grant())
    node.start()
    old, other = node.process(), node.process()
    old.lease(1000 * MIB)
    other.send(wire.Lease(0, MIB, MIB))
    seq, recall = old.receive_numbered()
    assert recall == wire.Recall(0, MIB)
    old.send_bytes(packet(RETURN, seq, struct.pack("<IIQ", 0, 0, 2 * MIB)))
    answer = other.receive()
    assert isinstance(answer, wire.Leased)
    assert not answer.refused
