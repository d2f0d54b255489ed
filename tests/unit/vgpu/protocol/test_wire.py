"""The arbiter's protocol as bytes."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vgpu.api.enforcement import REPORTED
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.memory.ceiling import RefusedBy
from vgpu.protocol import passing_wire, swap_wire, wire

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
GPU = st.integers(0, wire.GPUS_LIMIT - 1)
WORDS = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=31)
CHANNELS = st.lists(U32, max_size=wire.CHANNELS_LIMIT).map(tuple)
IDS = st.lists(U64, min_size=1, max_size=swap_wire.BLOCKS_LIMIT).map(tuple)
BLOCKS = st.lists(st.builds(wire.Block, U64, U64), min_size=1, max_size=swap_wire.BLOCKS_LIMIT).map(tuple)
MIBS = st.integers(1, 2**20).map(lambda pages: pages * passing_wire.PAGE_BYTES)


@st.composite
def exported(draw: st.DrawFn) -> wire.Exported:
    """Blocks, or a refusal."""
    gpu, amount, total, first = draw(GPU), draw(U64), draw(st.integers(1, 1024)), draw(st.integers(0, 1023))
    if draw(st.booleans()):
        return wire.Exported(gpu, amount, total, first, (), draw(st.sampled_from(wire.UnopenedReason)))
    blocks = tuple(draw(st.lists(MIBS, min_size=1, max_size=passing_wire.PASSED_LIMIT)))
    first = min(first, 1024 - len(blocks))
    return wire.Exported(gpu, max(amount, sum(blocks)), max(total, first + len(blocks)), first, blocks)


KEY = st.binary(min_size=wire.KEY_BYTES, max_size=wire.KEY_BYTES)
MESSAGES = st.one_of(
    st.builds(wire.Hello, U32, st.sampled_from([0, wire.FOR_GPU_TIME, wire.FOR_CONTEXT, wire.FOR_BURST]), WORDS),
    st.builds(
        wire.Welcome,
        st.lists(st.builds(wire.WelcomeGpu, st.binary(min_size=16, max_size=16), U64, U32, U32), max_size=64).map(
            tuple
        ),
        U32,
    ),
    st.builds(wire.Lease, GPU, U64, U64, st.sampled_from(wire.LeaseKind), st.integers(0, wire.WAITED_MOST_MS)),
    st.builds(wire.Leased, GPU, st.sampled_from(RefusedBy), U64, U64),
    st.builds(wire.Return, GPU, U64, st.sampled_from(wire.LeaseKind)),
    st.builds(wire.Recall, GPU, U64),
    st.builds(wire.Usage, GPU, U64, U64, U32),
    st.builds(wire.Error, U32, WORDS),
    st.builds(wire.Context, GPU, st.sampled_from(wire.Step), U64),
    st.builds(wire.Measured, GPU, st.booleans(), U64, U64),
    st.builds(wire.Processes, GPU),
    st.builds(wire.Channels, GPU, U32, U32, CHANNELS, CHANNELS, st.booleans(), st.booleans(), st.booleans()),
    st.builds(wire.Hold, GPU, st.sampled_from(wire.HoldState), st.sampled_from(wire.Space), U64, KEY),
    st.builds(wire.Drop, GPU, st.sampled_from(wire.HoldState), st.sampled_from(wire.Space), U64, KEY),
    st.builds(wire.Report, st.integers(1, wire.REASONS_LIMIT), st.booleans()),
    st.builds(wire.Burst, GPU, U64, U64),
    st.builds(wire.Swappable, GPU, st.integers(0, swap_wire.REASONS_LIMIT), U64, U64),
    st.builds(wire.SwapOut, GPU, U64),
    st.builds(wire.Blocks, GPU, BLOCKS, st.booleans()),
    *(
        st.builds(kind, GPU, IDS)
        for kind in (wire.Unmap, wire.Unmapped, wire.SwapIn, wire.Filled, wire.Discard, wire.Discarded)
    ),
    st.builds(wire.Cancel, GPU),
    st.builds(wire.Unable, GPU, st.sampled_from(wire.UnableReason)),
    st.builds(wire.Pending, GPU, U64),
    st.builds(wire.Convert, GPU, U64),
    st.builds(wire.Open, KEY),
    st.builds(wire.Export, KEY),
    exported(),
    st.builds(wire.Activity, st.sampled_from(wire.ActivityKind), U64),
    st.builds(wire.ProcessList, GPU, st.lists(st.builds(wire.ListedProcess, U32, U64), max_size=20).map(tuple)),
)


@example(7, wire.Usage(3, 40, 50, 2**32 - 1))
@given(U32, MESSAGES)
def test_every_message_comes_back_as_it_went(seq: int, message: wire.Message) -> None:
    packet = wire.encode(seq, message)
    assert len(packet) <= wire.PACKET_LIMIT
    assert wire.decode(packet) == (seq, message)


@given(st.integers(3, 2**32 - 1).filter(lambda flags: flags != wire.FOR_BURST))
def test_unknown_flags_are_rejected(flags: int) -> None:
    with pytest.raises(
        BadDocument,
        match=f"HELLO has flags {flags:#x}: they must be 0, 1 for GPU time, 2 before a context, or 4 for bursts",
    ):
        wire.decode(wire.encode(1, wire.Hello(1, flags, "x")))


@example("ä" * 100)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200))
def test_a_long_text_is_cut_between_characters(text: str) -> None:
    sent = wire.encode(0, wire.Error(1, text))[-wire.ERROR_TEXT_BYTES :].rstrip(b"\0").decode()
    assert text.startswith(sent)
    assert sent == text or len(text[: len(sent) + 1].encode()) >= wire.ERROR_TEXT_BYTES


def test_a_path_that_is_no_unicode_can_be_reported() -> None:
    assert wire.decode(wire.encode(0, wire.Error(2, "grant /x/\udcff")))[1] == wire.Error(2, "grant /x/?")


@given(st.binary(max_size=5000))
def test_any_other_bytes_are_refused_with_a_sentence(packet: bytes) -> None:
    with pytest.raises(BadDocument, match=r"packet"):
        wire.decode(packet)


@given(U32, MESSAGES, st.data())
def test_a_packet_with_one_byte_changed_is_refused_or_is_another_message(
    seq: int, message: wire.Message, data: st.DataObject
) -> None:
    packet = bytearray(wire.encode(seq, message))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        _, decoded = wire.decode(bytes(packet))
    except BadDocument:
        return
    assert isinstance(decoded, wire.Message)


def test_a_later_protocol_is_refused_as_newer() -> None:
    packet = bytearray(wire.encode(1, wire.Return(0, 5)))
    struct.pack_into("<H", packet, 4, 2)
    with pytest.raises(NewerVersion, match="version 2: this Tangram speaks version 1"):
        wire.decode(bytes(packet))


def test_a_gpu_beyond_the_most_is_refused_by_number() -> None:
    packet = bytearray(wire.encode(1, wire.Return(0, 5)))
    struct.pack_into("<I", packet, 16, 64)
    with pytest.raises(BadDocument, match="GPU 64: GPUs are 0 to 63"):
        wire.decode(bytes(packet))


def test_the_error_of_a_cut_packet_names_the_missing_bytes() -> None:
    with pytest.raises(BadDocument, match="announces a body of 24 bytes and carries 20"):
        wire.decode(wire.encode(1, wire.Lease(0, 1, 2))[:-4])


def test_the_c_header_numbers_the_messages_alike() -> None:
    header = (Path(__file__).parents[4] / "shim/src/link/wire.h").read_text()
    in_c = {name: int(number) for name, number in re.findall(r"WIRE_([A-Z_]+) = ([0-9]+)[,\n }]", header)}
    kinds = {c_name(kind): _number(kind) for kind in get_args(wire.Message)}
    assert len(kinds) == 34
    assert {name: in_c[name] for name in kinds} == kinds
    assert {step.name: in_c[step.name] for step in wire.Step} == {step.name: step.value for step in wire.Step}
    assert {what.name: in_c[what.name] for what in wire.ActivityKind} == {
        what.name: what.value for what in wire.ActivityKind
    }
    assert {held.name: in_c[held.name] for held in wire.HoldState} == {held.name: held.value for held in wire.HoldState}
    assert {space.name: in_c[space.name] for space in wire.Space} == {space.name: space.value for space in wire.Space}
    assert in_c["FOR_GPU_TIME"] == wire.FOR_GPU_TIME
    assert in_c["FOR_CONTEXT"] == wire.FOR_CONTEXT
    assert in_c["FOR_BURST"] == wire.FOR_BURST
    assert in_c["UNDERSTANDS_OPEN"] == wire.UNDERSTANDS_OPEN
    assert in_c["UNDERSTANDS_BURST"] == wire.UNDERSTANDS_BURST
    assert in_c["UNDERSTANDS_DISCARD"] == wire.UNDERSTANDS_DISCARD
    assert in_c["UNDERSTANDS_WAITED"] == wire.UNDERSTANDS_WAITED
    assert (in_c["WAITED_SHIFT"], in_c["WAITED_MOST_MS"]) == (wire.WAITED_SHIFT, wire.WAITED_MOST_MS)
    assert (in_c["SHOWS_LIMITS"], in_c["LIMITS_AT"]) == (wire.SHOWS_LIMITS, wire.LIMITS_AT)
    assert in_c["AWAY"] == wire.AWAY
    assert in_c["BLOCKS_LIMIT"] == swap_wire.BLOCKS_LIMIT
    assert f"WIRE_MORE_BLOCKS UINT32_C({swap_wire.MORE:#x})" in header
    assert {kind.name: in_c[kind.name] for kind in wire.LeaseKind} == {kind.name: kind.value for kind in wire.LeaseKind}
    assert {why.name: in_c[why.name] for why in wire.UnableReason} == {why.name: why.value for why in wire.UnableReason}
    assert [in_c["HANDLE_BYTES"], in_c["KEY_BYTES"], in_c["PASSED_LIMIT"], in_c["OPEN_BLOCKS_LIMIT"]] == [
        passing_wire.HANDLE_BYTES,
        passing_wire.KEY_BYTES,
        passing_wire.PASSED_LIMIT,
        passing_wire.BLOCKS_LIMIT,
    ]
    assert 'WIRE_HANDLE_MAGIC "TNGRIPC\\1"' in header
    assert passing_wire.HANDLE_MAGIC == b"TNGRIPC\1"
    (unopened,) = re.findall(r"enum wire_unopened_reason \{(.*?)\};", header, re.DOTALL)
    assert sorted(int(n) for n in re.findall(r" = ([0-9]+)", unopened)) == sorted(wire.UnopenedReason)
    assert in_c["GPU_TIME_AT"] == wire.GPU_TIME_AT
    assert wire.WORDS_AT + 8 == wire.GPU_TIME_AT + 24
    assert "sizeof(struct wire_gpu_time) == 24" in header
    assert in_c["UNDERSTANDS_REPORT"] == wire.UNDERSTANDS_REPORT
    (block,) = re.findall(r"enum wire_reason \{(.*?)\};", header, re.DOTALL)
    reasons = {int(number): set(name.split("_")) for name, number in re.findall(r"WIRE_([A-Z_]+) = ([0-9]+)", block)}
    assert reasons.pop(max(reasons)) == {"REASONS"}, "the number after the last"
    assert reasons == {number: set(reason.name.split("_")) for number, reason in REPORTED.items()}
    assert in_c["CHANNELS_LIMIT"] == wire.CHANNELS_LIMIT
    assert in_c["PROCESSES_LIMIT"] == wire.PROCESSES_LIMIT
    assert in_c["VERSION"] == wire.VERSION
    assert in_c["GPUS"] == wire.GPUS_LIMIT
    assert f"WIRE_MAGIC = {wire.MAGIC:#x}" in header


def c_name(kind: type[wire.Message]) -> str:
    """ProcessList -> PROCESS_LIST"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


