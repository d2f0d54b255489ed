"""Whether a process has the library in its memory, by its maps: an answer in time, whatever the process does."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvml import mapped
from nvml.local import LocalAnswers
from nvml.mapped import STUCK, MapsCheck, mapped_in, started_at
from nvml.messages import MOST_MAPS, DescriptorsReply, DescriptorsRequest, ErrorReply, MapsReply, MapsRequest
from vgpu.api.contract import LIBRARY
from vgpu.api.process_stat import process_stat

LINE = "7f0000000000-7f0000001000 r-xp 00000000 08:01 1234                       {}\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "7").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("maps", "has"),
    [
        (LINE.format(f"/run/tangram/{LIBRARY}"), True),
        (LINE.format(f"/run/tangram/{LIBRARY} (deleted)"), True),
        (LINE.format("/usr/lib/libc.so.6") * 3000 + LINE.format(f"/x/{LIBRARY}"), True),
        (LINE.format("/usr/lib/libc.so.6"), False),
        (LINE.format(f"/run/tangram/{LIBRARY}.old"), False),
        (LINE.format(f"/run/tangram/not{LIBRARY}"), False),
        (LINE.format(""), False),
        ("", None),
        (None, None),
    ],
)
def test_the_library_is_there_by_the_name_of_a_mapped_file(proc: Path, maps: str | None, *, has: bool | None) -> None:
    if maps is not None:
        (proc / "7" / "maps").write_text(maps)
    assert mapped_in(7, proc) is has


def test_maps_without_end_show_no_library(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LONGEST", 3 * mapped.CHUNK)
    (proc / "7" / "maps").write_text(LINE.format("x") * 9000 + LINE.format(f"/x/{LIBRARY}"))
    assert mapped_in(7, proc) is False


def test_a_real_process_that_maps_it_has_it_and_one_that_is_gone_reports_nothing(tmp_path: Path) -> None:
    me = os.getpid(), started_at(os.getpid())
    assert MapsCheck().of([me]) == (False,)
    path = tmp_path / LIBRARY
    path.write_bytes(b"x" * mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert MapsCheck().of([me, (me[0], me[1] + 1)]) == (True, None), (
            "the second is another process that had the pid"
        )
    child = subprocess.Popen(["true"])
    child.wait()
    assert MapsCheck().of([(child.pid, 1)]) == (None,)


FIRST_ENDED = """
import ctypes, sys, threading, time
exec(sys.argv[1])
threading.Thread(target=lambda: (print("runs", flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("has", [True, False])
def test_a_process_whose_first_thread_has_ended_is_read_by_the_others(tmp_path: Path, *, has: bool) -> None:
    """The kernel shows no maps of the first thread then."""
    path = tmp_path / LIBRARY
    path.write_bytes(b"x" * mmap.PAGESIZE)
    maps = (
        f"import mmap; file = open({str(path)!r}, 'rb'); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)"
        if has
        else ""
    )
    with subprocess.Popen([sys.executable, "-c", FIRST_ENDED, maps], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"runs\n"
        for _ in range(2000):
            if (stat := process_stat(Path(f"/proc/{child.pid}/stat").read_bytes())) and stat.ended:
                break
            time.sleep(0.005)
        assert Path(f"/proc/{child.pid}/maps").read_bytes() == b""
        assert MapsCheck().of([(child.pid, started_at(child.pid))]) == (has,)
        child.kill()


class Stuck:
    """Processes whose maps cannot be read until `over`."""

    def __init__(self) -> None:
        self.over, self.begun = threading.Event(), 0

    def look(self, pid: int) -> bool | None:
        if pid < 100:
            self.begun += 1
            self.over.wait(30)
        return True


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.over.set()


def test_a_process_that_keeps_its_maps_locked_costs_one_thread_and_no_other_its_answer(stuck: Stuck) -> None:
    looks = MapsCheck(stuck.look, lambda _: 1, wait_s=0.05)
    for _ in range(5):
        assert looks.of([(7, 1), (100, 1)])[0] is None
    assert stuck.begun == 1
    assert MapsCheck(stuck.look, lambda _: 1).of([(100, 1)]) == (True,)


def test_many_of_them_cost_a_few_threads(stuck: Stuck) -> None:
    looks = MapsCheck(stuck.look, lambda _: 1, wait_s=0.05)
    for pid in range(3 * STUCK):
        assert looks.of([(pid, 1)]) == (None,)
    assert stuck.begun == STUCK


def test_a_request_names_so_many_processes_at_most() -> None:
    local = LocalAnswers(MapsCheck(lambda _: True, lambda _: 1), MapsCheck(lambda _: False, lambda _: 1))
    assert local.answer(MapsRequest(((7, 1), (8, 2)))) == MapsReply((True, None))
    assert local.answer(DescriptorsRequest(((7, 1), (8, 2)))) == DescriptorsReply((False, None))
    for kind in (MapsRequest, DescriptorsRequest):
        assert isinstance(local.answer(kind(((7, 1),) * (MOST_MAPS + 1))), ErrorReply)
