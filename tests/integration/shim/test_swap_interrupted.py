"""A swap that something interrupts: the arbiter's death in each step, its silence, a fork, another program in the same process."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from tests.integration.shim.conftest import MIB, wait_for
from tests.integration.shim.swap_kit import (
    OWNER,
    UNKNOWN,
    Swap,
    swap,
)
from tests.signals import send_signal
from vgpu.protocol import wire

__all__ = ["swap"]

STEPS = ("blocks", "saved", "unmapped", "made", "filled")


@pytest.mark.parametrize("step", STEPS)
def test_an_arbiter_that_dies_in_any_step_loses_nothing(swap: Swap, step: str) -> None:
    pieces = [swap.written(mib, mib) for mib in (6, 20)]
    swap.arbiter.suspend(off=True)
    swap.suspend()
    blocks = swap.out()
    saved = step in STEPS[2:]
    if step == "blocks":
        swap.close(*blocks)
    else:
        swap.save(blocks)
    if saved:
        swap.unmap(blocks)
    if step in ("made", "filled"):
        swap.close(*swap.peer.lent(wire.SwapIn(0, tuple(block.id for block in blocks))))
    if step == "filled":
        swap.restore(swap.peer.lent(wire.SwapIn(0, tuple(block.id for block in blocks))))
        swap.peer.send(wire.Filled(0, tuple(block.id for block in blocks)))
        swap.settle()
    swap.arbiter_dies()
    away = step in ("unmapped", "made")
    if not away:
        wait_for(lambda: not swap.halted())
    peer = swap.arbiter_comes()
    assert peer.state(lambda _: True).away_bytes == (26 * MIB if away else 0)
    wait_for(lambda: swap.arbiter.channels)
    assert swap.arbiter.channels[0].away is away
    if away:
        assert swap.halted(), "it must not run"
        swap.back(blocks)
        swap.settle()
        swap.suspend(on=False)
    assert peer.order(wire.Unmap(0, (blocks[0].id,))) == UNKNOWN, "what was chosen by another arbiter stays"
    assert swap.wrong(*pieces) == 0


def test_an_unmap_of_an_arbiter_that_died_is_not_carried_out_after_the_process_resumed(swap: Swap) -> None:
    """Both connections end, and the order is still unread: the process may run again, so the saved content may be old."""
    piece = swap.written(6, 1)
    swap.suspend()
    blocks = swap.out()
    swap.save(blocks)
    send_signal(swap.program.process.pid, signal.SIGSTOP)
    swap.peer.drain()
    swap.peer.send(wire.Unmap(0, (blocks[0].id,)))
    swap.arbiter_dies()
    os.kill(swap.program.process.pid, signal.SIGCONT)
    peer = swap.arbiter_comes()
    assert peer.state(lambda _: True).away_bytes == 0
    assert swap.wrong(piece) == 0


def test_a_silent_arbiter_does_not_make_a_process_run_whose_memory_is_away(swap: Swap) -> None:
    piece = swap.written(6, 1)
    swap.arbiter.suspend(off=True)
    swap.suspend()
    blocks = swap.away()
    threading.Event().wait(1.5)  # more than the 600 ms after which a process resumes itself
    assert swap.halted()
    assert not swap.arbiter.resumed
    swap.back(blocks)
    wait_for(lambda: not swap.halted())
    assert swap.wrong(piece) == 0


def test_a_child_has_no_memory_that_is_away_and_the_parent_keeps_its_own(swap: Swap) -> None:
    piece = swap.written(6, 1)
    blocks = swap.away()
    assert swap.program.do("(lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit(0))(os.fork())") == 0
    swap.back(blocks)
    swap.settle()
    assert swap.wrong(piece) == 0


def test_no_block_of_a_program_that_is_executed_anew_has_the_number_of_one_before(swap: Swap) -> None:
    swap.written(6, 1)
    first = swap.out()
    swap.close(*first)
    words = f"__import__('os').execv({sys.executable!r}, [{sys.executable!r}, {str(OWNER)!r}])"
    swap.program.send(words)
    assert swap.program.answer() == "ready"
    swap.peer = swap.arbiter.burst()
    swap.written(6, 1)
    second = swap.out()
    swap.close(*second)
    assert second[0].id > first[0].id
