"""Memory that an idle program frees while it is away: the process tells the arbiter, and its lease ends with the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.integration.shim.conftest import GPUS, MIB, Stage, wait_for
from tests.integration.shim.swap_kit import UNKNOWN, Program, Swap
from tests.integration.shim.swapping_arbiter import ELASTIC, FEATURES, BurstPeer, SwappingArbiter
from tests.integration.shim.test_elastic import burst
from vgpu.protocol import wire

DISCARDS = FEATURES | wire.UNDERSTANDS_DISCARD


@pytest.fixture
def swap(bare_stage: Stage) -> Iterator[Swap]:
    bare_stage.grant((GPUS[0], 1000))
    burst(bare_stage)
    arbiter = SwappingArbiter(bare_stage.folder / "grants" / bare_stage.key, features=DISCARDS)
    with Swap(bare_stage, arbiter, Program(bare_stage, library=True), Program(bare_stage, library=False)) as made:
        yield made
        assert made.arbiter.wrong == []


def freed(swap: Swap, *pieces: tuple[int, int, int]) -> None:
    for at, _, _ in pieces:
        assert swap.program.do(f"cuda.cuMemFree_v2(u64({at}))") == 0


def elastic_mib(swap: Swap) -> int:
    """Leased for elastic memory, when all that is unused has been returned."""
    swap.arbiter.recall(4000)
    return swap.arbiter.leased[ELASTIC] // MIB


def next_arbiter(swap: Swap, features: int = DISCARDS) -> BurstPeer:
    swap.arbiter_dies()
    swap.arbiter = SwappingArbiter(swap.folder, features=features, leased=swap.arbiter.leased)
    swap.peer = swap.arbiter.burst()
    wait_for(lambda: swap.arbiter.usages)
    return swap.peer


def test_what_is_freed_while_it_is_away_is_discarded_and_its_lease_ends_with_the_answer(swap: Swap) -> None:
    gone, piece = swap.written(600, 1), swap.written(20, 2)
    blocks = {block.mib: block for block in swap.away()}
    swap.peer.state(lambda state: state.away_bytes == 620 * MIB)
    freed(swap, gone)
    seq, message = swap.peer.discard()
    assert set(message.ids) == {block.id for mib, block in blocks.items() if mib != 20}
    assert swap.peer.state(lambda state: state.away_bytes == 20 * MIB).elastic_bytes == 20 * MIB
    assert elastic_mib(swap) == 620, "the arbiter counts it as away until it has answered"
    swap.peer.discarded(seq, message)
    wait_for(lambda: elastic_mib(swap) == 20)
    assert swap.program.do("used_mib()") < 30
    swap.back([blocks[20]])
    swap.settle()
    assert swap.wrong(piece) == 0


def test_a_block_of_cumemcreate_without_handle_and_mapping_is_discarded(swap: Swap) -> None:
    at, size, _ = swap.mapped(4, 1)
    blocks = swap.away()
    assert swap.program.do(f"unmap({at}, 6)") == 0
    seq, message = swap.peer.discard()
    assert len(message.ids) == 3
    swap.peer.discarded(seq, message)
    wait_for(lambda: elastic_mib(swap) == 2)
    left = [block for block in blocks if block.id not in message.ids]
    swap.back(left)
    swap.settle()
    assert swap.wrong_meanwhile((at + size - 2 * MIB, 0, 1)) == 0


def test_a_region_with_a_live_request_stays(swap: Swap) -> None:
    pieces = [swap.written(0.25, seed) for seed in (1, 2)]
    other = swap.written(8, 3)
    blocks = swap.away()
    freed(swap, pieces[0], other)
    _, message = swap.peer.discard()
    assert len(message.ids) == 1
    small = [block for block in blocks if block.id not in message.ids]
    swap.back(small)
    swap.settle()
    assert swap.wrong(pieces[1]) == 0


@pytest.mark.parametrize("alone", [True, False])
def test_an_order_that_crosses_it_is_answered_without_its_blocks(swap: Swap, alone: bool) -> None:
    gone, piece = swap.written(8, 1), swap.written(20, 2)
    blocks = swap.away()
    freed(swap, gone)
    seq, message = swap.peer.discard()
    kept = [block for block in blocks if block.id not in message.ids]
    if alone:
        assert swap.peer.order(wire.SwapIn(0, message.ids)) == UNKNOWN
        swap.back(kept)
    else:
        made = swap.peer.lent(wire.SwapIn(0, tuple(block.id for block in blocks)))
        assert [block.id for block in made] == [block.id for block in kept]
        swap.restore(made)
        swap.peer.send(wire.Filled(0, tuple(block.id for block in made)))
    swap.settle()
    swap.peer.discarded(seq, message)
    wait_for(lambda: elastic_mib(swap) == 20)
    assert swap.wrong(piece) == 0


def test_it_is_repeated_before_anything_is_stated_until_it_is_answered(swap: Swap) -> None:
    gone = swap.written(8, 1)
    swap.written(20, 2)
    swap.away()
    freed(swap, gone)
    _, first = swap.peer.discard()
    for _ in range(2):
        peer = next_arbiter(swap)
        seq, again = peer.discard()
        assert again == first
        assert peer.swappable == []
        assert peer.state(lambda _: True).away_bytes == 20 * MIB
    peer.discarded(seq, again)
    wait_for(lambda: elastic_mib(swap) == 20)
    peer = next_arbiter(swap)
    assert peer.state(lambda _: True).away_bytes == 20 * MIB


def test_an_arbiter_of_an_earlier_release_gets_none_and_brings_it_back(swap: Swap) -> None:
    gone, piece = swap.written(8, 1), swap.written(20, 2)
    blocks = swap.away()
    next_arbiter(swap, FEATURES)
    freed(swap, gone)
    swap.program.do("time.sleep(2.5)")
    assert swap.peer.state(lambda state: state.away_bytes > 0).away_bytes == 28 * MIB
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == 0


def test_an_arbiter_of_an_earlier_release_finds_blocks_gone_that_the_one_before_was_told_of(swap: Swap) -> None:
    gone, piece = swap.written(8, 1), swap.written(20, 2)
    blocks = swap.away()
    freed(swap, gone)
    _, message = swap.peer.discard()
    next_arbiter(swap, FEATURES)
    assert swap.peer.state(lambda _: True).away_bytes == 20 * MIB
    assert swap.peer.order(wire.SwapIn(0, message.ids)) == UNKNOWN
    wait_for(lambda: elastic_mib(swap) == 20)
    swap.back([block for block in blocks if block.id not in message.ids])
    swap.settle()
    assert swap.wrong(piece) == 0


@dataclass(frozen=True)
class Waiter:
    """A request beside an allocation that needs lease."""

    expression: str
    prepare: Callable[[Swap], str] = lambda _: ""
    """Before memory leaves; its answer is the last word of the expression."""


WAITERS = {
    "what code and streams may take": Waiter("stream() > 0"),
    "memory of another process": Waiter(
        "ipc_open('{}') > 0", lambda swap: swap.hand.do(f"ipc_name(alloc({100 * MIB}))")
    ),
    "a lease that becomes resident": Waiter("export({}) > 0", lambda swap: swap.program.do("create(8)")),
}


@pytest.mark.parametrize("waiter", WAITERS.values(), ids=WAITERS.keys())
def test_whatever_needs_lease_waits_for_the_answer(swap: Swap, waiter: Waiter) -> None:
    gone = swap.written(600, 1)
    swap.away()
    name = waiter.prepare(swap)
    freed(swap, gone)
    seq, message = swap.peer.discard()
    elastic_mib(swap)
    swap.arbiter.limits, swap.arbiter.strict = (1000, sum(swap.arbiter.leased.values()) // MIB), True
    swap.program.do(f"beside({waiter.expression.format(name)!r})")
    wait_for(lambda: [granted for _, _, granted in swap.arbiter.leases if not granted])
    assert swap.program.do("threads[-1].join(0.3) or threads[-1].is_alive()")
    swap.peer.discarded(seq, message)
    assert swap.program.do("result()")


def test_a_request_that_needs_the_lease_waits_for_the_answer(swap: Swap) -> None:
    gone = swap.written(600, 1)
    swap.arbiter.limits = (1000, 700)
    swap.away()
    freed(swap, gone)
    seq, message = swap.peer.discard()
    swap.program.do(f"beside('alloc({300 * MIB})')")
    assert swap.program.do("threads[-1].join(0.3) or threads[-1].is_alive()")
    swap.peer.discarded(seq, message)
    assert swap.program.do("result()") > 0