def test_the_most_processes_fit_a_packet_and_one_more_is_refused() -> None:
    most = tuple(wire.ListedProcess(pid, 1) for pid in range(wire.PROCESSES_LIMIT))
    packet = wire.encode(1, wire.ProcessList(0, most))
    assert wire.decode(packet) == (1, wire.ProcessList(0, most))
    one_more = bytearray(packet + packet[-16:])
    struct.pack_into("<I", one_more, 12, len(one_more) - 16)
    struct.pack_into("<I", one_more, 20, wire.PROCESSES_LIMIT + 1)
    with pytest.raises(BadDocument, match="PROCESS_LIST of 1025 processes"):
        wire.decode(bytes(one_more))


@pytest.mark.parametrize(("at", "value"), [(16, 0), (16, 32), (20, 2)])
def test_a_report_of_no_reason_or_of_another_activity_is_refused_by_number(at: int, value: int) -> None:
    packet = bytearray(wire.encode(1, wire.Report(1, True)))
    struct.pack_into("<I", packet, at, value)
    with pytest.raises(BadDocument, match=r"REPORT of reason [0-9]+, active [0-9]+: 1 to 31, and 0 or 1"):
        wire.decode(bytes(packet))


@pytest.mark.parametrize("step", [0, 6, 2**32 - 1])
def test_an_unknown_step_is_refused_by_number(step: int) -> None:
    packet = bytearray(wire.encode(1, wire.Context(0, wire.Step.BEGIN, 0)))
    struct.pack_into("<I", packet, 20, step)
    with pytest.raises(BadDocument, match=f"CONTEXT has step {step}: steps are 1 to 5"):
        wire.decode(bytes(packet))


