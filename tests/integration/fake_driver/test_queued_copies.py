"""Copies, fills and host functions stand in their streams, and stop with the channels that they go by."""

from __future__ import annotations

import pytest

MIB = 1 << 20
NOT_READY, INVALID_VALUE = 600, 1


@pytest.fixture
def driver(fake_driver):
    return fake_driver("gpu h200 context_mib=0")


@pytest.fixture
def one(driver, owner):
    return owner(driver)


def test_a_copy_waits_for_the_kernel_before_it(one):
    at, host, on = one.do("alloc(MIB)"), one.do("pinned(MIB)"), one.do("stream()")
    one.do(f"ok(launch('add', {at}, MIB, 4, 50_000, on={on})) or ok(copy({host}, {at}, MIB, {on}))")
    assert one.do(f"cell({host})") == 0
    assert one.do(f"query({on})") == NOT_READY
    one.do(f"ok(done({on}))")
    assert one.do(f"set(cells({host}, MIB // 4))" + " == {4}")


def test_a_copy_waits_for_a_kernel_that_computes_nothing(one):
    at, host, on = one.do("alloc(4)"), one.do("pinned(4)"), one.do("stream()")
    one.do(f"put({at}, 5) or ok(launch('spin', 50_000, on={on})) or ok(copy({host}, {at}, 4, {on}))")
    assert one.do(f"cell({host})") == 0
    one.do(f"ok(done({on}))")
    assert one.do(f"cell({host})") == 5


def test_a_copy_behind_a_suspended_kernel_waits_and_one_of_another_stream_does_not(one):
    at, host, on, other = one.do("alloc(4)"), one.do("pinned(8)"), one.do("stream()"), one.do("stream()")
    one.do(f"put({at}, 5) or ok(launch('spin', 20_000, on={on})) or ok(copy({host}, {at}, 4, {on}))")
    one.suspend(one.COMPUTE)
    assert one.do(f"still('cell({host})', 0.1)")
    one.do(f"ok(copy({host + 4}, {at}, 4, {other})) or ok(done({other}))")
    assert one.do(f"cells({host}, 2)") == [0, 5]
    one.resume(one.COMPUTE)
    one.do(f"ok(done({on}))")
    assert one.do(f"cells({host}, 2)") == [5, 5]


LARGE = 384


def large_copy(one) -> tuple[int, int]:
    """One that is in progress: its first and last cell there. The source is a pattern."""
    at, host, on = one.do(f"blocks({LARGE // 32}, 32)"), one.do(f"pinned({LARGE} * MIB)"), one.do("stream()")
    one.do(f"fill_now({at}, 7, {LARGE} * MIB)")
    one.do(f"ok(copy({host}, {at}, {LARGE} * MIB, {on})) or until('cell({host})')")
    return host, on


def test_a_copy_in_progress_stops_with_its_copy_channels_and_goes_on_with_them(one):
    host, on = large_copy(one)
    one.suspend(one.COPIES)
    assert one.do(f"still('[cell({host} + mib * MIB) for mib in range({LARGE})]', 0.1)")
    assert one.do(f"cell({host + LARGE * MIB - 4})") == 0
    assert one.do(f"query({on})") == NOT_READY
    one.resume(one.COPIES)
    one.do(f"ok(done({on}))")
    assert one.do(f"ctypes.string_at({host}, {LARGE} * MIB) == bytes([7]) * ({LARGE} * MIB)")


def test_a_copy_in_progress_goes_on_if_only_compute_channels_are_suspended(one):
    host, on = large_copy(one)
    one.suspend(one.COMPUTE)
    one.do(f"ok(done({on}))")
    assert one.do(f"cell({host + LARGE * MIB - 4})") == 0x07070707


def test_one_suspended_copy_channel_of_twelve_stops_copies_and_each_disable_needs_an_enable(one, driver):
    at, host, on = one.do("alloc(4)"), one.do("pinned(4)"), one.do("stream()")
    one.do(f"put({at}, 5)")
    one.suspend(one.COPIES[5:6])
    one.suspend(one.COPIES[5:6])
    one.resume(one.COPIES)
    one.do(f"ok(copy({host}, {at}, 4, {on}))")
    assert one.do(f"still('cell({host})') and cell({host}) == 0")
    assert "enables_owed=1 held=0 copies_held=1" in driver.ctl("kernel")
    one.resume(one.COPIES)
    one.do(f"ok(done({on}))")
    assert one.do(f"cell({host})") == 5


def test_a_fill_stops_with_compute_channels_and_not_with_copy_channels(one):
    at, on = one.do("alloc(8)"), one.do("stream()")
    one.suspend(one.COPIES)
    one.do(f"ok(fill({at}, 1, 4, {on})) or ok(done({on}))")
    one.resume(one.COPIES)
    one.suspend(one.COMPUTE)
    one.do(f"ok(fill({at + 4}, 1, 4, {on}))")
    assert one.do(f"still('cell({at + 4})')")
    assert one.do(f"cells({at}, 2)") == [0x01010101, 0]
    one.resume(one.COMPUTE)
    one.do(f"ok(done({on}))")
    assert one.do(f"cell({at + 4})") == 0x01010101


@pytest.mark.parametrize(
    ("call", "channels"), [("copy_now({host}, {at}, 4)", "COPIES"), ("fill_now({host}, 5, 4)", "COMPUTE")]
)
def test_a_call_that_copies_or_fills_waits_for_the_resume(one, call, channels):
    at, host = one.do("alloc(4)"), one.do("pinned(4)")
    one.do(f"put({at}, 0x05050505)")
    one.suspend(getattr(one, channels))
    one.do(f"beside({call.format(at=at, host=host)!r})")
    assert one.do(f"still('(len(results), cell({host}))', 0.1) and not results")
    one.resume(getattr(one, channels))
    assert one.do("result()") == 0
    assert one.do(f"cell({host})") == 0x05050505


