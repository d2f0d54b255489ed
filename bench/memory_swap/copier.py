"""What the copier takes: copies each way and both, blocks of four forms, and its start.

    python3 bench/memory_swap/copier.py OUT.csv [--only copies,both,start] [--repeat 3] [--budget 500] [--fake]

The first GPU, gcc, root for huge pages and mounts. Two processes: load.c owns the blocks, tangram-copier copies them, and this one is the arbiter. Nothing is
suspended here: what a suspend changes is in mechanism/. Each repeat of `copies` and `both` has its baseline beside it, a plain allocation and pinned memory copied in the
same command; `of_plain` is the ratio to it. Rows of a form are per GiB, and are written as they come.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from arbiter.swap.copier import Copier
from bench.memory_swap.copier_sizes import Sizes
from bench.memory_swap.pool_folder import pool_folder
from vgpu.protocol.copier import GRAIN_BYTES, Done, Result, State

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB, GIB = 2**20, 2**30
PARTS = ("copies", "both", "start")
COLUMNS = ("part", "case", "repeat", "figure", "value", "unit", "gpu", "driver", "date", "commit")
ANSWER_S = 120.0


class Table:
    """Rows in a CSV, and on stdout."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._writer.writeheader()
        self._about = about

    def add(self, part: str, case: str, repeat: int, figures: dict[str, tuple[float, str]]) -> None:
        for figure, (value, unit) in figures.items():
            row = {
                "part": part,
                "case": case,
                "repeat": repeat,
                "figure": figure,
                "value": f"{value:.5g}",
                "unit": unit,
            }
            self._writer.writerow(row | self._about)
            print(f"{part:7} {case:24} {figure:22} {value:10.4g} {unit}", flush=True)
        self._file.flush()


