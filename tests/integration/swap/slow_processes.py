"""Processes that are frozen or get hardly any processor time, by cgroups of either version; where none can be made, by signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.integration.swap.polling import until

ROOT = Path("/sys/fs/cgroup")
PERIOD_S = 0.1
SLOW_PART = 0.05


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Until left. With version 1 of cgroups even a kill waits until then."""
    if (group := _group("freezer", pid)) is not None:
        name, on, off = ("cgroup.freeze", "1", "0") if _unified() else ("freezer.state", "FROZEN", "THAWED")
        with _member(group, pid):
            (group / name).write_text(on)
            try:
                yield
            finally:
                (group / name).write_text(off)
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def slow(pid: int) -> Iterator[None]:
    """50 millicores."""
    if (group := _group("cpu", pid)) is not None:
        quota, period = int(1e6 * PERIOD_S * SLOW_PART), int(1e6 * PERIOD_S)
        if _unified():
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        with _member(group, pid):
            yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_by_signals, args=(pid, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _by_signals(pid: int, ended: threading.Event) -> None:
    with contextlib.suppress(ProcessLookupError):
        while not ended.wait(PERIOD_S * SLOW_PART):
            os.kill(pid, signal.SIGSTOP)
            ended.wait(PERIOD_S * (1 - SLOW_PART))
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGCONT)


def _unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _group(controller: str, pid: int) -> Path | None:
    """A new group in which the controller works; None where none can be made."""
    group = (ROOT if _unified() else ROOT / controller) / f"tangram-test-{pid}"
    needed = {"cpu": ("cpu.max", "cpu.cfs_quota_us"), "freezer": ("cgroup.freeze", "freezer.state")}[controller]
    try:
        group.mkdir()
    except OSError:
        return None
    if any((group / name).exists() for name in needed):
        return group
    group.rmdir()
    return None


@contextlib.contextmanager
def _member(group: Path, pid: int) -> Iterator[None]:
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for one in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(one)
        until(_removal(group))


def _removal(group: Path) -> Callable[[], bool]:
    def removed() -> bool:
        try:
            group.rmdir()
        except OSError:
            return not group.exists()
        return True

    return removed
