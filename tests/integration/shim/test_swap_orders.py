"""The orders to swap, carried out in a process whose kernels compute, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.shim.burst_kit import ANCHOR_MIB
from tests.integration.shim.conftest import MIB, wait_for
from tests.integration.shim.swap_kit import (
    DRIVER,
    NO_DESCRIPTOR,
    NO_MEMORY,
    UNKNOWN,
    Swap,
    swap,
)
from vgpu.protocol import wire
from vgpu.protocol.messages import UnableReason

__all__ = ["swap"]

NOT_SUPPORTED = 801
SOCKETS = 7
"""Of such a program when the library has all of its own: three connections, three spare ones, and one of the fake driver's."""


def test_a_process_is_swapped_in_the_middle_of_a_kernel_and_nothing_of_it_changes(swap: Swap) -> None:
    pieces = [swap.written(mib, seed) for seed, mib in enumerate((6, 20, 0.5, 0.25, 600), 1)]
    at = swap.program.do(f"alloc({4 * MIB})")
    swap.program.do(f"ok(launch('add', {at}, 4 * MIB, 50, 400_000))")
    swap.program.do(f"until('cell({at}) > 5')")
    swap.suspend()
    before_mib = swap.true_mib()
    blocks = swap.away()
    assert sum(block.mib for block in blocks) == 6 + 20 + 2 + 600 + 4
    assert swap.true_mib() == before_mib - 632
    assert swap.peer.state(lambda state: state.away_bytes > 0) == wire.Swappable(0, 0, 632 * MIB, 632 * MIB)
    assert sum(swap.arbiter.leased.values()) >= 632 * MIB, "memory that is away stays leased"
    swap.back(blocks)
    swap.settle()
    assert swap.true_mib() == before_mib
    assert swap.peer.state(lambda state: state.away_bytes == 0).elastic_bytes == 632 * MIB
    swap.suspend(on=False)
    swap.program.do("ok(done())")
    assert swap.program.do(f"set(cells({at}, MIB)) == {{50}}")
    assert swap.wrong(*pieces) == 0


def test_as_much_goes_as_was_ordered_and_the_rest_is_usable_meanwhile(swap: Swap) -> None:
    first, second = swap.written(8, 1), swap.written(4, 2)
    blocks = swap.away(3 * MIB)
    assert [block.mib for block in blocks] == [4]
    assert swap.wrong_meanwhile(first) == 0
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(first, second) == 0


def test_more_than_64_blocks_are_named_in_several_packets(swap: Swap) -> None:
    piece = swap.mapped(150, 1)
    blocks = swap.away()
    assert len({block.id for block in blocks}) == 150
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == 0


def descriptors(swap: Swap) -> set[int]:
    """Of the program, when the library has all of its own."""
    folder = Path(f"/proc/{swap.program.process.pid}/fd")
    wait_for(lambda: sum("socket:" in str(file.readlink()) for file in folder.iterdir()) >= SOCKETS)
    return {int(file.name) for file in folder.iterdir()}


def leave_descriptors(swap: Swap, count: int) -> None:
    """The program can open so many more."""
    open_now = descriptors(swap)
    limit = max(open_now) + 1 + count
    swap.program.do(f"__import__('resource').setrlimit(7, ({limit}, 4096))")
    swap.program.do(f"[os.dup(0) for _ in range({max(open_now) + 1 - len(open_now)})]")


def test_a_program_with_few_descriptors_left_is_swapped_all_the_same(swap: Swap) -> None:
    piece = swap.mapped(20, 1)
    leave_descriptors(swap, 3)
    blocks = swap.away()
    assert len(blocks) == 20
    made = swap.peer.lent(wire.SwapIn(0, tuple(block.id for block in blocks)))
    assert len(made) == 3, "as many as there are descriptors"
    swap.close(*made)
    for first in range(0, 20, 2):
        swap.back(blocks[first : first + 2])
    swap.settle()
    assert swap.wrong(piece) == 0