class Load:
    """load.c as a process."""

    def __init__(self, program: Path, env: dict[str, str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [str(program), str(theirs.fileno())], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self.uuid: str = self._answer()["uuid"]
        self._blocks: dict[int, list[int]] = {}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"load ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def request(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return {} if words[0] == "export" else self._answer()

    def make(self, which: int, sizes_mib: list[int]) -> dict[str, Any]:
        """A set of blocks of these sizes."""
        self._blocks[which] = [mib * MIB for mib in sizes_mib]
        with tempfile.NamedTemporaryFile("w", suffix=".sizes") as file:
            file.write("\n".join(map(str, sizes_mib)) + "\n")
            file.flush()
            return self.request("make", which, file.name)

    def export(self, which: int) -> tuple[list[tuple[int, int]], float]:
        """(descriptor, bytes) of each block, and what exporting them took."""
        self.request("export", which)
        blocks = [(socket.recv_fds(self._ours, 1, 1)[1][0], size) for size in self._blocks[which]]
        return blocks, self._answer()["export_s"]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._ours.close()


class Program:
    """tangram-copier as a process, with the times of its lines."""

    def __init__(self, words: list[str], env: dict[str, str], path: Path) -> None:
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
        self.at_s: dict[str, float] = {}
        last = "it wrote nothing"
        assert self.process.stderr is not None
        for line in self.process.stderr:
            for word in ("allocated", "registered", "ready"):
                if line.rstrip().endswith(word):
                    self.at_s[word] = time.monotonic() - self.began_s
            if "ready" in self.at_s:
                break
            last = line
        else:
            raise RuntimeError(f"the copier ended with {self.process.wait()}: {last.strip()}")
        self.link = Copier(path)

    def state(self) -> State:
        self.link.request_state()
        answer = receive(self.link)
        assert isinstance(answer, State)
        return answer

    def end(self) -> None:
        self.link.close()
        self.process.terminate()
        self.process.communicate(timeout=ANSWER_S)


def receive(link: Copier) -> Done | State:
    """The next answer."""
    while (answer := link.receive()) is None:
        if not select.select([link.fd], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"the copier gave no answer within {ANSWER_S} s")
    return answer


Jobs = list[tuple[Callable[[int, int, int, int], None], int, tuple[int, int]]]
"""save or restore, slot offset, block."""


def run_jobs(link: Copier, jobs: Jobs) -> tuple[float, float]:
    """Seconds until the first and the last answer. Descriptors are closed as soon as they are sent."""
    began, first = time.monotonic(), 0.0
    sent, left = 0, len(jobs)
    while left:
        while link.room and sent < len(jobs):
            what, slot, (fd, size) = jobs[sent]
            what(sent, slot, size, fd)
            os.close(fd)
            sent += 1
        answer = receive(link)
        assert isinstance(answer, Done)
        if answer.result != Result.COPIED:
            raise RuntimeError(f"the copier failed: {answer}")
        left -= 1
        first = first or time.monotonic() - began
    return first, time.monotonic() - began


def slots(blocks: list[tuple[int, int]], start: int = 0) -> Iterator[tuple[int, tuple[int, int]]]:
    """One behind the other."""
    for block in blocks:
        yield start, block
        start += block[1]


class Bench:
    """The machine, its programs and the table."""

    def __init__(self, built: Path, env: dict[str, str], table: Table, fake: bool) -> None:
        self.built, self.env, self.table, self.sizes = built, env, table, Sizes(fake)
        for name, words in {
            "load": [str(HERE / "load.c")],
            "tangram-copier": sorted(map(str, (ROOT / "shim/copier").glob("*.c"))),
        }.items():
            flags = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", f"-I{ROOT / 'shim/src'}"]
            subprocess.run(["gcc", *flags, "-o", str(built / name), *words, "-ldl"], check=True)
        self.load = Load(built / "load", env)

    def copier(self, pool: Path, mib: int) -> Program:
        path = self.built / "copier.sock"
        words = [
            str(self.built / "tangram-copier"),
            "--gpu",
            self.load.uuid,
            "--socket",
            str(path),
            "--pool",
            str(pool),
        ]
        return Program([*words, "--pool-bytes", str(mib * MIB)], self.env, path)

    @contextmanager
    def best_copier(self, mib: int) -> Iterator[tuple[str, Program]]:
        """With the first kind of pool that this machine has."""
        for kind in ("hugetlb", "transparent", "plain"):
            with ExitStack() as stack:
                try:
                    program = self.copier(stack.enter_context(pool_folder(kind, mib)) / "pool", mib)
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    print(f"no pool of kind {kind}: {error}", flush=True)
                    continue
                stack.callback(program.end)
                yield kind, program
                return
        raise RuntimeError(f"this machine has no memory for a pool of {mib} MiB")

    def copies(self, repeats: int, until: Callable[[], bool]) -> None:
        """One way in three forms, beside a plain copy."""
        with self.best_copier(self.sizes.total) as (kind, program):
            for repeat, form in ((repeat, form) for repeat in range(repeats) for form in self.sizes.forms):
                if until():
                    return
                self._one_way(program, kind, form, repeat)

    def _one_way(self, program: Program, kind: str, form: str, repeat: int) -> None:
        mib, link, load = self.sizes.of(form), program.link, self.load
        plain = load.request("plain", mib)
        owner = load.make(0, self.sizes.forms[form])
        blocks, export_s = load.export(0)
        saved = run_jobs(link, [(link.save, *one) for one in slots(blocks)])
        owner |= load.request("unmap", 0)
        again = load.request("again", 0)
        blocks, _ = load.export(0)
        restored = run_jobs(link, [(link.restore, *one) for one in slots(blocks)])
        wrong = load.request("check", 0)["wrong"]
        load.request("unmap", 0)
        gib = mib * MIB / GIB
        figures = {
            "gib": (gib, "GiB"),
            "save": (gib / saved[1], "GiB/s"),
            "save_of_plain": (plain["out"] / saved[1], ""),
            "first_saved": (saved[0] * 1000, "ms"),
            "restore": (gib / restored[1], "GiB/s"),
            "restore_of_plain": (plain["in"] / restored[1], ""),
            "plain_out": (gib / plain["out"], "GiB/s"),
            "plain_in": (gib / plain["in"], "GiB/s"),
            "owner_unmap": ((owner["unmap_s"] + owner["release_s"]) * 1000 / gib, "ms/GiB"),
            "owner_map": ((again["create_s"] + again["map_s"] + again["access_s"]) * 1000 / gib, "ms/GiB"),
            "owner_export": (export_s * 1000 / gib, "ms/GiB"),
            "wrong_words": (wrong, ""),
        }
        figures["owner_both"] = (figures["owner_unmap"][0] + figures["owner_map"][0], "ms/GiB")
        self.table.add("copies", f"{form}, {kind}", repeat, figures)

    def both(self, repeats: int, until: Callable[[], bool]) -> None:
        """Half of it out while the other half comes in."""
        half, load = self.sizes.total // 40 * 20, self.load
        with self.best_copier(2 * half) as (kind, program):
            link = program.link
            for repeat in range(repeats):
                if until():
                    return
                plain = load.request("plain", 2 * half)
                for which in (0, 1):
                    load.make(which, [20] * (half // 20))
                blocks, _ = load.export(1)
                run_jobs(link, [(link.save, *one) for one in slots(blocks, half * MIB)])
                load.request("unmap", 1)
                load.request("again", 1)
                (out, _), (in_, _) = load.export(0), load.export(1)
                pairs = zip(slots(out), slots(in_, half * MIB), strict=True)
                jobs: Jobs = [job for one, other in pairs for job in ((link.save, *one), (link.restore, *other))]
                _, took = run_jobs(link, jobs)
                wrong = load.request("check", 1)["wrong"]
                load.request("unmap", 0)
                load.request("unmap", 1)
                gib = half * MIB / GIB
                figures = {
                    "each_way": (gib / took, "GiB/s"),
                    "plain_each_way": (gib / plain["both"], "GiB/s"),
                    "of_plain": (plain["both"] / took, ""),
                    "wrong_words": (wrong, ""),
                }
                self.table.add("both", f"20 MiB, {kind}", repeat, figures)

    def start(self, _: int, until: Callable[[], bool]) -> None:
        """From start to ready, with a new pool and with one that exists, by its size and kind."""
        for kind in ("hugetlb", "transparent", "plain"):
            for mib in self.sizes.starts:
                if until():
                    return
                try:
                    self._start(kind, mib)
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    print(f"start {kind} {mib} MiB: not run: {error}", flush=True)

    def _start(self, kind: str, mib: int) -> None:
        with pool_folder(kind, mib) as at:
            for which in ("new", "again"):
                program = self.copier(at / "pool", mib)
                state, lines = program.state(), program.at_s
                figures = {
                    "allocated": (lines["allocated"], "s"),
                    "registered": (lines["registered"], "s"),
                    "ready": (lines["ready"], "s"),
                    "context": (state.context_mib, "MiB"),
                    "pages": (state.pages, state.pages.name.lower()),
                }
                program.end()
                self.table.add("start", f"{mib // 1024 or mib / 1024:g} GiB, {kind}, {which}", 0, figures)


def describe(fake: bool) -> dict[str, str]:
    """GPU, driver, date and commit."""
    gpu, driver = "fake", "fake"
    if not fake:
        words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
        gpu, driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    commit = os.environ.get("TANGRAM_COMMIT", "")
    if not commit:
        with suppress(OSError, subprocess.CalledProcessError):
            words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "gpu": gpu,
        "driver": driver,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
    }


@contextmanager
def driver_env(fake: bool, at: Path) -> Iterator[dict[str, str]]:
    """The environment of programs that use the GPU."""
    if not fake:
        yield dict(os.environ)
        return
    from tests.fake import start_fake_driver

    driver = start_fake_driver("gpu h200 memory_mib=4096 context_mib=300\n", at)
    try:
        yield driver.env()
    finally:
        driver.stop()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the CSV")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma between")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=float, default=500, help="seconds; nothing begins after them")
    parser.add_argument("--fake", action="store_true", help="on the fake driver")
    arguments = parser.parse_args()
    requested = arguments.only.split(",")
    if unknown := set(requested) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    assert Sizes(arguments.fake).total * MIB % GRAIN_BYTES == 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor for each block
    end = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as at, driver_env(arguments.fake, Path(at)) as env:
        bench = Bench(Path(at), env, Table(arguments.out, describe(arguments.fake)), arguments.fake)
        try:
            for part in requested:
                getattr(bench, part)(arguments.repeat, lambda: time.monotonic() > end)
        finally:
            bench.load.end()


if __name__ == "__main__":
    main()
