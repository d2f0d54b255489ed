"""Whether a process has a GPU open, by its descriptors. No machine of the tests has a GPU: /dev/null stands for one by its number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvml import descriptors
from nvml.descriptors import MAJOR, NO_GPU, gpu_open, opens
from nvml.kcmp import is_ours, share_files
from nvml.mapped import MapsCheck, started_at
from tests.unit.nvml.stand import wait_for
from tests.unit.nvml.test_mapped import FIRST_ENDED
from vgpu.api.process_stat import process_stat

MEMORY = os.major(Path("/dev/null").stat().st_rdev)
NOT_OPEN = 511
"""A major number that nothing has."""
UNSHARED = """
import ctypes, sys, threading
CLONE_FILES = 0x400
def opens():
    assert ctypes.CDLL(None).unshare(CLONE_FILES) == 0
    file = open("/dev/null")
    print("runs", flush=True)
    over.wait()
over = threading.Event()
threading.Thread(target=opens, daemon=True).start()
sys.stdin.read()
"""
MANY = """
import sys, threading
files = [open("/etc/passwd") for _ in range(100)]
over = threading.Event()
for _ in range(200):
    threading.Thread(target=over.wait, daemon=True).start()
last = open(sys.argv[1])
print("runs", flush=True)
sys.stdin.read()
"""
PROGRAM = "import sys; file = open(sys.argv[1]); print('runs', flush=True); sys.stdin.read()"


def started(*words: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"runs\n"
    return child


def ended(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


@pytest.mark.parametrize(("file", "has"), [("/dev/null", True), ("/etc/passwd", False)])
def test_a_device_is_known_by_its_number_whatever_it_is_called(tmp_path: Path, file: str, *, has: bool) -> None:
    named = tmp_path / "innocent"
    named.symlink_to(file)
    child = started(PROGRAM, str(named))
    try:
        assert gpu_open(child.pid, major=MEMORY) is has
        assert gpu_open(child.pid, major=NOT_OPEN) is False
        looks = MapsCheck(lambda pid: gpu_open(pid, major=MEMORY))
        since = started_at(child.pid)
        assert looks.of([(child.pid, since), (child.pid, since + 1)]) == (has, None)
    finally:
        ended(child)
    assert gpu_open(child.pid, major=MEMORY) is None, "it is gone"


def test_the_control_device_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7/task/7/fd").mkdir(parents=True)
    (tmp_path / "7/task/7/fd" / "0").symlink_to("/dev/null")
    assert gpu_open(7, tmp_path, MEMORY) is True
    assert gpu_open(7, tmp_path) is False
    monkeypatch.setattr(descriptors, "NO_GPU", os.minor(Path("/dev/null").stat().st_rdev))
    assert gpu_open(7, tmp_path, MEMORY) is False
    assert (MAJOR, NO_GPU) == (195, 254)


def test_more_descriptors_than_the_limit_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "MOST", 4)  # three descriptors and their thread
    (tmp_path / "7/task/7/fd").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "7/task/7/fd" / str(number)).symlink_to("/etc/passwd")
    assert gpu_open(7, tmp_path, MEMORY) is False
    (tmp_path / "7/task/7/fd" / "3").symlink_to("/etc/passwd")
    assert gpu_open(7, tmp_path, MEMORY) is None


def test_a_descriptor_that_is_closed_meanwhile_is_passed_over_and_a_process_without_any_is_unknown(
    tmp_path: Path,
) -> None:
    (tmp_path / "7/task/7/fd").mkdir(parents=True)
    assert gpu_open(7, tmp_path, MEMORY) is None
    (tmp_path / "7/task/7/fd" / "0").symlink_to(tmp_path / "gone")
    assert gpu_open(7, tmp_path, MEMORY) is False
    (tmp_path / "7/task/7/fd" / "1").symlink_to("/dev/null")
    assert gpu_open(7, tmp_path, MEMORY) is True


def test_a_process_whose_first_thread_has_ended_is_read_by_the_others() -> None:
    child = started(FIRST_ENDED, "file = open('/dev/null')")
    try:
        wait_for(lambda: (of := process_stat(Path(f"/proc/{child.pid}/stat").read_bytes())) and of.ended)
        assert gpu_open(child.pid, major=MEMORY) is True
        assert gpu_open(child.pid, major=NOT_OPEN) is False
    finally:
        ended(child)


def test_a_thread_with_descriptors_of_its_own_hides_nothing() -> None:
    child = started(UNSHARED)
    try:
        first = [file.resolve() for file in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert Path("/dev/null") not in first
        assert gpu_open(child.pid, major=MEMORY) is True
        assert gpu_open(child.pid, major=NOT_OPEN) is False
    finally:
        ended(child)


@pytest.mark.parametrize("refused", [False, True])
def test_the_table_of_many_threads_is_read_once_where_the_kernel_compares_tables(
    monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    read: list[str] = []
    numbers = descriptors._numbers
    monkeypatch.setattr(descriptors, "_numbers", lambda path: (read.append(path), numbers(path))[1])
    if refused:
        monkeypatch.setattr(descriptors, "share_files", lambda *_: None)
    child = started(MANY, "/dev/null")
    try:
        assert gpu_open(child.pid, major=MEMORY) is True, "among the first descriptors"
        read.clear()
        assert gpu_open(child.pid, major=NOT_OPEN) is (None if refused else False)
        assert opens(child.pid, 0, major=NOT_OPEN) is refused
        assert len(read) > 100
        assert (len(read) < 300) is not refused
    finally:
        ended(child)


def test_a_thread_with_descriptors_of_its_own_is_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of 200, whichever it is in the folder."""
    many = UNSHARED.replace(
        "over = threading.Event()\n",
        "over = threading.Event()\nfor _ in range(200): threading.Thread(target=over.wait, daemon=True).start()\n",
    )
    assert many != UNSHARED
    child = started(many)
    try:
        assert gpu_open(child.pid, major=MEMORY) is True
        monkeypatch.setattr(descriptors, "share_files", lambda *_: True)
        assert gpu_open(child.pid, major=MEMORY) is False, "else this shows nothing"
    finally:
        ended(child)


