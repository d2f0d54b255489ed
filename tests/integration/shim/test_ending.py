"""A program ends in every way there is, with work under way and threads in the middle of calls: it ends at once, and its memory is free."""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import Stage
from tests.integration.shim.robust import run

ROUNDS = 4
WAYS = ("return", "exit", "thread", "quick", "_exit", "close")


@pytest.mark.parametrize("way", WAYS)
def test_a_program_may_end_while_its_threads_are_in_calls(stage: Stage, way: str) -> None:
    for _ in range(ROUNDS):
        ended = run(stage, "ending", way, "busy", seconds=10)
        assert (ended.status, ended.codes) == (0, [0]), ended.errors
