"""A process that has closed its own access to the arbiter's socket reconnects to a restarted arbiter, and is limited as before."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gputime.conftest import Node, Program, until
from tests.integration.gputime.test_enforcement import status

PIDFD_GETFD = 438
"""Of every architecture (pidfd_getfd(2))."""


def restart(node: Node) -> None:
    node.arbiter.kill()
    node.arbiter.wait()
    (node.folder / "status.sock").unlink()
    node.start_arbiter()


def listener_of(node: Node, key: str) -> socket.socket:
    """The arbiter's listening socket of a container. While we have it, it is open also when the arbiter is dead, as in one that the kernel is still ending."""
    pid = node.arbiter.pid
    pidfd = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if not str(entry.readlink()).startswith("socket:"):
                continue
            fd = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, int(entry.name), 0)
            assert fd >= 0, "a program may have descriptors of a child of its own"
            sock = socket.socket(fileno=fd)
            name = str(node.grants / key / ".arbiter.sock.new")  # before it is renamed
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname() == name:
                return sock
            sock.close()
    finally:
        os.close(pidfd)
    raise AssertionError(f"no socket listens for {key}")


def processes(node: Node) -> int:
    gpu_time = node.gpu_time("one")
    return 0 if gpu_time is None else gpu_time.processes


@pytest.mark.parametrize(
    "lock_out",
    [
        "lower_descriptors()",
        "use_up_descriptors()",
        pytest.param("change_root({folder!r})", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_a_process_that_can_open_no_file_any_more_reconnects(node: Node, tmp_path: Path, lock_out: str) -> None:
    program = node.run("one", core=20)
    program.do(lock_out.format(folder=str(tmp_path)))
    restart(node)
    until(lambda: processes(node) == 1)
    program.do("launch(20_000_000)")
    until(lambda: node.held(program))
    assert not node.misuses()


def test_a_process_that_can_open_no_file_spends_no_socket_on_an_arbiter_that_is_still_ending(node: Node) -> None:
    """Its last ones: on a busy machine a killed arbiter listens for a while after its connections have ended."""
    program = node.run("one", core=20)
    program.do("lower_descriptors()")
    with listener_of(node, "one") as listener:
        node.arbiter.kill()
        node.arbiter.wait()
        assert select.select([listener], [], [], 0.5)[0] == [], "it connected"
    (node.folder / "status.sock").unlink()
    node.start_arbiter()
    until(lambda: processes(node) == 1)
    program.do("launch(20_000_000)")
    until(lambda: node.held(program))


def test_a_process_that_can_open_no_file_reconnects_to_an_arbiter_that_lives_and_hung_up_on_it(node: Node) -> None:
    program = node.run("one", core=20)
    program.do("lower_descriptors()")
    grant = node.grants / "one/grant"
    text = grant.read_text()
    grant.write_text(text.replace("uid-one", "uid-two"))  # another pod's
    until(lambda: (gpu_time := node.gpu_time("one")) is None or gpu_time.processes == 0)
    until(lambda: processes(node) == 1)


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
def test_a_process_that_changed_its_root_reconnects_where_no_thread_may_keep_it(node: Node, tmp_path: Path) -> None:
    """As under the seccomp profiles of container runtimes."""
    comes_back(node, node.run("one", core=20, FORBIDDEN="unshare"), tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_that_changed_its_root_reconnects_by_proc_where_it_may_clone_no_thread_of_its_own_folder(
    node: Node, with_proc: Path
) -> None:
    comes_back(node, node.run("one", core=20, FORBIDDEN="unshare clone"), with_proc)


def test_a_process_without_a_descriptor_for_the_arbiters_page_gets_it_when_there_is_one(node: Node) -> None:
    program = node.run("one", core=20)
    program.do(
        "allow_descriptors(3)"
    )  # not used up: the page would take the number of a connection that has just ended
    restart(node)
    until(lambda: '"no-page"' in node.log())
    program.do("allow_descriptors(1024)")
    until(lambda: "no-page" not in {one.reason for one in status(node, "one").unenforced} and processes(node) == 1)
