"""`tangramctl simulate`: what would fit, in numbers. It reads files, shows progress and prints; `vgpu.scheduling.simulate` decides."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tangramctl.errors import BadOption
from tangramctl.explain import figures
from tangramctl.plot import curve_svg
from tangramctl.request import memory_mib
from vgpu.api.errors import TangramError
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import MOST_GPUS, GpuRequest, PodRequest
from vgpu.scheduling.explain import explain_nodes
from vgpu.scheduling.placement import Placement, explain, place
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.simulate import SimulationRun, replay, too_large
from vgpu.scheduling.snapshot import Snapshot, fleet_of, snapshot_from_json
from vgpu.scheduling.workload import read_nodes, read_pods

MOST_SEEDS: Final = 1000
SHOWN: Final = (50, 60, 70, 80, 85, 90, 95, 100, 105, 110, 120, 130)
"""Percent arrived of which a person is shown the figures; `--json` has all."""
NAMED: Final = 3
"""Pods that fit no node and are named; the others are counted."""


def simulate(
    nodes: Path, pods: Path, *, policy: str, seeds: str, arrive: float, json: bool, plot: Path | None, jobs: int
) -> None:
    """Replay and print."""
    wanted = _seeds(seeds)
    if policy not in POLICIES:
        raise BadOption(f"--policy is {policy!r}: it must be one of {', '.join(POLICIES)}")
    if not 0 < arrive <= 10:
        raise BadOption(f"--arrive is {arrive}: it must be above 0 and at most 10")
    try:
        hosts = read_nodes(_text(nodes, "--nodes"), str(nodes))
        requested = read_pods(_text(pods, "--pods"), str(pods), policy)
    except TangramError as error:
        raise BadOption(str(error)) from None
    _warn(too_large(hosts, requested), len(requested))
    start = time.monotonic()
    runs: list[SimulationRun] = []
    with _bar() as bar:
        task = bar.add_task(policy, total=float(len(wanted)))
        if jobs == 1 or len(wanted) == 1:
            for seed in wanted:
                runs.append(replay(hosts, requested, seed, arrive, partial(_advance, bar, task, len(runs))))
        else:
            with ProcessPoolExecutor(min(jobs, len(wanted))) as pool:
                for found in pool.map(
                    replay, *zip(*((hosts, requested, seed, arrive) for seed in wanted), strict=True)
                ):
                    runs.append(found)
                    bar.advance(task)
    found_all = summary(policy, runs, arrive, time.monotonic() - start)
    if plot is not None:
        _write(plot, curve_svg(f"{policy}: {pods.name}", [tuple(point) for point in found_all["curve"]]))
    if json:
        sys.stdout.write(msgspec.json.encode(found_all).decode() + "\n")
    else:
        _show(found_all)


def _warn(names: Sequence[str], of: int) -> None:
    """Print which pods can never be placed."""
    if not names:
        return
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    print(
        f"tangramctl: {len(names)} of {of} pods fit no node, not even an empty one: {', '.join(names[:NAMED])}{more}",
        file=sys.stderr,
    )


def _advance(bar: Progress, task: TaskID, done: int, part: float) -> None:
    bar.update(task, completed=done + part)


def summary(policy: str, runs: Sequence[SimulationRun], arrive: float, seconds: float) -> dict[str, Any]:
    """The means over the seeds, in percent of the capacity; null where so much did not arrive."""
    last = round(100 * arrive)
    curve = []
    for percent in range(1, last + 1):
        points = [run.at(percent) for run in runs]
        curve.append(
            [
                percent,
                round(statistics.fmean(point.allocation for point in points), 3),
                round(statistics.fmean(point.fragmentation for point in points), 3),
            ]
        )
    at = {percent: (curve[percent - 1] if percent <= last else [percent, None, None]) for percent in (100, 130)}
    return {
        "policy": policy,
        "seeds": [run.seed for run in runs],
        "arrive": arrive,
        "allocation_at_100": at[100][1],
        "allocation_at_130": at[130][1],
        "fragmentation_at_100": at[100][2],
        "allocation_at_100_by_seed": [round(run.at(100).allocation, 3) for run in runs] if last >= 100 else [],
        "seconds": round(seconds, 2),
        "curve": curve,
    }


def would_fit(snapshot: Path, *, policy: str, gpu_mem: str, gpu_core: int, gpus: int, models: str, json: bool) -> bool:
    """Does a pod fit, where, and why not elsewhere? GPU memory is of each GPU. Returns whether it fits."""
    if policy not in POLICIES:
        raise BadOption(f"--policy is {policy!r}: it must be one of {', '.join(POLICIES)}")
    if not 1 <= gpus <= MOST_GPUS:
        raise BadOption(f"--gpu-count is {gpus}: it must be 1 to {MOST_GPUS}")
    body = _bytes(snapshot, "--snapshot")
    try:
        known = snapshot_from_json(body)
    except TangramError as error:
        raise BadOption(f"{snapshot}: {error}") from None
    mib = -(-memory_mib(gpu_mem) // known.unit_mib) * known.unit_mib
    mib = min(mib, LARGEST_GPU_MIB)
    share = GpuRequest("main", "share", gpus, units=gpus * mib // known.unit_mib, mib=mib, core_percent=gpu_core)
    allowed = frozenset(model.strip() for model in models.split(",")) - {""}
    wanted = PodRequest((share,), policy=policy, models=allowed)
    answer = _answer(known, wanted)
    if json:
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    else:
        _print(answer, known, wanted)
    return bool(answer["fits"])


def _answer(known: Snapshot, request: PodRequest) -> dict[str, Any]:
    fleet = fleet_of(known)
    names = tuple(sorted(node.name for node in known.nodes))
    excluded = {node.name: node.excluded for node in known.nodes if node.excluded}
    found = place(fleet, request, names)
    reasons = explain(fleet, request, names) | excluded
    fits = isinstance(found, Placement)
    return {
        "fits": fits,
        "node": found.node if isinstance(found, Placement) else None,
        "gpus": list(found.assignment.uuids("main")) if isinstance(found, Placement) else [],
        "also": [name for name in names if name not in reasons and not (fits and name == found.node)]
        if isinstance(found, Placement)
        else [],
        "why_not": reasons,
    }


def _print(answer: dict[str, Any], known: Snapshot, request: PodRequest) -> None:
    if answer["fits"]:
        also = f"; {len(answer['also'])} more nodes could take it" if answer["also"] else ""
        print(f"fits: node {answer['node']}, {', '.join(answer['gpus'])}{also}")
    else:
        print("does not fit")
    rows = {row.node: row for row in explain_nodes(known, request)}
    for node, reason in sorted(answer["why_not"].items()):
        print(f"  {node}: {reason}{figures(reason, request, [rows[node]])}")


def _show(found: dict[str, Any]) -> None:
    seeds = found["seeds"]
    print(
        f"policy {found['policy']}, seeds {seeds[0]} to {seeds[-1]}, {found['seconds']} s; percent of the GPU capacity"
    )
    print("arrived  allocated  fragmented")
    last = found["curve"][-1][0]
    for percent, allocated, fragmented in found["curve"]:
        if percent in SHOWN or percent == last:
            print(f"{percent:7d}  {allocated:9.2f}  {fragmented:10.2f}")
    print("allocated: used by the pods placed; fragmented: idle, and not usable by the next pod as pods were so far")


def _seeds(text: str) -> list[int]:
    """`42:52` is 42 to 51, `42` is itself."""
    first, colon, end = text.partition(":")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in ((first, end) if colon else (first,))):
        raise BadOption(f"--seeds is {text!r}: it must be FIRST:END, whole numbers, END not included, or one number")
    found = list(range(int(first), int(end))) if colon else [int(first)]
    if not 1 <= len(found) <= MOST_SEEDS:
        raise BadOption(f"--seeds is {text!r}, which is {len(found)} seeds: it must be 1 to {MOST_SEEDS}")
    return found


def _text(path: Path, option: str) -> str:
    try:
        return _bytes(path, option).decode()
    except UnicodeDecodeError as error:
        raise BadOption(f"{option} {path}: byte {error.start} is no UTF-8: it must be a CSV file") from None


def _bytes(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadOption(f"{option} {path}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadOption(f"--plot {path}: {error.strerror}") from None


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
