"""Kernels that compute: what they do to memory, how a suspend stops them, and what they find where nothing is mapped."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.signals import send_signal

MIB = 1 << 20
PIECE = 256 << 10
ILLEGAL_ADDRESS, NOT_READY, INVALID_VALUE = 700, 600, 1


@pytest.fixture
def driver(fake_driver):
    return fake_driver("gpu h200 context_mib=0")


@pytest.fixture
def one(driver, owner):
    return owner(driver)


@pytest.mark.parametrize("size", [4, 4096, PIECE - 4, PIECE, PIECE + 4, 3 * MIB, 5 * MIB + 8])
@pytest.mark.parametrize("where", ["alloc(6 * MIB)", "blocks(3)", "pinned(6 * MIB)"], ids=["plain", "blocks", "pinned"])
def test_kernels_do_what_the_slow_version_does(one, size, where):
    one.do(f"kept.extend([{where}, pinned(4)])")
    at, told = one.do("kept")
    one.do(f"ok(launch('write', {at}, {size}, 7, 0))")
    one.do(f"ok(launch('add', {at}, {size}, 3, 1000))")
    one.do("ok(done())")
    assert one.do(f"wrong({at}, {size}, 10)") == 0
    assert one.do(f"{size} == 6 * MIB or cell({at} + {size})") in (0, True), "nothing behind it is touched"
    places = sorted(random.sample(range(size // 4), min(5, size // 4)))
    for place in places:
        one.do(f"put({at + 4 * place}, cell({at + 4 * place}) ^ 1)")
    one.do(f"ok(launch('compare', {at}, {size}, 10, {told}))")
    one.do("ok(done())")
    assert one.do(f"cell({told})") == len(places) == one.do(f"wrong({at}, {size}, 10)")


def test_a_kernel_comes_on_with_its_time_and_ends_not_before(one):
    at = one.do("blocks(2)")
    began = time.monotonic()
    one.do(f"ok(launch('add', {at}, 4 * MIB, 10, 300_000))")
    one.do(f"until('cell({at}) > 2')")
    assert one.do("query()") == NOT_READY
    assert one.do(f"cell({at + 4 * MIB - 4})") < 10
    one.do("ok(done())")
    assert time.monotonic() - began >= 0.3
    assert one.do(f"set(cells({at}, MIB))" + " == {10}")


def test_a_suspended_kernel_stands_still_and_goes_on_where_it_was(one):
    at = one.do("blocks(1)")
    one.do(f"ok(launch('add', {at}, 2 * MIB, 50, 400_000))")
    for seen in (5, 15, 30):
        one.do(f"until('cell({at}) > {seen}')")
        one.suspend(one.COMPUTE)
        assert one.do(f"still('(cell({at}), cell({at + 2 * MIB - 4}))')")
        assert one.do("query()") == NOT_READY
        one.resume(one.COMPUTE)
    one.do("ok(done())")
    assert one.do(f"set(cells({at}, MIB // 2))" + " == {50}")


def test_a_kernel_that_runs_over_a_page_that_is_not_mapped_ends_its_process(one, owner, driver):
    other = owner(driver)
    at = one.do("blocks(2)")
    one.do(f"ok(launch('add', {at}, 4 * MIB, 1000, 10_000_000))")
    one.do(f"until('cell({at + 4 * MIB - 4})')")
    assert one.do(f"unmap({at + 2 * MIB})") == 0, "it waits for nothing"
    assert one.do("done()") == ILLEGAL_ADDRESS
    assert one.do("cuda.cuCtxSynchronize()") == ILLEGAL_ADDRESS, "and stays"
    assert one.do(f"launch('write', {at}, 4, 0, 0)") == ILLEGAL_ADDRESS
    other.do("ok(launch('write', alloc(4), 4, 0, 0)) or ok(done())")


@pytest.mark.parametrize("at", ["4096", "reserve(2)", "alloc(2 * MIB) + MIB", "blocks(1) + MIB"])
def test_so_does_one_that_names_memory_which_is_not_there(one, at):
    one.do(f"ok(launch('write', {at}, 2 * MIB, 0, 0))")
    assert one.do("done()") == ILLEGAL_ADDRESS


def test_memory_without_access_is_not_there(one):
    at = one.do("blocks(1)")
    one.do(f"ok(cuda.cuMemSetAccess(u64({at}), u64(2 * MIB), ctypes.byref(Access(Location(1, 0), 0)), u64(1)))")
    one.do(f"ok(launch('write', {at}, 2 * MIB, 0, 0))")
    assert one.do("done()") == ILLEGAL_ADDRESS


def test_blocks_can_be_exchanged_under_a_suspended_kernel(one):
    at = one.do("blocks(3)")
    one.do(f"ok(launch('write', {at}, 6 * MIB, 0, 0))")
    one.do(f"ok(launch('add', {at}, 6 * MIB, 30, 300_000))")
    for _ in range(5):
        one.do(f"until('cell({at}) != {one.do(f'cell({at})')}')")
        one.suspend(one.COMPUTE)
        one.do("\n".join(f"renew({at + number * 2 * MIB})" for number in range(3)))
        one.resume(one.COMPUTE)
    one.do("ok(done())")
    assert one.do(f"wrong({at}, 6 * MIB, 30)") == 0


def test_cells_are_exact_whenever_memory_was_saved_lost_and_restored(one, owner, driver):
    """Also if the process was stopped in the middle of a step, so that the suspend returned without waiting for its end."""
    saver = owner(driver)
    one.do("kept.append(create(2))")
    one.do("kept.append(map_block(reserve(2), kept[0]))")
    at, fd = one.do("kept[1]"), one.do("export(kept[0])")
    saved = saver.do(f"take({one.process.pid}, {fd})")
    rounds, chance = 40, random.Random(5)
    one.do(f"ok(launch('write', {at}, 2 * MIB, 0, 0))")
    one.do(f"ok(launch('add', {at}, 2 * MIB, 400, 0))")
    for number in range(rounds):
        stopped = number % 2 == 0
        time.sleep(chance.random() / 500)
        if stopped:
            send_signal(one.process.pid, signal.SIGSTOP)
        one.suspend(one.COMPUTE, by=saver)
        saver.do(f"kept.append(ctypes.string_at({saved}, 2 * MIB)) or ctypes.memset({saved}, 0xFF, 2 * MIB)")
        if stopped:
            send_signal(one.process.pid, signal.SIGCONT)
            time.sleep(0.002)
        saver.do(f"ctypes.memmove({saved}, kept.pop(), 2 * MIB)")
        one.resume(one.COMPUTE, by=saver)
    one.do("ok(done())")
    assert one.do(f"wrong({at}, 2 * MIB, 400)") == 0


def test_a_kernel_waits_for_a_flag_and_takes_time_meanwhile(one, driver):
    flag = one.do("pinned(4)")
    one.do(f"ok(launch('wait', {flag}))")
    while int(driver.ctl("kernel").split("ran_us=")[1].split()[0]) < 20_000:
        assert one.do("query()") == NOT_READY
    one.do(f"put({flag}, 1)")
    one.do("ok(done())")


def test_a_suspended_kernel_does_not_see_its_flag(one):
    flag = one.do("pinned(4)")
    one.do(f"ok(launch('wait', {flag}))")
    one.suspend(one.COMPUTE)
    one.do(f"put({flag}, 1)")
    assert one.do("still('query()')")
    assert one.do("query()") == NOT_READY
    one.resume(one.COMPUTE)
    one.do("ok(done())")


def test_two_kernels_that_wait_for_each_other_meet(one):
    flags, first, second = one.do("pinned(8)"), one.do("stream()"), one.do("stream()")
    one.do(f"ok(launch('meet', {flags}, {flags + 4}, on={first}))")
    one.do(f"until('cell({flags})')")
    assert one.do(f"query({first})") == NOT_READY
    one.do(f"ok(launch('meet', {flags + 4}, {flags}, on={second}))")
    one.do(f"ok(done({first})) or ok(done({second}))")


def test_streams_of_kernels_beside_a_waiting_one_go_on(one):
    flag, at, waiting, other = one.do("pinned(4)"), one.do("alloc(MIB)"), one.do("stream()"), one.do("stream()")
    one.do(f"ok(launch('wait', {flag}, on={waiting}))")
    one.do(f"ok(launch('add', {at}, MIB, 3, 0, on={other})) or ok(launch('spin', 1000, on={other}))")
    one.do(f"ok(done({other}))")
    assert one.do(f"cell({at})") == 3
    assert one.do(f"query({waiting})") == NOT_READY


def test_a_launch_into_a_full_queue_waits(one):
    flag, on = one.do("pinned(4)"), one.do("stream()")
    one.do(f"ok(launch('wait', {flag}, on={on}))")
    one.do(f"[ok(launch('nothing', on={on})) for _ in range(1023)]")
    one.do(f"beside('launch(\"nothing\", on={on})')")
    assert one.do("still('len(results)', 0.1)")
    assert one.do("results") == []
    one.do(f"put({flag}, 1)")
    assert one.do("result()") == 0
    one.do(f"ok(done({on}))")


def test_kernels_of_one_stream_run_in_their_order(one):
    at, on = one.do("alloc(4)"), one.do("stream()")
    one.do(f"[ok(launch('write', {at}, 4, seed, 100, on={on})) for seed in range(200)]")
    one.do(f"ok(launch('spin', 100, on={on})) or ok(launch('add', {at}, 4, 5, 0, on={on}))")
    one.do(f"ok(done({on}))")
    assert one.do(f"cell({at})") == 199 + 5


def test_graphs_have_kernels_that_compute_and_copies(one):
    at, on = one.do("blocks(2)"), one.do("stream()")
    what = f"ok(launch('add', {at}, 2 * MIB, 3, 1000, on=on)) or ok(copy({at + 2 * MIB}, {at}, 2 * MIB, on))"
    graph = one.do(f"graph_of({on}, {what!r})")
    assert one.do(f"cell({at})") == 0
    one.do(f"[replay({graph}, {on}) for _ in range(3)] and ok(done({on}))")
    assert one.do(f"set(cells({at}, MIB))" + " == {9}")


@pytest.mark.parametrize(
    ("image", "error"),
    [
        ("//fake k does=divide at=param0 bytes=param1", 200),
        ("//fake k does=add at=param0", 200),
        ("//fake k does=compare at=param0 bytes=4", 200),
    ],
)
def test_a_comment_that_says_nothing_of_use_is_refused(one, image, error):
    one.do(f"ok(cuda.cuModuleLoadData(ctypes.byref(context), {(image + chr(10) + '.entry k() {}').encode()!r}))")
    assert one.do("cuda.cuModuleGetFunction(ctypes.byref(ctypes.c_void_p()), context, b'k')") == error


def test_cells_that_are_not_aligned_are_refused(one):
    assert one.do("launch('write', alloc(512) + 2, 4, 0, 0)") == INVALID_VALUE
    assert one.do("launch('write', alloc(512), 6, 0, 0)") == INVALID_VALUE