def test_a_program_with_no_descriptor_left_is_not_swapped_and_nothing_is_chosen(swap: Swap) -> None:
    swap.written(4, 1)
    swap.written(2, 2)
    away = swap.away(3 * MIB)
    before_mib = swap.true_mib()
    leave_descriptors(swap, 0)
    assert swap.peer.order(wire.SwapOut(0, 2**40)) == NO_DESCRIPTOR
    assert swap.peer.order(wire.SwapIn(0, (away[0].id,))) == NO_DESCRIPTOR
    assert swap.true_mib() == before_mib, "what cannot be filled is not made"


def test_what_gets_no_descriptor_is_not_chosen(swap: Swap) -> None:
    pieces = [swap.written(100, seed) for seed in range(3)]
    leave_descriptors(swap, 1)
    swap.close(*swap.out())
    for at, _, _ in pieces:
        swap.program.do(f"cuda.cuMemFree_v2(u64({at}))")
    swap.arbiter.recall(4000)
    assert swap.true_mib() == 100 + ANCHOR_MIB, "all but the one that is chosen are released"


def test_cancel_between_blocks_and_unmap_leaves_what_was_not_unmapped(swap: Swap) -> None:
    pieces = [swap.written(mib, mib) for mib in (6, 20, 30)]
    blocks = swap.out()
    swap.save(blocks)
    swap.unmap(blocks[:1])
    swap.peer.send(wire.Cancel(0))
    assert swap.peer.order(wire.Unmap(0, (blocks[1].id,))) == UNKNOWN
    again = swap.out(1)
    assert {block.id for block in again} <= {block.id for block in blocks[1:]}
    swap.close(*again)
    swap.peer.send(wire.Cancel(0))
    swap.back(blocks[:1])
    swap.settle()
    assert swap.wrong(*pieces) == 0


def test_a_new_swap_out_ends_the_one_before(swap: Swap) -> None:
    swap.written(6, 1)
    swap.written(30, 2)
    first = swap.out()
    second = swap.out(MIB)
    assert [block.mib for block in second] == [6]
    swap.close(*first, *second)
    other = next(block.id for block in first if block.mib == 30)
    assert swap.peer.order(wire.Unmap(0, (other,))) == UNKNOWN
    assert swap.peer.order(wire.Unmap(0, (second[0].id,))) == wire.Unmapped(0, (second[0].id,))


def test_an_order_that_names_another_state_or_no_block_changes_nothing(swap: Swap) -> None:
    piece = swap.written(6, 1)
    swap.written(20, 2)
    blocks = swap.out()
    ids = tuple(block.id for block in blocks)
    for refused in (
        wire.Unmap(0, (*ids, 12345)), wire.Unmap(0, (ids[0], ids[0])), wire.SwapIn(0, ids[:1]), wire.SwapIn(0, (999,)),
    ):  # fmt: skip
        assert swap.peer.order(refused) == UNKNOWN
    for other_gpu in (wire.SwapOut(1, MIB), wire.Unmap(1, ids), wire.SwapIn(9, ids)):
        assert swap.peer.order(other_gpu) == wire.Unable(other_gpu.gpu, UnableReason.NO_ELASTIC_MEMORY)
    assert swap.true_mib() == 26 + ANCHOR_MIB
    swap.save(blocks)
    swap.unmap(blocks)
    assert swap.peer.order(wire.Unmap(0, ids)) == UNKNOWN
    assert swap.peer.order(wire.SwapIn(0, (*ids, 12345))) == UNKNOWN
    assert swap.peer.order(wire.SwapOut(0, MIB)) == NO_MEMORY, "all is away"
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == 0


@pytest.mark.parametrize("count", [0, 65, 2**31])
def test_a_list_of_no_blocks_or_too_many_is_refused(swap: Swap, count: int) -> None:
    swap.written(6, 1)
    body = count.to_bytes(8, "little")[:4].rjust(8, b"\0") + bytes(512)
    for number in (22, 24):
        assert swap.peer.receive(swap.peer.send_raw(number, body))[0] == UNKNOWN


def test_a_filled_that_names_no_made_block_ends_the_connection_and_changes_nothing(swap: Swap) -> None:
    piece = swap.written(6, 1)
    blocks = swap.away()
    swap.peer.send(wire.Filled(0, (blocks[0].id,)))
    assert swap.peer.ends()
    swap.peer = swap.arbiter.burst()
    assert swap.peer.state(lambda _: True).away_bytes == 6 * MIB
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == 0


