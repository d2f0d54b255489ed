"""How runs and containers are shown: the table, its columns, and the lines below it."""

from __future__ import annotations

import io

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from tangramctl import screen, view
from tests.unit.tangramctl.reported import MIB, UUID, reported
from vgpu.protocol.status import (
    ContainerStatus,
    SwapStatus,
    UnenforcedStatus,
)


def test_the_table_has_a_line_for_each_gpu_and_marks_what_is_not_known() -> None:
    known = view.GpuView(UUID, 0, "T4", 8 * 2**30, 30, 2**30, 512 * MIB, 0, 3 * MIB)
    unknown = view.GpuView(UUID, None, None, 1536 * MIB, 0)
    entries = (
        view.RunView("run", "k", "me", 7, "python x", 0, "standard", 2, False, None, (known,), ()),
        view.RunView("container", "l", "ns/pod/c", None, "", None, "best-effort", 4, True, None, (unknown,), None),
    )
    console = Console(width=200)
    with console.capture() as captured:
        screen.show(view.StateRootView(entries, ("something is wrong",)), console)
    lines = [line.split() for line in captured.get().splitlines() if line.strip()]
    assert lines[0] == [
        "PID",
        "RUN",
        "GPU",
        "CLASS",
        "CORE",
        "TIME",
        "LIMIT",
        "LEASED",
        "USED",
        "CONTEXT",
        "SHARED",
        "PROCS",
        "COMMAND",
    ]
    assert lines[1] == ["7", "me", "0", "standard", "30%", "-", "8Gi", "1Gi", "512Mi", "0", "3Mi", "0", "python", "x"]
    assert lines[2] == ["-", "ns/pod/c", UUID[:12], "best-effort/4", "-", "-", "1536Mi", "?", "?", "?", "?", "?"]
    assert lines[3] == ["something", "is", "wrong"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "?"),
        (0, "0"),
        (1, "1Mi"),
        (512 * MIB, "512Mi"),
        (2**30, "1Gi"),
        (1536 * MIB, "1536Mi"),
        (25 * 2**29, "12.5Gi"),
    ],
)
def test_amounts_are_short(size: int | None, text: str) -> None:
    assert screen.amount(size) == text


LONG = view.RunView(
    "run", "k", "somebody", 4_194_304, "python3 train.py --epochs 900", 0, "latency-critical", 4, False, "gpus",
    (view.GpuView(UUID, 0, "T4", 8 * 2**30, 30, 2**30, 512 * MIB, 0, 3 * MIB),), (),
)  # fmt: skip
BURSTING = structs.replace(
    LONG, gpus=(structs.replace(LONG.gpus[0], guarantee_bytes=2**30, excess_bytes=512 * MIB, away_bytes=3 * MIB),)
)


@pytest.mark.parametrize(("run", "without"), [(LONG, screen.PS_OF_BURSTS), (BURSTING, frozenset())])
@pytest.mark.parametrize("width", range(7, 160))
def test_a_narrow_terminal_is_shown_whole_columns_the_important_ones_and_each_pid(
    width: int, run: view.RunView, without: frozenset[str]
) -> None:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        screen.show(view.StateRootView((run,)), console)
    head, row = captured.get().splitlines()
    shown = head.split()
    assert row.split()[0] == "4194304"
    expendable = [name for name in screen.PS_EXPENDABLE if name not in without]
    assert not without.intersection(shown), "nothing may burst"
    assert all(name in shown for name in screen.PS_COLUMNS if name not in screen.PS_EXPENDABLE)
    dropped = [name for name in expendable if name not in shown]
    assert dropped == expendable[: len(dropped)]
    assert ("GPU" not in shown) or "0 fake" in row
    if width == 80 and without:
        assert shown == ["PID", "RUN", "GPU", "CLASS", "CORE", "LIMIT", "USED", "COMMAND"]


def test_where_output_is_no_terminal_nothing_is_cut_and_no_line_ends_with_blanks_or_is_one() -> None:
    short = msgspec.structs.replace(LONG, command="sh")
    longer = msgspec.structs.replace(LONG, command="x" * 500)
    written = io.StringIO()
    console = Console(file=written, width=screen.PLAIN_WIDTH)
    screen.show(view.StateRootView((short, longer), ("something is wrong",)), console)
    lines = written.getvalue().splitlines()
    assert len(lines) == 4
    assert [line for line in lines if line != line.rstrip() or not line] == []
    assert lines[1].endswith("  sh")
    assert lines[2].endswith("x" * 500)


