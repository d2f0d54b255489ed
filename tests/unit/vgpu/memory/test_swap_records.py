"""Records of blocks in a host pool, as a file that a crash or a bad disk may have damaged."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.sealed import seal
from vgpu.memory.swap_records import Key, PoolRecords, Stage, SwapRecord, change_to_bytes, from_bytes, joined

GRAIN = 2 * 2**20
GPU, BOOT, POOL = "GPU-1", "b-1", "1:2:3"
STAGES: tuple[Stage, ...] = ("away", "made", "filled")


def record(block: int, at: int, grains: int = 1, stage: Stage = "away") -> SwapRecord:
    return SwapRecord("grant", 7, 99, block, grains * GRAIN, at * GRAIN, stage)


def read(content: bytes, gpu: str = GPU, boot_id: str = BOOT) -> list[SwapRecord]:
    found = from_bytes(content, gpu=gpu, boot_id=boot_id)
    assert found.pool == (POOL if found.records else found.pool)
    return list(found.records)


def written(*records: SwapRecord) -> bytes:
    return joined(map(msgspec.json.encode, records), gpu=GPU, boot_id=BOOT, pool=POOL)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.sampled_from(STAGES)), max_size=20))
def test_what_is_written_is_read(blocks: list[tuple[int, int, Stage]]) -> None:
    made, at = [], 0
    for number, (gap, grains, stage) in enumerate(blocks):
        made.append(record(number, at + gap, grains, stage))
        at += gap + grains
    assert read(written(*made)) == made


def test_records_of_another_boot_are_none() -> None:
    assert read(written(record(1, 0)), boot_id="b-2") == []
    encoded = [msgspec.json.encode(record(1, 0))]
    assert from_bytes(joined(encoded, gpu=GPU, boot_id="", pool=POOL), gpu=GPU, boot_id="") == PoolRecords()


@given(st.data())
def test_no_changed_byte_is_read_as_other_records(data: st.DataObject) -> None:
    content, records = written(record(1, 0), record(2, 4)), [record(1, 0), record(2, 4)]
    at = data.draw(st.integers(0, len(content) - 1))
    changed = content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
    try:
        assert read(changed) == records
    except BadDocument:
        assert changed != content


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_a_file_that_was_cut_is_no_file(cut: int) -> None:
    with pytest.raises(BadDocument, match="no records"):
        read(written(record(1, 0))[:cut])


Change = tuple[list[int], list[tuple[int, Stage]]]
"""Blocks whose records end, and then blocks with new records. Each block has a slot of its own."""
blocks = st.integers(0, 5)
changes = st.lists(
    st.tuples(st.lists(blocks, max_size=3), st.lists(st.tuples(blocks, st.sampled_from(STAGES)), max_size=3)),
    max_size=5,
)


def line(change: Change) -> bytes:
    drop: list[Key] = [(7, 99, block) for block in change[0]]
    return change_to_bytes(drop, [record(block, block, stage=stage) for block, stage in change[1]])


@given(st.sets(blocks), changes, st.data())
def test_a_file_that_ends_anywhere_has_what_was_written_before(
    first: set[int], steps: list[Change], data: st.DataObject
) -> None:
    content, stages = written(*(record(block, block) for block in first)), dict.fromkeys(first, "away")
    ends = [(len(content), dict(stages))]
    for change in steps:
        content += line(change)
        for block in change[0]:
            stages.pop(block, None)
        stages.update(change[1])
        ends.append((len(content), dict(stages)))
    cut = data.draw(st.integers(ends[0][0], len(content)))
    expected = [state for at, state in ends if at <= cut][-1]
    assert {one.block: one.stage for one in read(content[:cut])} == expected


@given(st.data())
def test_a_changed_byte_before_the_last_line_is_noticed(data: st.DataObject) -> None:
    change: Change = ([1], [(2, "filled")])
    first = written(record(1, 1)) + line(change)
    content = first + line(([2], []))
    at = data.draw(st.integers(0, len(first) - 1))
    changed = content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
    try:
        assert read(changed) == []
    except BadDocument:
        assert changed != content


def test_slots_and_the_pool_are_checked_after_all_changes() -> None:
    other = change_to_bytes([], [record(2, 0)])
    with pytest.raises(BadDocument, match="is used twice"):
        read(written(record(1, 0)) + other)
    assert read(written(record(1, 0)) + other + change_to_bytes([(7, 99, 1)], [])) == [record(2, 0)]
    with pytest.raises(BadDocument, match="1 records of no pool"):
        read(sealed([], pool="") + b"\n" + other)


def sealed(records: list[list[object]], v: int = 2, gpu: str = GPU, pool: str = POOL) -> bytes:
    body = json.dumps({"boot_id": BOOT, "gpu": gpu, "pool": pool, "records": records}, separators=(",", ":"))
    return seal(body.encode(), v)


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([["n", 7, 9, 1, GRAIN, 0], ["n", 7, 9, 1, GRAIN, GRAIN]], "one block of a process twice"),
        ([["n", 7, 9, 1, 2 * GRAIN, 0], ["n", 7, 9, 2, GRAIN, GRAIN]], "is used twice"),
        ([["n", 7, 9, 1, GRAIN + 1, 0]], "multiples"),
        ([["n", 7, 9, 1, GRAIN, 5]], "multiples"),
        ([["n", 7, 9, 1, -GRAIN, 0]], "multiples"),
        ([["n", 0, 9, 1, GRAIN, 0]], "of process 0"),
        ([["n", 7, 9, 1, GRAIN]], "no records"),
    ],
)
def test_records_that_contradict_themselves_are_refused_as_a_whole(records: list[list[object]], error: str) -> None:
    with pytest.raises(BadDocument, match=error):
        read(sealed(records))


def test_records_without_the_pool_that_they_are_of_are_refused() -> None:
    with pytest.raises(BadDocument, match="1 records of no pool"):
        read(sealed([["n", 7, 9, 1, GRAIN, 0]], pool=""))
    assert read(sealed([], pool="")) == []


def test_another_version_or_gpu_is_refused() -> None:
    with pytest.raises(NewerVersion, match="version 3"):
        read(sealed([], v=3))
    with pytest.raises(BadDocument, match="version 1"):
        read(sealed([], v=1))
    with pytest.raises(BadDocument, match="GPU-2"):
        read(sealed([], gpu="GPU-2"))