def test_without_elastic_memory_there_is_nothing_to_swap(swap: Swap) -> None:
    assert swap.peer.order(wire.SwapOut(0, MIB)) == NO_MEMORY


def test_memory_that_a_device_may_know_is_not_swapped(swap: Swap) -> None:
    at, _, _ = swap.written(6, 1)
    blocks = swap.out()
    swap.program.do(f"cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint(1)), 6, u64({at}))")
    assert swap.peer.order(wire.Unmap(0, (blocks[0].id,))) == NO_MEMORY
    assert swap.peer.order(wire.SwapOut(0, MIB)) == NO_MEMORY
    swap.close(*blocks)


def test_made_blocks_are_exported_again_for_a_new_copier(swap: Swap) -> None:
    piece = swap.written(6, 1)
    blocks = swap.away()
    ids = (blocks[0].id,)
    first = swap.peer.lent(wire.SwapIn(0, ids))
    assert swap.peer.order(wire.Unmap(0, ids)) == UNKNOWN
    swap.close(*first)
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == 0


def test_a_block_that_finds_no_memory_is_not_made_and_stays_away(swap: Swap) -> None:
    piece = swap.written(60, 1)
    blocks = swap.away()
    other = swap.hand.do(f"alloc({16000 * MIB})") and swap.hand.do("kept.append(0) or 0")
    swap.hand.do(f"kept.append(alloc({340 * MIB}))")
    assert swap.peer.order(wire.SwapIn(0, (blocks[0].id,))) == DRIVER
    swap.hand.do("ok(cuda.cuMemFree_v2(u64(kept.pop())))")
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == other


def test_the_program_frees_and_allocates_while_memory_is_away(swap: Swap) -> None:
    gone, piece = swap.written(6, 1), swap.written(20, 2)
    blocks = swap.away()
    swap.program.do(f"cuda.cuMemFree_v2(u64({gone[0]}))")
    new = swap.program.do(f"alloc({8 * MIB})")
    swap.back(blocks)
    swap.settle()
    swap.program.do(f"ok(launch('write', {new}, {8 * MIB}, 3, 0)) or ok(done())")
    assert swap.wrong(piece, (new, 8 * MIB, 3)) == 0


@pytest.mark.parametrize("gone", [True, False], ids=["away", "chosen"])
@pytest.mark.parametrize("call", ["copy_now({0}, {1}, {2})", "fill_now({0}, 0, {2}) or copy_now({0}, {1}, {2})"])
def test_calls_wait_until_the_memory_is_back(swap: Swap, call: str, *, gone: bool) -> None:
    """The driver refuses a copy from addresses where nothing is mapped."""
    piece, other = swap.written(6, 1), swap.written(6, 2)
    blocks = swap.away() if gone else swap.out()
    swap.program.do(f"beside({call.format(other[0], piece[0], piece[1])!r})")
    assert swap.program.do("threads[-1].join(0.3) or threads[-1].is_alive()")
    assert swap.wrong_meanwhile(*[] if gone else [piece, other]) == 0
    if gone:
        swap.back(blocks)
    else:
        swap.peer.send(wire.Cancel(0))
        swap.close(*blocks)
    assert swap.program.do("result()") == 0
    assert swap.wrong(piece, (*other[:2], 1)) == 0


@pytest.mark.parametrize("made", ["written", "mapped"])
@pytest.mark.parametrize(
    "call", ["texture({0}, {1})", "filling_graph({0}, {1})", "attribute({0}, 99)[0]", "set_memops({0})"]
)
def test_calls_that_name_addresses_wait_until_the_memory_is_back(swap: Swap, call: str, made: str) -> None:
    """The driver refuses an address where nothing is mapped. None of these is work: nothing else would bring the memory back."""
    piece = getattr(swap, made)(6, 1)
    expected = swap.program.do(call.format(*piece)) if "memops" not in call else NOT_SUPPORTED
    blocks = swap.away()
    works = swap.arbiter.works
    swap.program.do(f"beside({call.format(*piece)!r})")
    assert swap.program.do("threads[-1].join(0.3) or threads[-1].is_alive()")
    wait_for(lambda: swap.arbiter.works > works)
    swap.back(blocks)
    assert swap.program.do("result()") == expected
    assert swap.wrong(piece) == 0