@pytest.mark.parametrize(("limit", "mark"), [("memory", "1Gi!"), ("gpu-time", "30%!")])
def test_a_limit_that_is_not_enforced_is_marked_and_the_reason_stands_below(limit: str, mark: str) -> None:
    found = structs.replace(reported("k"), unenforced=(UnenforcedStatus("graphics", (limit,), (7,)),))
    seen = view.StateRootView((view._container(found),))
    assert b'"reason": "graphics"' in view.encode(seen)
    console = Console(file=io.StringIO(), width=200)
    console.print(screen.drawn(seen, 200))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("!") == 2
    assert mark in text
    assert f"! default/a/main: {limit} not enforced (graphics): A process uses a graphics API" in text


SWAP = SwapStatus(False, 0.0, "", "", 0, "", "", "kill", "", "evict")


def bursting(**changed: object) -> ContainerStatus:
    gpu = structs.replace(
        reported("k").gpus[0], limit_bytes=40 * 2**30, leased_bytes=int(14.9 * 2**30), guarantee_bytes=8 * 2**30,
        away_bytes=int(11.8 * 2**30),
    )  # fmt: skip
    return structs.replace(reported("k"), gpus=(gpu,), swap=structs.replace(SWAP, **changed))


EXCESS = screen.amount(
    int(14.9 * 2**30) + reported("k").gpus[0].context_bytes + reported("k").gpus[0].shared_bytes - 8 * 2**30
)
"""Of `bursting`: all that is charged to it, without its guarantee."""


def shown(found: ContainerStatus) -> list[str]:
    console = Console(file=io.StringIO(), width=screen.PLAIN_WIDTH)
    screen.show(view.StateRootView((view._container(found),)), console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({}, []),
        (
            {"paused": True, "paused_s": 185.0, "why": "waits for its turn"},
            ["default/a/main is paused for 3m05s: 11.8 of 14.9 GiB are in host memory; waits for its turn"],
        ),
        (
            {"unable": "process 7 does not answer", "waiting": 2},
            [
                "default/a/main gets no memory above its guarantee: process 7 does not answer",
                "default/a/main: 2 requests wait for memory of other containers",
            ],
        ),
        (
            {"waiting": 1, "pool_full": "the host pool of GPU-a is full"},
            ["default/a/main: 1 request waits for memory: the host pool of GPU-a is full"],
        ),
        (
            {"no_pool": "memory cannot be registered"},
            [
                "default/a/main gets no memory above its guarantee: the host pool is not ready: memory cannot be registered"
            ],
        ),
        (
            {"no_pool": "the copier starts", "unable": "the process sees several GPUs"},
            ["default/a/main gets no memory above its guarantee: the process sees several GPUs"],
        ),
        (
            {"over_limit": "it did not give way within 10 s", "stranded": "no room"},
            [
                "! default/a/main is over its limit: it did not give way within 10 s (burst.overLimit: kill)",
                "! default/a/main: its memory cannot come back: no room (burst.stranded: evict)",
            ],
        ),
    ],
)
def test_a_container_that_may_burst_has_both_sizes_and_lines_that_say_where_its_memory_is(
    changed: dict[str, object], lines: list[str]
) -> None:
    head, row, *notes = shown(bursting(**changed))
    cells = dict(zip(head.split(), row.split(), strict=False))
    assert (cells["LIMIT"], cells["EXCESS"], cells["SWAPPED"]) == ("8-40Gi", EXCESS, "11.8Gi")
    assert notes == lines


def test_before_anything_has_left_a_paused_container_is_said_to_move() -> None:
    found = bursting(paused=True, paused_s=0.25, why="moves to host memory")
    still = structs.replace(found, gpus=(structs.replace(found.gpus[0], away_bytes=0),))
    assert shown(still)[2:] == ["default/a/main is paused for 0.2s: moves to host memory"]


@pytest.mark.parametrize(
    ("guarantee", "limit", "text"),
    [(None, 2**30, "1Gi"), (2**30, 2**30, "1Gi"), (512 * MIB, 2**30, "512Mi-1Gi"), (512 * MIB, 1536 * MIB, "512-1536Mi")],
)  # fmt: skip
def test_two_sizes_are_one_cell(guarantee: int | None, limit: int, text: str) -> None:
    assert screen.sizes(guarantee, limit) == text
