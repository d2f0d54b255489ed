"""The copier's protocol as bytes."""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.protocol import copier

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
REQUESTS = st.one_of(
    st.builds(copier.Save, U64, U64, U64),
    st.builds(copier.Restore, U64, U64, U64),
    st.builds(copier.Forget, U64),
    st.just(copier.Status()),
)
WORDS = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=copier.ERROR_TEXT_BYTES - 1)
ANSWERS = st.one_of(
    st.builds(copier.Done, U64, st.sampled_from(copier.Result), U32, U64, U64),
    st.builds(
        copier.State,
        U64,
        U64,
        U64,
        U32,
        st.booleans(),
        st.sampled_from(copier.Pages),
        U32,
        st.none() | st.builds(copier.PoolFile, U64, st.integers(1, 2**64 - 1), U64),
    ),
    st.builds(copier.Error, st.sampled_from(copier.Reason), WORDS),
)
MESSAGES = REQUESTS | ANSWERS
HEADER = (Path(__file__).parents[4] / "shim/copier/protocol.h").read_text()


@given(MESSAGES)
def test_every_message_comes_back_as_it_went(message: copier.Message) -> None:
    packet = copier.encode(message)
    assert len(packet) <= copier.PACKET_LIMIT
    assert copier.decode(packet) == message


def test_a_state_of_an_earlier_copier_is_one_without_a_file() -> None:
    stated = copier.State(8, 8, 8, 1, True, copier.Pages.PLAIN_PAGES, 2, copier.PoolFile(1, 2, 3))
    packet = bytearray(copier.encode(stated)[: copier._HEADER.size + 40])
    struct.pack_into("<I", packet, 8, 40)
    assert copier.decode(bytes(packet)) == copier.State(8, 8, 8, 1, True, copier.Pages.PLAIN_PAGES, 2)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused_with_a_sentence(packet: bytes) -> None:
    with pytest.raises(BadDocument, match="packet"):
        copier.decode(packet)


@given(MESSAGES, st.data())
def test_a_packet_with_one_byte_changed_is_refused_or_is_another_message(
    message: copier.Message, data: st.DataObject
) -> None:
    packet = bytearray(copier.encode(message))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = copier.decode(bytes(packet))
    except BadDocument:
        return
    assert isinstance(decoded, copier.Message)


@given(MESSAGES, st.integers(1, 16))
def test_a_cut_packet_is_refused(message: copier.Message, missing: int) -> None:
    with pytest.raises(BadDocument, match="packet"):
        copier.decode(copier.encode(message)[:-missing])


@example("ä" * 100)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200))
def test_a_long_text_is_cut_between_characters(text: str) -> None:
    sent = copier.decode(copier.encode(copier.Error(copier.Reason.BAD_PACKET, text)))
    assert isinstance(sent, copier.Error)
    assert text.startswith(sent.text)
    assert sent.text == text or len(text[: len(sent.text) + 1].encode()) >= copier.ERROR_TEXT_BYTES


def test_a_packet_of_another_protocol_is_refused() -> None:
    with pytest.raises(BadDocument, match="packet begins with 0x52474e54: a copier's begins with 0x43474e54"):
        copier.decode(struct.pack("<I", 0x52474E54) + copier.encode(copier.Status())[4:])


def test_a_later_protocol_is_refused_as_newer() -> None:
    packet = bytearray(copier.encode(copier.Status()))
    struct.pack_into("<H", packet, 4, 2)
    with pytest.raises(NewerVersion, match="version 2: this Tangram speaks version 1"):
        copier.decode(bytes(packet))


@pytest.mark.parametrize(
    ("message", "at", "value", "error"),
    [
        (copier.Done(1, copier.Result.COPIED, 0, 0, 0), 24, 10, "DONE has result 10: it must be 0 to 9"),
        (copier.State(1, 1, 1, 1, True, copier.Pages.PLAIN_PAGES, 0), 44, 2, "STATE has ready 2: it must be 0 or 1"),
        (
            copier.State(1, 1, 1, 1, True, copier.Pages.PLAIN_PAGES, 0),
            48,
            4,
            "STATE has pages 4: it must be 0 to 3",
        ),
        (copier.Error(copier.Reason.OCCUPIED, "x"), 16, 0, "ERROR has reason 0: it must be 1 to 3"),
    ],
)
def test_an_unknown_number_is_refused_with_its_range(message: copier.Message, at: int, value: int, error: str) -> None:
    packet = bytearray(copier.encode(message))
    struct.pack_into("<I", packet, at, value)
    with pytest.raises(BadDocument, match=error):
        copier.decode(bytes(packet))


def in_c(name: str) -> dict[str, int]:
    """The values of one enum of the header, without the prefix."""
    (block,) = re.findall(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    return {name: int(number) for name, number in re.findall(r"COPIER_([A-Z_]+) = ([0-9]+)", block)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("copier_result", copier.Result), ("copier_reason", copier.Reason), ("copier_pages", copier.Pages)],
)
def test_the_c_header_numbers_what_is_stated_alike(name: str, kind: type[IntEnum]) -> None:
    assert in_c(name) == {member.name: member.value for member in kind}


def test_the_c_header_numbers_the_messages_alike() -> None:
    kinds = {kind.__name__.upper(): kind for kind in get_args(copier.Message)}
    numbers = in_c("copier_type")
    assert numbers.keys() == kinds.keys()
    assert {name: copier._TYPES[kind] for name, kind in kinds.items()} == numbers


def test_the_c_header_has_the_same_limits_and_sizes() -> None:
    limits = dict(re.findall(r"COPIER_([A-Z_]+) = (0x[0-9a-f]+|[0-9]+)", HEADER))
    assert int(limits["MAGIC"], 16) == copier.MAGIC
    assert int(limits["VERSION"]) == copier.VERSION
    assert int(limits["JOBS"]) == copier.JOBS_LIMIT
    assert int(limits["GRAIN"], 16) == copier.GRAIN_BYTES
    assert 1 << int(limits["LIMIT_SHIFT"]) == copier.BLOCK_LIMIT_BYTES
    assert int(limits["PACKET_LIMIT"]) == copier.PACKET_LIMIT
    sizes = {name: int(size) for name, size in re.findall(r"sizeof\(struct copier_(\w+)\) == (\d+)", HEADER)}
    assert sizes.pop("header") == copier._HEADER.size
    forms = {"job": 1, "forget": 3, "done": 5, "state": 6, "error": 7}
    assert sizes == {name: copier._BODIES[kind].size for name, kind in forms.items()}
    assert f"char text[{copier.ERROR_TEXT_BYTES}]" in HEADER
