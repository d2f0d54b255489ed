"""The file of the pool is another one than before: nothing that was saved to the first is restored from the second."""

from __future__ import annotations

import pytest

from arbiter.swap.records_file import RecordsFile
from tests.unit.arbiter.swap.node_kit import AWAY, BOOT, GPU, GRAIN, RESIDENT, SimulatedNode
from tests.unit.arbiter.swap.pair import Pair, states
from vgpu.memory.swap.actions import Stranded


@pytest.fixture
def pair(node: SimulatedNode) -> Pair:
    return Pair(node)


def connect_all(node: SimulatedNode) -> None:
    for process in node.processes.values():
        process.step()
        process.connect()
        node.use(process.name)


def check_lost(pair: Pair) -> None:
    """What is away is lost for good, its container stays blocked and is reported once, and its slots are free."""
    pair.node.settle(20.0)
    assert pair.node.blocked("big")
    assert "away, and no record names them" in pair.node.swaps.status("big").unable or (
        "no longer has" in pair.node.swaps.status("big").unable
    )
    lost = [one.name for one in pair.node.swaps.notices() if isinstance(one, Stranded)]
    assert lost == ["big"]
    assert RESIDENT in states(pair.big)
    assert set(states(pair.big)) != {RESIDENT}
    pool = pair.node.swaps._pools[GPU]
    assert pool.ready
    assert pool.slots is not None
    assert pool.slots.free_bytes == pool.slots.pool_bytes
    assert RecordsFile(pair.node.folder, GPU, BOOT).read().records == ()
    assert not pool._held


@pytest.mark.parametrize("when", ["away", "made"])
def test_what_was_away_is_lost_with_the_pool_while_the_arbiter_runs(pair: Pair, when: str) -> None:
    pair.to(when)
    pair.node.copier.lose_pool()
    pair.node.settle(2.0)
    pair.node.copier.there = True
    check_lost(pair)
    pair.node.kill(pair.big)
    pair.node.settle(1.0)
    assert not pair.node.blocked("big")


@pytest.mark.parametrize("when", ["away", "made"])
def test_an_arbiter_that_starts_after_the_pool_was_lost_restores_nothing(pair: Pair, when: str) -> None:
    pair.to(when)
    pair.node.copier.lose_pool()
    pair.node.kill_arbiter()
    connect_all(pair.node)
    pair.node.settle(1.0)
    pair.node.copier.there = True
    check_lost(pair)


def test_the_same_file_again_is_the_same_pool(pair: Pair) -> None:
    pair.to_away()
    pair.node.copier.kill()
    pair.node.kill_arbiter()
    connect_all(pair.node)
    pair.node.copier.there = True
    pair.end_small()
    pair.node.settle(5.0)
    pair.node.check_all_back()


def test_a_block_that_is_saved_to_a_lost_pool_stays_on_the_gpu(pair: Pair) -> None:
    pair.to_saving()
    pair.node.blocks.halts = False  # so that it is not unmapped at once
    pair.node.copier.step()
    pair.node.copier.lose_pool()
    pair.node.copier.there = True
    pair.node.now_s += 1.0
    pair.node.turn()
    pair.node.blocks.halts = True
    pair.node.settle(0.2)
    assert set(states(pair.big)) <= {RESIDENT, "chosen"}
    pair.node.settle(10.0)
    assert pair.node.leased("small") == 4 * GRAIN
    pair.end_small()
    pair.node.settle(5.0)
    pair.node.check_all_back()


@pytest.mark.parametrize("answers", [True, False])
def test_a_pool_is_lost_while_a_process_owes_an_answer(pair: Pair, answers: bool) -> None:
    """UNMAP is on its way: the block is lost if it is carried out, and is not named again."""
    pair.to_saving()
    pair.node.copier.step()
    pair.node.turn()
    pair.node.copier.lose_pool()
    pair.node.copier.there = True
    pair.node.now_s += 1.0
    pair.node.turn()
    pair.node.turn()
    if not answers:
        pair.big.drop()
        pair.node.turn()
        assert states(pair.big) == [RESIDENT] * 4
        pair.big.connect()
        pair.node.settle(20.0)
        assert pair.node.swaps.status("big").unable == ""
        pair.end_small()
        pair.node.settle(5.0)
        pair.node.check_all_back()
        return
    pair.big.step()
    assert AWAY in states(pair.big)
    check_lost(pair)


def test_content_that_is_back_on_the_gpu_outlives_the_pool(pair: Pair) -> None:
    pair.to_made()
    pair.node.copier.step()
    pair.node.turn()
    assert not pair.node.blocked("big")
    pair.node.copier.lose_pool()
    pair.node.copier.there = True
    pair.node.settle(5.0)
    pair.node.check_all_back()
    assert not [one for one in pair.node.swaps.notices() if isinstance(one, Stranded)]


def test_a_copier_that_states_no_file_is_not_used(node: SimulatedNode) -> None:
    """One of an earlier release: its pool might be another than the one of the records."""
    node.copier.file = None
    node.swaps.turn()
    node.settle(2.0)
    pool = node.swaps._pools[GPU]
    assert not pool.ready
    assert "does not state which file its pool is" in pool.reason