def test_a_call_that_copies_does_not_wait_for_a_stream_that_does_not_block(one):
    flag, at, free, blocking = one.do("pinned(4)"), one.do("alloc(4)"), one.do("stream(1)"), one.do("stream(0)")
    one.do(f"ok(launch('wait', {flag}, on={free})) or ok(copy_now({at}, {flag}, 4))")
    one.do(f"ok(launch('wait', {flag}, on={blocking})) or beside('copy_now({at}, {flag}, 4)')")
    assert one.do("still('len(results)', 0.1) and not results")
    one.do(f"put({flag}, 1)")
    assert one.do("result()") == 0
    assert one.do(f"cell({at})") == 1


def test_a_host_function_runs_behind_the_kernel_and_the_stream_waits_for_it(one):
    flag, at, on = one.do("pinned(4)"), one.do("pinned(4)"), one.do("stream()")
    one.do(f"ok(launch('wait', {flag}, on={on})) or host_function({at}, {on})")
    assert one.do(f"still('cell({at})') and cell({at}) == 0")
    one.do(f"put({flag}, 1) or ok(done({on}))")
    assert one.do(f"cell({at})") == 1


def test_a_stream_stands_behind_the_event_of_another(one):
    flag, at, first, second = one.do("pinned(4)"), one.do("alloc(4)"), one.do("stream()"), one.do("stream()")
    one.do(f"ok(launch('wait', {flag}, on={first})) or order({first}, {second}) or ok(fill({at}, 1, 4, {second}))")
    assert one.do(f"still('cell({at})') and cell({at}) == 0")
    one.do(f"put({flag}, 1) or ok(done({second}))")
    assert one.do(f"cell({at})") == 0x01010101


def test_a_little_of_pageable_memory_is_taken_at_the_call(one):
    flag, at, on = one.do("pinned(4)"), one.do("alloc(4)"), one.do("stream()")
    one.do("kept.append(ctypes.c_uint32(5))")
    one.do(f"ok(launch('wait', {flag}, on={on})) or ok(copy({at}, ctypes.addressof(kept[0]), 4, {on}))")
    one.do("kept[0].__init__(6)")
    one.do(f"put({flag}, 1) or ok(done({on}))")
    assert one.do(f"cell({at})") == 5


def test_a_copy_to_pageable_memory_is_waited_for(one):
    at, on = one.do("alloc(4)"), one.do("stream()")
    one.do("kept.append(ctypes.c_uint32(0))")
    one.do(f"put({at}, 5) or ok(launch('spin', 50_000, on={on})) or ok(copy(ctypes.addressof(kept[0]), {at}, 4, {on}))")
    assert one.do("kept[0].value") == 5


def test_large_copies_and_fills_are_whole_and_cross_blocks(one):
    at, to = one.do("blocks(50)"), one.do("alloc(100 * MIB)")
    one.do(f"ok(launch('write', {at}, 100 * MIB, 3, 0)) or ok(copy_now({to}, {at}, 100 * MIB))")
    assert one.do(f"ctypes.string_at({to}, 100 * MIB) == ctypes.string_at({at}, 100 * MIB)")
    assert one.do(f"cell({to + 100 * MIB - 4})") == ((25 * MIB - 1) * 2654435761 + 3) & 0xFFFFFFFF
    one.do(f"ok(fill_now({at + 5}, 9, 100 * MIB - 10))")
    assert one.do(f"set(ctypes.string_at({at + 5}, 100 * MIB - 10)) == {{9}}")


def test_a_copy_that_leaves_its_memory_is_refused(one):
    at = one.do("blocks(2)")
    assert one.do(f"copy_now({at}, pinned(8 * MIB), 4 * MIB + 1)") == INVALID_VALUE
    assert one.do(f"copy_now(alloc(2 * MIB) + MIB, {at}, 2 * MIB)") == INVALID_VALUE
    assert one.do(f"copy_now({at}, reserve(2), 4)") == INVALID_VALUE


def test_memory_is_freed_behind_what_uses_it(one):
    flag, on = one.do("pinned(4)"), one.do("stream()")
    one.do("kept.append(ctypes.c_uint64())")
    one.do(f"ok(cuda.cuMemAllocAsync(ctypes.byref(kept[0]), u64(2 * MIB), ctypes.c_void_p({on})))")
    one.do(f"ok(launch('wait', {flag}, on={on})) or ok(launch('add', kept[0].value, 2 * MIB, 1, 0, on={on}))")
    one.do(f"ok(cuda.cuMemFreeAsync(kept[0], ctypes.c_void_p({on})))")
    one.do(f"put({flag}, 1) or ok(done({on}))")
    assert one.do("cuda.cuMemFree_v2(kept[0])") == INVALID_VALUE


def test_freeing_waits_for_work_and_unmapping_does_not(one):
    flag, at, block, on = one.do("pinned(4)"), one.do("alloc(4)"), one.do("blocks(1)"), one.do("stream()")
    one.do(f"ok(launch('wait', {flag}, on={on})) or ok(unmap({block}))")
    one.do(f"beside('cuda.cuMemFree_v2(u64({at}))')")
    assert one.do("still('len(results)', 0.1) and not results")
    one.do(f"put({flag}, 1)")
    assert one.do("result()") == 0