@pytest.mark.parametrize(
    ("at", "value", "error"), [(20, 4, "state 4: it must be 1 to 3"), (24, 0, "of kind 0: kinds are 1 to 2")]
)
def test_unknown_states_and_key_types_are_rejected(at: int, value: int, error: str) -> None:
    packet = bytearray(wire.encode(1, wire.Hold(0, wire.HoldState.MADE, wire.Space.IPC, 5, bytes(wire.KEY_BYTES))))
    struct.pack_into("<I", packet, at, value)
    with pytest.raises(BadDocument, match=error):
        wire.decode(bytes(packet))


@pytest.mark.parametrize("message", [wire.Unmap(0, (5,)), wire.Filled(0, (5,)), wire.Blocks(0, (wire.Block(5, 6),))])
@pytest.mark.parametrize("count", [0, 65, 2**31 - 1])
def test_a_list_of_no_blocks_or_of_too_many_is_refused_by_number(message: wire.Message, count: int) -> None:
    packet = bytearray(wire.encode(1, message))
    struct.pack_into("<I", packet, 20, count)
    with pytest.raises(BadDocument, match=rf"names {count} blocks: 1 to 64|packet BLOCKS has a body of 24 bytes"):
        wire.decode(bytes(packet))


def test_a_list_of_blocks_has_the_size_of_its_count() -> None:
    packet = bytearray(wire.encode(1, wire.Blocks(0, (wire.Block(5, 6), wire.Block(7, 8)), more=True)))
    struct.pack_into("<I", packet, 20, swap_wire.MORE | 1)
    with pytest.raises(BadDocument, match="packet BLOCKS has a body of 40 bytes: it must be 24"):
        wire.decode(bytes(packet))


