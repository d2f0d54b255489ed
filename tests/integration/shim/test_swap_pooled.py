"""Stream-ordered memory of a process that is swapped: the content, and allocations and frees while it is away."""

from __future__ import annotations

from tests.integration.shim.conftest import MIB, wait_for
from tests.integration.shim.swap_kit import Swap, swap

__all__ = ["swap"]


def written(swap: Swap, mib: int, seed: int, on: int) -> tuple[int, int, int]:
    size = mib * MIB
    at = swap.program.do(f"alloc_async({size}, {on})")
    swap.program.do(f"ok(launch('write', {at}, {size}, {seed}, 0, on={on}))")
    return at, size, seed


def reserved_mib(swap: Swap) -> int:
    """By the default pool."""
    return int(swap.program.do("reserved_mib()"))


def test_stream_ordered_memory_is_swapped_in_the_middle_of_a_kernel_and_nothing_of_it_changes(swap: Swap) -> None:
    stream = swap.program.do("stream()")
    pieces = [written(swap, mib, seed, stream) for seed, mib in enumerate((6, 20, 1, 600), 1)]
    swap.program.do(f"ok(done({stream}))")
    at = swap.program.do(f"alloc_async({4 * MIB}, {stream})")
    swap.program.do(f"ok(launch('add', {at}, 4 * MIB, 50, 400_000, on={stream}))")
    swap.program.do(f"until('cell({at}) > 5')")
    swap.suspend()
    before_mib = swap.true_mib()
    blocks = swap.away()
    assert sum(block.mib for block in blocks) >= 6 + 20 + 1 + 600 + 4
    assert swap.true_mib() < before_mib - 620
    swap.back(blocks)
    swap.settle()
    assert swap.true_mib() == before_mib
    swap.suspend(on=False)
    swap.program.do(f"ok(done({stream}))")
    assert swap.program.do(f"set(cells({at}, MIB)) == {{50}}")
    assert swap.wrong(*pieces) == 0


def test_memory_that_is_away_may_be_freed_and_allocated_again(swap: Swap) -> None:
    stream, other = swap.program.do("stream()"), swap.program.do("stream()")
    pieces = [written(swap, 40, seed, stream) for seed in (1, 2, 3)]
    swap.program.do(f"ok(done({stream}))")
    swap.suspend()
    blocks = swap.away()
    assert len(blocks) == 3
    assert swap.program.do(f"free_async({pieces[0][0]}, {stream})") == 0
    assert swap.program.do(f"alloc_async({30 * MIB}, {stream})") == pieces[0][0], (
        "the records do not wait for the memory"
    )
    assert swap.program.do(f"free_async({pieces[1][0]}, {stream})") == 0
    swap.program.do(f"beside('launch(\"write\", {pieces[0][0]}, {30 * MIB}, 9, 0, on={stream})')")
    swap.program.do(f"beside('(alloc_async({20 * MIB}, {other}))')")
    assert swap.program.do("result()") == pieces[1][0], "nothing was left before its free"
    assert reserved_mib(swap) == 120, "what is away is not released"
    swap.back(blocks)
    swap.settle()
    swap.suspend(on=False)
    assert swap.program.do("result()") == 0
    swap.program.do(f"ok(done({stream}))")
    assert swap.wrong((pieces[0][0], 30 * MIB, 9), pieces[2]) == 0
    wait_for(lambda: swap.program.do("ok(done())") is None and reserved_mib(swap) == 120)


def test_a_trim_beside_a_swap_leaves_what_is_away(swap: Swap) -> None:
    stream = swap.program.do("stream()")
    kept = written(swap, 40, 1, stream)
    freed = [written(swap, mib, 2, stream) for mib in (60, 80)]
    swap.program.do(f"ok(done({stream}))")
    swap.suspend()
    blocks = swap.away(100 * MIB)
    for at, _, _ in freed:
        assert swap.program.do(f"free_async({at}, {stream})") == 0
    swap.program.do("trim()")
    swap.back(blocks)
    swap.settle()
    swap.suspend(on=False)
    assert swap.wrong(kept) == 0
    wait_for(lambda: swap.program.do("ok(done())") is None and reserved_mib(swap) == 40)