IMAGE = "b'.version 8.0\\n.target sm_80\\n.visible .entry f() { ret; }\\n// ' + b'x' * 8192"
LOADS = f"cuda.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), {IMAGE})"


@pytest.mark.parametrize(
    "call",
    [
        LOADS,
        "cuda.cuModuleGetFunction(ctypes.byref(ctypes.c_void_p()), kept[-1], b'f')",
        "cuda.cuModuleUnload(kept[-1])",
    ],
    ids=["load", "function", "unload"],
)
def test_code_is_loaded_when_the_memory_is_back(swap: Swap, call: str) -> None:
    """The driver waits for the suspended channels there, and only work ends that."""
    piece = swap.written(6, 1)
    swap.program.do(f"kept.append(ctypes.c_void_p()) or ok(cuda.cuModuleLoadData(ctypes.byref(kept[-1]), {IMAGE}))")
    blocks = swap.away()
    works = swap.arbiter.works
    swap.program.do(f"beside({call!r})")
    assert swap.program.do("threads[-1].join(0.3) or threads[-1].is_alive()")
    wait_for(lambda: swap.arbiter.works > works)
    swap.back(blocks)
    assert swap.program.do("result()") == 0
    assert swap.wrong(piece) == 0


INSIDE = {
    "cuModuleLoadData": LOADS,
    "cuMemFreeHost": "cuda.cuMemFreeHost(ctypes.c_void_p(kept[-1]))",
    "cuCtxSetLimit": "cuda.cuCtxSetLimit(0, ctypes.c_size_t(2048))",
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_call_that_is_inside_the_driver_when_memory_leaves_counts_as_work(swap: Swap, name: str) -> None:
    """It waits for the suspended channels, and launches nothing."""
    piece = swap.written(6, 1)
    swap.program.do("kept.append(pinned(4096))")
    wait_for(lambda: swap.arbiter.idle)
    swap.stage.driver_ctl("fault", "hang", name, "seconds=3")
    swap.program.do(f"beside({INSIDE[name]!r})")
    assert swap.program.do("threads[-1].join(0.3) or threads[-1].is_alive()")
    assert swap.arbiter.idle
    blocks = swap.away()
    wait_for(lambda: not swap.arbiter.idle)
    assert swap.program.do("threads[-1].join(0.6) or threads[-1].is_alive()")
    assert not swap.arbiter.idle, "until the memory is back"
    swap.back(blocks)
    assert swap.program.do("result()") == 0
    wait_for(lambda: swap.arbiter.idle)
    assert swap.wrong(piece) == 0


def test_pinned_memory_is_freed_at_once_while_memory_is_away_and_brings_nothing_back(swap: Swap) -> None:
    piece = swap.written(6, 1)
    swap.program.do("kept.append(pinned(4096))")
    blocks = swap.away()
    assert swap.program.do(INSIDE["cuMemFreeHost"]) == 0
    assert swap.program.do(INSIDE["cuCtxSetLimit"]) == 0
    swap.back(blocks)
    assert swap.wrong(piece) == 0


def test_a_load_while_the_container_is_suspended_counts_as_work(swap: Swap) -> None:
    """Memory of another process of the container is away, or others have the GPU: nothing else ends that."""
    swap.written(6, 1)
    wait_for(lambda: swap.arbiter.idle)
    swap.arbiter.suspend(off=True)
    swap.stage.driver_ctl("fault", "hang", "cuModuleLoadData", "seconds=2")
    swap.program.do(f"beside({LOADS!r})")
    wait_for(lambda: not swap.arbiter.idle)
    assert swap.program.do("threads[-1].join(0.6) or threads[-1].is_alive()")
    assert not swap.arbiter.idle
    swap.arbiter.suspend(off=False)
    assert swap.program.do("result()") == 0
    wait_for(lambda: swap.arbiter.idle)


def test_what_was_sent_is_closed(swap: Swap) -> None:
    for seed in range(5):
        swap.written(2, seed)
    before = descriptors(swap)
    blocks = swap.away()
    swap.back(blocks)
    swap.settle()
    assert descriptors(swap) == before