@pytest.mark.parametrize(
    ("message", "value", "error"),
    [
        (wire.Lease(0, 1, 2), 2, "LEASE or RETURN is of kind 2: 0 resident or 1 elastic"),
        (wire.Return(0, 1), 2, "LEASE or RETURN is of kind 2: 0 resident or 1 elastic"),
        (wire.Swappable(0, 0, 1, 1), 32, "SWAPPABLE has reason 32: 0 to 31"),
        (wire.Unable(0, wire.UnableReason.DRIVER), 0, "UNABLE has reason 0: 1 to 4"),
        (wire.Unable(0, wire.UnableReason.DRIVER), 5, "UNABLE has reason 5: 1 to 4"),
    ],
)
def test_unknown_kinds_and_reasons_of_elastic_memory_are_refused_by_number(
    message: wire.Message, value: int, error: str
) -> None:
    packet = bytearray(wire.encode(1, message))
    struct.pack_into("<I", packet, 20, value)
    with pytest.raises(BadDocument, match=error):
        wire.decode(bytes(packet))


def _number(kind: type[wire.Message]) -> int:
    values: dict[str, object] = {
        "gpus": (), "processes": (), "library_version": "", "text": "", "refused": False, "known": False,
        "step": wire.Step.BEGIN, "held": wire.HoldState.MADE, "space": wire.Space.IPC, "key": bytes(wire.KEY_BYTES),
        "compute": (), "copy": (), "active": False, "kind": wire.LeaseKind.RESIDENT, "ids": (), "blocks": (), "more": False,
        "handle": bytes(64),
    }  # fmt: skip
    made: Any = kind
    message = made(**{name: values.get(name, 1 if name == "reason" else 0) for name in kind.__dataclass_fields__})
    return int(struct.unpack_from("<H", wire.encode(0, message), 6)[0])
