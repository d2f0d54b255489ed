"""What `top` makes of two looks."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from tangramctl import screen, top
from tangramctl.view import GpuView, RunView, StateRootView
from vgpu.protocol.status import GpuTimeStatus, SwapStatus, UnenforcedStatus


def gpu_time(
    on_s=0.0, off_s=0.0, capped_s=0.0, suspends=0, *, on=True, working=True, requested=0, mode="suspend", trouble=""
):
    return GpuTimeStatus(on, working, 1, requested, on_s, off_s, capped_s, suspends, trouble, mode)


def entry(key: str, of: GpuTimeStatus | None) -> RunView:
    return RunView("run", key, f"name-{key}", 7, "python x", 0, "standard", 2, False, None, (), (), of)


def test_a_share_is_of_the_time_between_two_readings_and_the_largest_comes_first():
    before = StateRootView((entry("a", gpu_time(10, 1, 2, 5)), entry("b", gpu_time(0, 0, 0, 0))))
    now = StateRootView((entry("a", gpu_time(10.6, 1.2, 3.2, 45, requested=30)), entry("b", gpu_time(1.5, 0, 0, 0))))
    b, a = top.between(before, now, 2.0).rows
    assert (a.got_percent, a.waited_percent, a.capped_percent) == pytest.approx((30, 10, 60))
    assert (a.suspends, a.requested_percent, b.got_percent) == (40, 30, pytest.approx(75))


@pytest.mark.parametrize(
    "before",
    [StateRootView(()), StateRootView((entry("a", None),)), StateRootView((entry("a", gpu_time(99, suspends=1)),))],
)
def test_a_run_that_is_new_or_has_a_new_arbiter_has_no_share_yet(before: StateRootView):
    (row,) = top.between(before, StateRootView((entry("a", gpu_time(0.5)),)), 1.0).rows
    assert (row.got_percent, row.suspends) == (None, None)


@pytest.mark.parametrize(
    ("now", "state"),
    [
        (gpu_time(1), "runs"),
        (gpu_time(1, working=False), "idle"),
        (gpu_time(1, off_s=0.5, on=False), "waits"),
        (gpu_time(1, off_s=0.1, capped_s=0.5, on=False), "capped"),
    ],
)
def test_the_state_is_one_word(now: GpuTimeStatus, state: str):
    (row,) = top.between(StateRootView((entry("a", gpu_time(1)),)), StateRootView((entry("a", now),)), 1.0).rows
    assert row.state == state


def test_an_idle_run_is_left_out_and_trouble_stands_below():
    now = StateRootView(
        (entry("a", gpu_time(1, mode="gate", trouble="the driver answered 0x21")), entry("b", None)), ("a note",)
    )
    table = top.between(StateRootView((entry("a", gpu_time(0.5)),)), now, 1.0)
    console = Console(width=200)
    with console.capture() as got:
        console.print(screen.drawn_top(table, 200))
    text = got.get()
    assert "name-a" in text
    assert "name-b" not in text
    assert "runs (gate)" in text
    assert "50.0%" in text
    assert "name-a: the driver answered 0x21" in text
    assert "a note" in text


def test_one_that_may_burst_shows_its_guarantee_and_its_limit_and_what_it_had_above():
    before = msgspec.structs.replace(gpu_time(1, requested=30), limit_percent=100)
    now = msgspec.structs.replace(before, on_s=1.9, burst_s=0.6)
    other = entry("b", msgspec.structs.replace(gpu_time(1, requested=30), limit_percent=30))
    table = top.between(StateRootView((entry("a", before), other)), StateRootView((entry("a", now), other)), 1.0)
    assert (table.rows[0].limit_percent, table.rows[0].burst_percent) == (100, pytest.approx(60))
    lines = _lines(table, 200)
    assert "30-100%" in lines[1]
    assert " 30%" in lines[2]


@pytest.mark.parametrize(
    ("guaranteed", "limit", "text"), [(0, 0, "-"), (30, 0, "30%"), (30, 30, "30%"), (30, 60, "30-60%")]
)
def test_a_cap_is_written_with_the_burst_if_there_is_one(guaranteed: int, limit: int, text: str):
    assert screen.cap(guaranteed, limit) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0.0s"), (12.34, "12.3s"), (245, "4m05s"), (25_400, "7h03m")])
def test_times_are_written_for_people(seconds: float, text: str):
    assert screen.clock(seconds) == text


def test_a_wait_is_of_each_arrival_of_work_and_unreported_or_stopped_runs_are_named_below():
    before = msgspec.structs.replace(gpu_time(1, off_s=0.5), arrivals=10, clearing_s=0.5)
    now = msgspec.structs.replace(gpu_time(2, off_s=0.51), arrivals=20, clearing_s=0.52, unreported=True, stopped=True)
    table = top.between(
        StateRootView((entry("a", before),)), StateRootView((entry("a", now), entry("b", gpu_time(1)))), 1.0
    )
    assert [row.wait_ms for row in table.rows] == [pytest.approx(3.0), None]
    console = Console(width=200)
    with console.capture() as got:
        console.print(screen.drawn_top(table, 200))
    assert "3.00 ms" in got.get()
    assert "name-a: computes while it reports that it is idle" in got.get()
    assert "name-a: something other than the arbiter seems to stop its work" in got.get()


def test_the_pid_of_a_run_stands_first_and_stays_on_a_narrow_terminal_and_a_node_without_runs_has_no_such_column():
    run = msgspec.structs.replace(
        entry("a", gpu_time(1, requested=30)), pid=4_194_304, command="python3 train.py --epochs 900"
    )
    (row,) = top.between(StateRootView((run,)), StateRootView((run,)), 1.0).rows
    heads = {width: _lines(top.TopTable((row,), 1.0), width)[0].split() for width in (200, 80, 50)}
    assert heads[200] == [name for name in screen.TOP_COLUMNS if name not in screen.TOP_OF_BURSTS]
    assert heads[80] == ["PID", "RUN", "CLASS", "STATE", "ASKED", "GOT", "WAITED", "CAPPED", "COMMAND"]
    assert {"PID", "RUN", "ASKED", "GOT"} <= set(heads[50])
    assert all("4194304" in _lines(top.TopTable((row,), 1.0), width)[1] for width in heads)
    pods = top.TopTable((msgspec.structs.replace(row, pid=None),), 1.0)
    assert _lines(pods, 200)[0].split() == heads[200][1:]


GIB = 2**30


def bursting(key: str, of: GpuTimeStatus | None, swap: SwapStatus) -> RunView:
    gpus = tuple(
        GpuView(f"GPU-{at}", at, "H200", 20 * GIB, 0, 15 * GIB, 15 * GIB, 0, 0, 0, 4 * GIB, away, 11 * GIB)
        for at, away in enumerate((3 * GIB, 0))
    )
    return msgspec.structs.replace(entry(key, of), gpus=gpus, swap=swap)


def test_one_that_may_burst_shows_its_memory_and_what_of_it_is_swapped_out_and_why_it_is_paused():
    paused = SwapStatus(True, 12.5, "waits for its turn", "", 0, "", "", "kill", "", "evict")
    seen = StateRootView((bursting("a", gpu_time(1), paused), entry("b", gpu_time(1))))
    table = top.between(seen, seen, 1.0)
    head, first, second, *notes = _lines(table, 200)
    cells = dict(zip(head.split(), first.split(), strict=False))
    assert (cells["STATE"], cells["WAIT"]) == ("paused", "-")
    assert first.split()[-5:-2] == ["8-40Gi", "22Gi", "3Gi"], "of its GPUs together"
    assert second.split()[-5:-2] == ["0", "?", "0"]
    assert notes == ["name-a is paused for 12.5s: 3.0 of 30.0 GiB are in host memory; waits for its turn"]
    assert head.split() == list(screen.TOP_COLUMNS)


def test_one_that_is_paused_is_there_also_before_a_new_arbiter_knows_its_channels():
    paused = SwapStatus(True, 2.0, "comes back", "in", 0, "", "", "kill", "no room", "evict")
    seen = StateRootView((bursting("a", None, paused), entry("b", None)))
    (row,) = top.between(seen, seen, 1.0).rows
    assert (row.state, row.away_bytes, row.got_percent) == ("paused", 3 * GIB, None)
    assert row.ends == ("! name-a: its memory cannot come back: no room (burst.stranded: evict)",)


def _lines(table: top.TopTable, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as got:
        console.print(screen.drawn_top(table, width))
    assert all(len(line) <= width for line in got.get().splitlines())
    return got.get().splitlines()


@pytest.mark.parametrize("known", [True, False])
def test_a_limit_that_is_not_enforced_is_marked_and_the_reason_stands_below(known: bool):
    found = (UnenforcedStatus("no-channels", ("gpu-time",), (7,)), UnenforcedStatus("something-new", ("memory",)))
    one = msgspec.structs.replace(entry("a", gpu_time(1, requested=30) if known else None), unenforced=found)
    table = top.between(StateRootView((one,)), StateRootView((one,)), 1.0)
    (row,) = table.rows
    assert (row.unenforced, row.state) == (found, "runs" if known else "unknown")
    console = Console(width=200)
    with console.capture() as got:
        console.print(screen.drawn_top(table, 200))
    text = got.get()
    assert "! name-a: gpu-time not enforced (no-channels): A process has a CUDA context" in text
    assert "! name-a: memory not enforced (something-new): a reason of a later version" in text
    assert "%!" in text or "-!" in text
