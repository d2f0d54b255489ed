"""Which kube-scheduler an extender ends, when, and that it harms no other process. The processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from extender.retry_after_restart import SchedulerRestarter, processes_named, running_process

NAME = f"sched-{os.getpid()}"
SLEEPS = "import signal, sys, time; {}; print('ready', flush=True); time.sleep(60)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture
def scheduler(tmp_path: Path) -> Callable[..., object]:
    """A process of that name; `deaf`: to SIGTERM."""
    program = tmp_path / NAME
    program.symlink_to(Path(sys.executable).resolve())

    @asynccontextmanager
    async def start(*, deaf: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
        code = SLEEPS.format(DEAF if deaf else "0")
        process = await asyncio.create_subprocess_exec(program, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    return start


def restarter(name: str = NAME, **options: object) -> SchedulerRestarter:
    return SchedulerRestarter(name, **options)  # type: ignore[arg-type]


def proc_in_which_we_began(began: int, folder: Path) -> Path:
    """/proc, except for this process's own start."""
    there = folder / "proc"
    there.mkdir()
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            (there / one.name).symlink_to(one)
    (there / "self").mkdir()
    (there / "self/stat").write_text(f"{os.getpid()} (a (b) c) S {'0 ' * 18}{began} 0\n")
    return there


def start_of(process: asyncio.subprocess.Process) -> int:
    found = running_process(Path(f"/proc/{process.pid}"))
    assert found is not None
    return found.began


async def test_a_kube_scheduler_that_is_older_is_ended_when_pods_wait(scheduler, tmp_path: Path) -> None:
    async with scheduler() as process:
        proc = proc_in_which_we_began(start_of(process) + 1, tmp_path)
        await restarter(proc=proc).restart(1, missed=False)
        assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGTERM


async def test_one_that_does_not_end_is_killed(scheduler, tmp_path: Path) -> None:
    async with scheduler(deaf=True) as process:
        proc = proc_in_which_we_began(start_of(process) + 1, tmp_path)
        await restarter(proc=proc, end_s=0.1).restart(1, missed=False)
        assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("later", "turned_down", "name"),
    [(0, 1, NAME), (-1, 1, NAME), (1, 0, NAME), (1, 1, ""), (1, 1, f"{NAME}x")],
    ids=["as-old", "younger", "no-pod-waits", "no-name", "another-name"],
)
async def test_any_other_is_left_alone(scheduler, tmp_path: Path, later: int, turned_down: int, name: str) -> None:
    async with scheduler() as process:
        proc = proc_in_which_we_began(start_of(process) + later, tmp_path)
        await restarter(name, proc=proc).restart(turned_down, missed=False)
        assert process.returncode is None
        assert [one.pid for one in processes_named(NAME)] == [process.pid]


async def test_one_that_requested_before_enough_was_known_is_ended_whatever_its_age(scheduler, tmp_path: Path) -> None:
    async with scheduler() as process:
        proc = proc_in_which_we_began(start_of(process) - 1, tmp_path)
        await restarter(proc=proc).restart(0, missed=True)
        assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGTERM


async def test_without_a_proc_the_extender_goes_on_and_ends_nothing(scheduler, tmp_path: Path) -> None:
    async with scheduler() as process:
        await restarter(proc=tmp_path / "none").restart(1, missed=False)
        assert process.returncode is None


async def test_a_pid_that_was_given_to_another_process_is_not_signalled(scheduler, tmp_path: Path) -> None:
    """Between the check and the signal the process ended; another has its pid, which began later."""
    async with scheduler() as process:
        proc = proc_in_which_we_began(start_of(process) + 10, tmp_path)
        one = restarter(proc=proc)
        found = running_process(Path(f"/proc/{process.pid}"))
        assert found is not None
        await one._end(type(found)(found.pid, found.began - 5))
        assert process.returncode is None
