"""A process that has locked itself out of what it needed to meet the arbiter comes back to one that was restarted, and is limited as before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.turns.conftest import Node, Program, until
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


@pytest.fixture
def with_proc(tmp_path: Path) -> Iterator[Path]:
    """A folder that a program can make its root, with /proc in it."""
    (tmp_path / "proc").mkdir()
    subprocess.run(["mount", "-t", "proc", "proc", str(tmp_path / "proc")], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path / "proc")], check=True)


def comes_back(node: Node, program: Program, root: Path) -> None:
    program.do(f"change_root({str(root)!r})")
    restart(node)
    until(lambda: processes(node) == 1)
    program.do("launch(20_000_000)")
    until(lambda: node.held(program))
    assert status(node, "one").unenforced == ()
    assert not node.misuses()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_who_changed_its_root_comes_back_where_no_thread_may_keep_it(node: Node, tmp_path: Path) -> None:
    """As under the seccomp profiles of container runtimes."""
    comes_back(node, node.run("one", core=20, FORBIDDEN="unshare"), tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_who_changed_its_root_comes_back_by_proc_where_it_may_clone_no_thread_of_its_own_folder(
    node: Node, with_proc: Path
) -> None:
    comes_back(node, node.run("one", core=20, FORBIDDEN="unshare clone"), with_proc)


def test_who_had_no_descriptor_for_the_arbiters_page_gets_it_when_there_is_one(node: Node) -> None:
    program = node.run("one", core=20)
    program.do("use_up_descriptors()")
    restart(node)
    until(lambda: '"no-page"' in node.log())
    program.do("os.closerange(100, 200)")
    until(lambda: "no-page" not in {one.reason for one in status(node, "one").unenforced} and processes(node) == 1)
