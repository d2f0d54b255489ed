"""A process that has locked itself out of what it needed to meet the arbiter comes back to one that was restarted, and is limited as before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.turns.conftest import Node, until
from tests.integration.turns.test_enforcement import status


def restart(node: Node) -> None:
    node.arbiter.kill()
    node.arbiter.wait()
    (node.folder / "status.sock").unlink()
    node.start_arbiter()


def processes(node: Node) -> int:
    turn = node.turn("one")
    return 0 if turn is None else turn.processes


@pytest.mark.parametrize(
    "lock_out",
    [
        "lower_descriptors()",
        "use_up_descriptors()",
        pytest.param("change_root({folder!r})", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_who_can_open_nothing_any_more_comes_back(node: Node, tmp_path: Path, lock_out: str) -> None:
    program = node.run("one", core=20)
    program.do(lock_out.format(folder=str(tmp_path)))
    restart(node)
    until(lambda: processes(node) == 1)
    program.do("launch(20_000_000)")
    until(lambda: node.held(program))
    assert not node.misuses()


def test_who_had_no_descriptor_for_the_arbiters_page_gets_it_when_there_is_one(node: Node) -> None:
    program = node.run("one", core=20)
    program.do("use_up_descriptors()")
    restart(node)
    until(lambda: '"no-page"' in node.log())
    program.do("os.closerange(100, 200)")
    until(lambda: "no-page" not in {one.reason for one in status(node, "one").unenforced} and processes(node) == 1)
