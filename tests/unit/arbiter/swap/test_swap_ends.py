"""A process or the copier ends in the middle of a swap, or does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from arbiter.swap.ability import UNABLE_S
from arbiter.swap.mover import ANSWER_S
from arbiter.swap.orders import SUSPEND_S
from tests.unit.arbiter.swap.node_kit import (
    AWAY,
    CHOSEN,
    GPU,
    GRAIN,
    MADE,
    RESIDENT,
    SimulatedNode,
    contract,
)
from tests.unit.arbiter.swap.pair import Pair, states
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.actions import OverLimit, Report
from vgpu.memory.swap.settings import SwapSettings
from vgpu.protocol.messages import Cancel, SwapIn, Unmap


def test_a_copier_that_ends_in_a_save_leaves_the_block_where_it_was(pair: Pair) -> None:
    pair.to_saving()
    pair.node.copier.kill()
    pair.node.settle(1.0)
    assert states(pair.big) == [RESIDENT] * 4
    assert any(isinstance(order, Cancel) for order in pair.big.orders)
    assert not pair.node.blocked("big")
    pair.node.copier.there = True
    pair.node.settle(10.0)
    assert pair.node.leased("small") == 4 * GRAIN


def test_a_copier_that_ends_in_a_restore_is_followed_by_one_that_restores_again(pair: Pair) -> None:
    pair.to_made()
    pair.node.copier.kill()
    pair.node.settle(3.0)
    assert states(pair.big).count(MADE) == 1
    assert pair.node.blocked("big")
    pair.node.copier.there = True
    pair.node.settle(3.0)
    pair.node.check_all_back()


@pytest.mark.parametrize("when", ["suspended", "saving", "away", "made"])
def test_a_process_that_is_killed_leaves_no_slot_in_use(pair: Pair, when: str) -> None:
    pair.to(when)
    pair.node.kill(pair.big)
    pair.node.settle(5.0)
    slots = pair.node.swaps._pools[GPU].slots
    assert slots is not None
    assert slots.free_bytes == slots.pool_bytes
    assert not pair.node.blocked("big")
    assert when == "made" or pair.node.leased("small") == 4 * GRAIN


def test_filled_that_the_process_never_read_is_sent_again_and_nothing_is_copied_over_new_content(pair: Pair) -> None:
    pair.to_made()
    pair.node.copier.step()
    pair.node.turn()
    pair.big.drop()  # FILLED is in the socket
    assert MADE in states(pair.big)
    pair.node.turn()
    if not pair.node.blocked("big"):
        for block in pair.big.blocks.values():
            pair.big.write(block)
    pair.big.connect()
    pair.node.settle(2.0)
    assert states(pair.big) == [RESIDENT] * 4
    pair.node.check_all_back()


def test_a_process_that_does_not_answer_makes_its_container_unable_and_what_it_chose_stays(pair: Pair) -> None:
    pair.big.deaf = True
    pair.node.settle(ANSWER_S + 1)
    assert "does not answer" in pair.node.swaps.status("big").unable
    assert not pair.node.blocked("big")
    pair.node.settle(15.0)
    assert any(isinstance(notice, OverLimit) and notice.name == "big" for notice in pair.node.swaps.notices())
    pair.big.deaf = False
    pair.node.settle(UNABLE_S + 10)
    assert pair.node.swaps.status("big").unable == ""
    assert CHOSEN not in states(pair.big)
    assert pair.node.leased("small") == 4 * GRAIN


@pytest.mark.parametrize("how", ["deaf", "cannot be suspended"])
def test_a_reclaim_time_out_longer_than_a_failed_order_counts_as_unable_ends_too(tmp_path: Path, how: str) -> None:
    """It is tried again and again meanwhile: that stops the time, and does not begin it anew."""
    node = SimulatedNode(tmp_path, settings=SwapSettings(reclaim_timeout_s=2 * UNABLE_S))
    pair = Pair(node)
    pair.big.deaf = how == "deaf"
    node.blocks.halts = how == "deaf"
    began_s = node.now_s
    over_at_s = None
    while over_at_s is None and node.now_s < began_s + 5 * UNABLE_S:
        node.settle(1.0)
        if any(isinstance(notice, OverLimit) and notice.name == "big" for notice in node.swaps.notices()):
            over_at_s = node.now_s - began_s
    node.close()
    assert over_at_s is not None
    tries_s = 2 * SUSPEND_S if how == "cannot be suspended" else 0
    assert 2 * UNABLE_S + tries_s - 1 <= over_at_s <= 2 * UNABLE_S + tries_s + 15, (
        "time until the suspend does not count"
    )


def test_a_container_that_cannot_be_suspended_is_not_swapped(node: SimulatedNode) -> None:
    node.blocks.halts, node.blocks.obstacle = False, "a process has no channels"
    pair = Pair(node)
    node.settle(6.0)
    assert node.swaps.status("big").unable == "a process has no channels"
    assert states(pair.big) == [RESIDENT] * 4
    assert not node.blocked("big")


def test_a_container_that_runs_again_before_its_block_is_unmapped_keeps_it(pair: Pair) -> None:
    pair.to_saving()
    pair.node.blocks.halts = False
    pair.node.copier.step()
    pair.node.turn()
    pair.big.step()
    pair.node.turn()
    assert states(pair.big) == [RESIDENT] * 4


@pytest.mark.parametrize("when", ["saving", "saved"])
def test_a_container_that_ran_for_a_moment_between_two_turns_keeps_its_block_and_is_swapped_later(
    pair: Pair, when: str
) -> None:
    pair.to_saving()
    if when == "saved":
        pair.node.copier.step()
    pair.node.blocks.suspends += 1
    for block in pair.big.blocks.values():
        pair.big.write(block)
    while pair.node.copier.step():
        pass
    pair.node.turn()
    pair.big.step()
    pair.node.turn()
    assert not any(isinstance(order, Unmap) for order in pair.big.orders)
    assert states(pair.big) == [RESIDENT] * 4
    assert any("was resumed while" in one.reason for one in pair.node.swaps.notices() if isinstance(one, Report))
    pair.node.settle(10.0)
    assert states(pair.big).count(AWAY) == 1
    pair.end_small()
    pair.node.settle(10.0)
    pair.node.check_all_back()


@pytest.mark.parametrize("how", ["exported", "let_go"])
def test_a_block_that_unmapped_does_not_name_is_not_away(node: SimulatedNode, how: str) -> None:
    node.join("big", contract(4, 16))
    node.join("small", contract(4, 16))
    big, small = node.process("big"), node.process("small")
    node.settle(1.0)
    for _ in range(8):
        assert node.request(big, 2) is NodeAnswer.GRANTED
    setattr(big, how, 1)
    assert node.request(small, 4) is NodeAnswer.WAITS
    node.settle(1.0)
    away = [id_ for id_, block in big.blocks.items() if block.state == AWAY]
    assert len(away) == 2 - (how == "let_go"), "another one leaves in its place, where that is needed"
    assert node.swaps.status("big").gpus[0].away_bytes == 2 * GRAIN * len(away)
    assert all(set(order.ids) <= set(away) for order in big.orders if isinstance(order, SwapIn))
    assert node.leased("small") == 4 * GRAIN
    node.swaps.working("big", True)
    node.kill(small)
    node.settle(5.0)
    node.check_all_back()
    assert not big.errors


def test_nothing_is_unmapped_while_the_records_cannot_be_written(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / f".{GPU}.swap.json.new").mkdir()
    pair.node.settle(2.0)
    assert states(pair.big) == [RESIDENT] * 4
    assert any(
        isinstance(one, Report) and "records cannot be written" in one.reason for one in pair.node.swaps.notices()
    )
    (tmp_path / f".{GPU}.swap.json.new").rmdir()
    pair.node.settle(UNABLE_S + 5)
    assert pair.node.leased("small") == 4 * GRAIN


def test_a_copy_that_fails_is_no_copy(pair: Pair) -> None:
    pair.node.copier.fail_next = 1
    pair.node.settle(1.0)
    assert states(pair.big) == [RESIDENT] * 4
    pair.node.settle(10.0)
    assert states(pair.big).count(AWAY) == 1
    pair.node.copier.fail_next = 2
    pair.end_small()
    pair.node.settle(5.0)
    pair.node.check_all_back()


def test_what_could_not_be_made_is_away_as_before(pair: Pair) -> None:
    pair.to_away()
    pair.big.refuse_makes = True
    pair.end_small()
    pair.node.settle(3.0)
    assert pair.node.swaps.status("big").gpus[0].away_bytes == 4 * GRAIN
    assert pair.node.blocked("big")
    pair.big.refuse_makes = False
    pair.node.settle(30.0)
    pair.node.check_all_back()


def test_memory_that_was_away_of_a_process_that_ended_is_not_subtracted_from_the_others(node: SimulatedNode) -> None:
    for name in ("big", "small"):
        node.join(name, contract(4, 16))
    first, second, small = node.process("big"), node.process("big"), node.process("small")
    node.settle(1.0)
    for process in (first, first, first, second):
        assert node.request(process, 4) is NodeAnswer.GRANTED
    node.request(small, 4)
    node.settle(1.0)
    assert states(first).count(AWAY) == 1
    node.kill(first)
    resident, elastic, away = node.swaps._containers["big"].figures(GPU)
    assert resident + elastic - away == 4 * GRAIN, "what the second has is on the GPU"


def test_a_slot_whose_forgotten_job_has_not_ended_is_not_used_again(pair: Pair) -> None:
    pair.to_saving()
    job = pair.node.copier.jobs[0][0]
    pair.big.drop()
    pair.node.turn()
    assert pair.node.copier.jobs, "the copy goes on"
    slot = pair.node.swaps._pools[GPU].take(job.bytes)
    assert slot is not None
    assert slot.offset != job.slot_offset
    pair.node.copier.step()
    pair.node.turn()
    again = pair.node.swaps._pools[GPU].take(job.bytes)
    assert again is not None
    assert again.offset == job.slot_offset