def test_tables_are_compared_by_the_kernel() -> None:
    child = started(UNSHARED)
    try:
        first, own = sorted(int(one.name) for one in Path(f"/proc/{child.pid}/task").iterdir())
        assert (share_files(first, first), share_files(first, own)) == (True, False)
    finally:
        ended(child)
    assert share_files(os.getpid(), child.pid) is None, "it is gone"


def test_threads_of_another_process_namespace_are_not_compared(tmp_path: Path) -> None:
    """Their IDs mean other threads here."""
    assert is_ours(Path("/proc"))
    assert not is_ours(tmp_path)
    for name, ids in (("outer", f"4711\t{os.getpid()}"), ("another", "4711"), ("ours", str(os.getpid()))):
        (tmp_path / name / "self").mkdir(parents=True)
        (tmp_path / name / "self/status").write_text(f"Name:\ta\nNSpid:\t{ids}\n")
    assert [is_ours(tmp_path / name) for name in ("outer", "another", "ours")] == [False, False, True]


def test_a_process_that_may_not_be_read_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7/task/7/fd").mkdir(parents=True)
    (tmp_path / "7/task/7/fd/0").symlink_to("/dev/null")

    def refuse(path: str | Path) -> object:
        raise PermissionError(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert gpu_open(7, tmp_path, MEMORY) is None


def test_one_gpu_is_open_by_its_number_and_no_other() -> None:
    """Of a program that has few descriptors: this one may have more than the limit."""
    null = Path("/dev/null").stat().st_rdev
    child = started(PROGRAM, "/dev/null")
    try:
        assert opens(child.pid, os.minor(null), major=os.major(null))
        assert not opens(child.pid, os.minor(null) + 100, major=os.major(null))
        assert not opens(child.pid, os.minor(null), major=MAJOR)
    finally:
        ended(child)


def test_a_process_that_is_gone_has_no_gpu_open(tmp_path: Path) -> None:
    assert not opens(1, 0, tmp_path)


def test_a_process_that_may_not_be_read_may_have_the_gpu_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str | Path) -> object:
        raise PermissionError(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert opens(7, 0, tmp_path)


def test_a_process_with_too_many_descriptors_may_have_the_gpu_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "MOST", 4)
    (tmp_path / "7/task/7/fd").mkdir(parents=True)
    for number in range(4):
        assert not opens(7, 0, tmp_path)
        (tmp_path / "7/task/7/fd" / str(number)).symlink_to("/etc/passwd")
    assert opens(7, 0, tmp_path)
