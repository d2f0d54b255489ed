"""The arbiter is killed in the middle of a swap, and the next one knows what is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.arbiter.swap.node_kit import (
    AWAY,
    GPU,
    GRAIN,
    MADE,
    RESIDENT,
    SimulatedNode,
    contract,
)
from tests.unit.arbiter.swap.pair import Pair, states
from vgpu.memory.swap.actions import Stranded


@pytest.mark.parametrize("when", ["suspended", "saving", "away", "made"])
def test_an_arbiter_that_is_killed_is_followed_by_one_that_knows_what_is_away(pair: Pair, when: str) -> None:
    pair.to(when)
    away = AWAY in states(pair.big) or MADE in states(pair.big)
    pair.node.blocks.names.clear()
    pair.node.kill_arbiter()
    assert pair.node.blocked("big") == away, "from its start, before any process has connected"
    pair.connect()
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
    pair.connect()
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


def test_jobs_of_an_arbiter_before_end_before_the_next_one_has_any(pair: Pair) -> None:
    pair.to_saving()
    pair.node.kill_arbiter()
    pair.connect()
    pair.node.request(pair.small, 4)
    pair.node.settle(2.0)
    assert states(pair.big).count(AWAY) == 1


def test_an_arbiter_killed_after_filled_is_followed_by_one_that_copies_nothing_over_new_content(pair: Pair) -> None:
    pair.to_made()
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
    assert not node.swaps._decisions.busy
    assert node.swaps._pools[GPU].slots.free_bytes == node.pool * GRAIN  # type: ignore[union-attr]
