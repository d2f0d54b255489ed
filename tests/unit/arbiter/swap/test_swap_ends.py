"""A process, the copier or the arbiter ends in the middle of a swap, or does not answer."""

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
    SimulatedProcess,
    contract,
)
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.actions import OverLimit, Report, Stranded
from vgpu.memory.swap.settings import SwapSettings
from vgpu.protocol.messages import Cancel, SwapIn, Unmap


class Pair:
    """`big` has the whole GPU, and `small` waits for its guarantee: so 4 grains of `big` are to leave."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        for name in ("big", "small"):
            node.join(name, contract(4, 16))
        self.big, self.small = node.process("big"), node.process("small")
        node.settle(1.0)
        for _ in range(4):
            assert node.request(self.big, 4) is NodeAnswer.GRANTED
        assert node.request(self.small, 4) is NodeAnswer.WAITS
        node.turn()
        node.now_s += 0.05

    def to_saving(self) -> None:
        """Until the copier has a job."""
        self.node.turn()
        self.big.step()
        self.node.turn()
        assert self.node.copier.jobs

    def to_away(self) -> None:
        self.node.settle(1.0)
        assert not self.node.requests
        assert states(self.big).count(AWAY) == 1

    def end_small(self) -> None:
        self.node.kill(self.small)
        self.node.swaps.working("big", True)


def states(process: SimulatedProcess) -> list[str]:
    return [block.state for block in process.blocks.values()]


@pytest.fixture
def pair(node: SimulatedNode) -> Pair:
    return Pair(node)


def to_made(pair: Pair) -> None:
    pair.to_away()
    pair.end_small()
    for _ in range(50):
        pair.node.turn()
        if pair.node.copier.jobs:
            return
        pair.big.step()
        pair.node.now_s += 0.01
    raise AssertionError("nothing is restored")


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
    to_made(pair)
    pair.node.copier.kill()
    pair.node.settle(3.0)
    assert states(pair.big).count(MADE) == 1
    assert pair.node.blocked("big")
    pair.node.copier.there = True
    pair.node.settle(3.0)
    pair.node.check_all_back()


@pytest.mark.parametrize("when", ["suspended", "saving", "away", "made"])
def test_a_process_that_is_killed_leaves_no_slot_in_use(pair: Pair, when: str) -> None:
    {"suspended": lambda: None, "saving": pair.to_saving, "away": pair.to_away, "made": lambda: to_made(pair)}[when]()
    pair.node.kill(pair.big)
    pair.node.settle(5.0)
    slots = pair.node.swaps._pools[GPU].slots
    assert slots is not None
    assert slots.free_bytes == slots.pool_bytes
    assert not pair.node.blocked("big")
    assert when == "made" or pair.node.leased("small") == 4 * GRAIN


@pytest.mark.parametrize("when", ["suspended", "saving", "away", "made"])
def test_an_arbiter_that_is_killed_is_followed_by_one_that_knows_what_is_away(pair: Pair, when: str) -> None:
    {"suspended": lambda: None, "saving": pair.to_saving, "away": pair.to_away, "made": lambda: to_made(pair)}[when]()
    away = AWAY in states(pair.big) or MADE in states(pair.big)
    pair.node.blocks.names.clear()
    pair.node.kill_arbiter()
    assert pair.node.blocked("big") == away, "from its start, before any process has connected"
    for process in pair.node.processes.values():
        process.step()
        process.connect()
        pair.node.use(process.name)
    pair.node.settle(1.0)
    assert (AWAY in states(pair.big)) <= pair.node.blocked("big")
    if when != "made":
        pair.end_small()
    pair.node.settle(10.0)
    pair.node.check_all_back()


def test_unmapped_that_the_arbiter_never_read_is_found_out_by_what_the_process_states(pair: Pair) -> None:
    pair.to_saving()
    pair.node.copier.step()
    pair.node.turn()
    pair.big.step()
    assert AWAY in states(pair.big)
    pair.node.kill_arbiter()
    assert pair.node.blocked("big")
    for process in pair.node.processes.values():
        process.step()
        process.connect()
        pair.node.use(process.name)
    pair.node.settle(1.0)
    assert pair.node.swaps.status("big").gpus[0].away_bytes == 4 * GRAIN
    pair.end_small()
    pair.node.settle(5.0)
    pair.node.check_all_back()


def test_an_unmap_that_never_arrived_costs_nothing(pair: Pair) -> None:
    pair.to_saving()
    pair.node.copier.step()
    pair.node.turn()
    pair.big.drop()
    pair.node.kill_arbiter()
    assert pair.node.blocked("big"), "until the process has stated that nothing is away"
    pair.big.connect()
    pair.node.use("big")
    pair.node.settle(1.0)
    assert not pair.node.blocked("big")
    assert states(pair.big) == [RESIDENT] * 4


def test_filled_that_the_process_never_read_is_sent_again_and_nothing_is_copied_over_new_content(pair: Pair) -> None:
    to_made(pair)
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


def test_memory_that_no_record_names_is_lost_and_its_container_stays_blocked(pair: Pair, tmp_path: Path) -> None:
    pair.to_away()
    pair.node.kill_arbiter()
    pair.node.swaps.close()
    (tmp_path / f"{GPU}.swap.json").write_text("damaged")
    pair.node.start()
    for process in pair.node.processes.values():
        process.connect()
        pair.node.use(process.name)
    pair.node.settle(5.0)
    assert pair.node.blocked("big")
    assert "no record names them" in pair.node.swaps.status("big").unable
    lost = [one for one in pair.node.swaps.notices() if isinstance(one, Stranded)]
    assert [one.name for one in lost] == ["big"]
    pair.node.kill(pair.big)
    pair.node.settle(1.0)
    assert not pair.node.blocked("big")


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


def test_blocks_that_came_back_are_not_taken_for_those_that_did_not_after_a_restart(node: SimulatedNode) -> None:
    """Both are as large: how much the process states to be away does not say which."""
    for name in ("big", "small"):
        node.join(name, contract(4, 16))
    big, small = node.process("big"), node.process("small")
    node.settle(1.0)
    for _ in range(8):
        node.request(big, 2)
    node.request(small, 4)
    node.settle(1.0)
    assert states(big).count(AWAY) == 2
    node.kill(small)
    node.swaps.working("big", True)
    for _ in range(60):
        node.turn()
        if states(big).count(MADE) == 2 and node.copier.jobs:
            break
        big.step()
        node.now_s += 0.01
    node.copier.step()
    node.turn()
    while big.step():
        pass
    assert sorted(states(big)).count(MADE) == 1
    node.kill_arbiter()
    big.step()
    big.connect()
    node.use("big")
    node.swaps.working("big", True)
    node.settle(5.0)
    node.check_all_back()


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


def test_jobs_of_an_arbiter_before_end_before_the_next_one_has_any(pair: Pair) -> None:
    pair.to_saving()
    pair.node.kill_arbiter()
    for process in pair.node.processes.values():
        process.step()
        process.connect()
        pair.node.use(process.name)
    pair.node.request(pair.small, 4)
    pair.node.settle(2.0)
    assert states(pair.big).count(AWAY) == 1


def test_an_arbiter_killed_after_filled_is_followed_by_one_that_copies_nothing_over_new_content(pair: Pair) -> None:
    to_made(pair)
    pair.node.copier.step()
    pair.node.turn()
    assert not pair.node.blocked("big"), "it may run: its content is complete"
    assert MADE in states(pair.big)
    pair.big.run()
    pair.node.kill_arbiter()
    assert pair.node.blocked("big")
    pair.big.connect()
    pair.node.use("big")
    pair.node.settle(5.0)
    pair.node.check_all_back()


def test_a_container_that_was_deleted_while_there_was_no_arbiter_is_blocked_no_longer(pair: Pair) -> None:
    """Else the next arbiter would count something as moving for as long as it runs."""
    pair.to_away()
    node = pair.node
    del node.contracts["big"]
    pair.big.kill()
    del node.processes[pair.big.pid]
    node.kill_arbiter()
    assert node.blocked("big")
    node.settle(2.0)
    assert not node.blocked("big")
    assert not node.swaps._busy
    assert node.swaps._pools[GPU].slots.free_bytes == node.pool * GRAIN  # type: ignore[union-attr]
