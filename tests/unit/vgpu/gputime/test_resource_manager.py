"""The bytes that the kernel driver is sent, against its published layout."""

from __future__ import annotations

import struct

import pytest

from vgpu.gputime import resource_manager as rm


def test_a_list_has_the_published_layout() -> None:
    packed = rm.disable_parameters(0xC1D00001, [0x11, 0x22], disable=True)
    assert len(packed) == rm.PARAMETERS_BYTES == 536
    assert packed[:24] == bytes.fromhex("01000000 02000000 0000000000000000 0000000000000000")
    clients = struct.unpack_from("<64I", packed, 24)
    channels = struct.unpack_from("<64I", packed, 24 + 256)
    assert clients[:3] == (0xC1D00001, 0xC1D00001, 0)
    assert channels[:3] == (0x11, 0x22, 0)
    assert not any(clients[2:])
    assert not any(channels[2:])


def test_an_enable_differs_in_its_first_byte_only() -> None:
    disable, enable = (rm.disable_parameters(1, [2], disable=on) for on in (True, False))
    assert [at for at in range(536) if disable[at] != enable[at]] == [0]


def test_the_request_has_the_size_of_its_argument() -> None:
    argument = rm.control(1, 2, 0x7F0012345678)
    assert len(argument) == rm.CONTROL_REQUEST >> 16 & 0x3FFF
    assert rm.CONTROL_REQUEST & 0xFFFF == 0x462A, "type F, number 0x2a"
    assert bytes(argument) == struct.pack("<4IQ2I", 1, 2, 0x2080110B, 0, 0x7F0012345678, 536, 0)


def test_the_answer_is_the_last_word() -> None:
    argument = rm.control(1, 2, 3)
    argument[28:] = (0x21).to_bytes(4, "little")
    assert rm.status(argument) == 0x21


@pytest.mark.parametrize("count", [0, 65])
def test_a_list_of_no_or_too_many_channels_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} channels in a list: 1 to 64"):
        rm.disable_parameters(1, [5] * count, disable=True)
