"""Which blocks have a record: after a write that succeeded, the file has what was put and not removed since."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from arbiter.swap.block import BlockState, MovedBlock
from arbiter.swap.block_records import WRITE_AGAIN_S, BlockRecords
from tests.unit.arbiter.swap.simulated_copier import GRAIN
from vgpu.memory.swap_records import Key, PoolRecords, SwapRecord
from vgpu.memory.swap_slots import Slot
from vgpu.protocol.copier import Done


class Owner:
    key = ("grant", 7, 99)

    def job_done(self, block: MovedBlock, done: Done) -> None: ...

    def save_lost(self, block: MovedBlock) -> None: ...

    def slot_lost(self, block: MovedBlock) -> None: ...


class File:
    """A file of records that can be full."""

    def __init__(self) -> None:
        self.records: dict[Key, SwapRecord] = {}
        self.full = False
        self.pool = ""
        self.writes = 0

    def read(self) -> PoolRecords:
        return PoolRecords(self.pool, tuple(self.records.values()))

    def write(self, drop: Iterable[Key], put: Iterable[SwapRecord], pool: str) -> bool:
        self.writes += 1
        if not self.full:
            self.pool = pool
            for key in drop:
                self.records.pop(key, None)
            self.records.update((one.key, one) for one in put)
        return not self.full


class Stand:
    def __init__(self) -> None:
        self.file, self.now_s = File(), 0.0
        self.records = BlockRecords(self.file, lambda: self.now_s)  # type: ignore[arg-type]
        self.blocks = [
            MovedBlock(Owner(), number, GRAIN, BlockState.UNMAPPING, Slot(number * GRAIN, GRAIN)) for number in range(4)
        ]


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "lose", "write", "full"]), st.integers(0, 3))))
def test_a_write_that_succeeds_leaves_what_was_put_and_not_removed(steps: list[tuple[str, int]]) -> None:
    stand, expected = Stand(), set[int]()
    for what, number in steps:
        block = stand.blocks[number]
        match what:
            case "put":
                stand.records.put(block)
                expected |= set() if block.lost else {number}
            case "remove":
                stand.records.remove(block)
                expected.discard(number)
            case "lose":
                stand.records.remove(block)
                block.lost = True
                expected.discard(number)
            case "full":
                stand.file.full = not stand.file.full
            case _:
                stand.now_s += WRITE_AGAIN_S
                written = stand.records.write()
                assert written or stand.file.full
                assert not written or {one.block for one in stand.file.read().records} == expected
    assert {one.id for one in stand.blocks if one in stand.records} == expected


def test_a_write_that_failed_is_tried_again_a_second_later() -> None:
    stand = Stand()
    assert stand.records.deadline_s() == inf
    stand.records.put(stand.blocks[0])
    assert stand.records.deadline_s() <= stand.now_s
    stand.file.full = True
    assert not stand.records.write()
    stand.file.full = False
    assert not stand.records.write()
    assert (stand.file.writes, stand.records.deadline_s()) == (1, WRITE_AGAIN_S)
    stand.now_s = WRITE_AGAIN_S
    assert stand.records.write()
    assert (stand.file.writes, stand.records.deadline_s()) == (2, inf)


def test_nothing_is_written_where_nothing_changed() -> None:
    stand = Stand()
    assert stand.records.write()
    assert stand.file.writes == 0
