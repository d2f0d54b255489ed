"""What the node says of a GPU beside what the driver's own nvidia-smi says: facts, labels, sensors, MIG, and how long the health loop takes.

Nothing is changed: MIG mode is read, never switched. One program has a kernel write to an illegal address, so that an XID of a program's own mistake is seen.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvml.trials import Trier
from tests.gpu.kit.machine import Machine
from tests.gpu.kit.results import Results
from tests.gpu.trial import build
from vgpu.api.mig_tables import model_of
from vgpu.gputime.trial_verdict import TrialOutcome
from vgpu.health.conditions import APPLICATION_XIDS

PART = "estate"
PROGRAM = Path(__file__).parent / "programs/estate.py"
CASES = ("facts and labels", "sensors", "heat", "MIG, read only", "health loop", "an XID of a program", "self-test")
NEAR_C = 3
"""Degrees that a GPU may change between two readings that are a second apart. Guessed."""
NEAR_POWER_PERCENT = 25
UNSAID = re.compile(r"error: |\[?N/A\]?|\[?Not Supported\]?", re.IGNORECASE)
"""nvidia-smi has no value for it."""
ECC = {
    "ecc_corrected": "ecc.errors.corrected.volatile.total",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "rows_corrected": "remapped_rows.correctable",
    "rows_uncorrected": "remapped_rows.uncorrectable",
}
FLAGS = {"rows_pending": "remapped_rows.pending", "rows_failed": "remapped_rows.failure"}
HEALTH_GOAL_MS = 200.0
"""Of one query: a health event reaches the kubelet within a second, and queries of eight GPUs stand one after the other."""

XID_S, FAKE_XID_S = 10.0, 0.2
"""How long an XID is waited for. The fake driver raises none for a program's mistake."""

_found: dict[int, dict[str, Any]] = {}


def run_case(machine: Machine, results: Results, name: str) -> None:
    """Rows of the CSV."""
    with results.one(PART, name):
        if name == "self-test":
            _self_test(machine, results)
            return
        if id(machine) not in _found:
            _found[id(machine)] = _ask(machine)
        _CHECKS[name](results, _found[id(machine)])


def _ask(machine: Machine) -> dict[str, Any]:
    """What the program found: once for all cases."""
    root = machine.build / "fake" if machine.fake else Path("/")
    smi = str(machine.build / "fake/nvidia-smi") if machine.fake else "nvidia-smi"
    words = [sys.executable, str(PROGRAM), str(root), smi, machine.uuid, str(FAKE_XID_S if machine.fake else XID_S)]
    found: dict[str, Any] = json.loads(machine.output(words, "", "").splitlines()[-1])
    return found


def _facts(results: Results, found: dict[str, Any]) -> None:
    gpu, labels, smi = found["gpu"], found["labels"], found["smi"]
    for what, ours, theirs in (
        ("UUID", gpu["uuid"], "uuid"),
        ("index", str(gpu["index"]), "index"),
        ("model", gpu["model"], "name"),
        ("memory, MiB", str(gpu["mib"]), "memory.total"),
        ("label gpu.memory", labels["memory"], "memory.total"),
        ("label gpu.driver", labels["driver"], "driver_version"),
        ("label gpu.model", labels["model"].replace("-", " "), "name"),
        ("MIG mode", "Enabled" if gpu["mig"] else "Disabled", "mig.mode.current"),
    ):
        _same(results, what, smi[theirs], ours)
    _same(results, "PCI address", smi["pci.bus_id"].lower().rpartition("error: ")[2], gpu["pci"].lower())
    cuda = re.search(r"CUDA Version: *([0-9.]+)", found["smi_cuda"])
    _same(results, "label gpu.cuda", cuda[1] if cuda else "error: no CUDA version", labels["cuda"])
    results.check("label gpu.count", str(found["gpus"]), labels["count"])
    results.fact("label gpu.arch", labels["arch"])
    results.fact("label gpu.mig.capable", labels["mig.capable"])
    numa = Path(f"/sys/bus/pci/devices/{gpu['pci'][-12:].lower()}/numa_node")
    node = int(numa.read_text()) if numa.exists() else -1
    if node < 0:
        results.not_run("NUMA node", f"sysfs names none; ours is {gpu['numa']}")
    else:
        results.check("NUMA node", node, gpu["numa"])
    results.fact("inventory, ms", round(found["probe_ms"], 1))


def _sensors(results: Results, found: dict[str, Any]) -> None:
    first, last = found["readings"]
    smi = found["smi"]
    for what, ours, theirs, slack in (
        ("temperature, C", "temperature_c", "temperature.gpu", NEAR_C),
        ("power limit, W", "power_limit_mw", "enforced.power.limit", 1),
        ("highest SM clock, MHz", "sm_clock_max_mhz", "clocks.max.sm", 0),
    ):
        _within(results, what, smi[theirs], (first[ours], last[ours]), slack, 1000 if ours.endswith("_mw") else 1)
    watts = _number(smi["power.draw"])
    slack_w = NEAR_POWER_PERCENT * (watts or 0) / 100
    _within(results, "power, W", smi["power.draw"], (first["power_mw"], last["power_mw"]), slack_w, 1000)
    clocks = (first["sm_clock_mhz"], last["sm_clock_mhz"])
    _within(results, "SM clock, MHz", smi["clocks.current.sm"], clocks, 200, 1)
    results.fact("clock reasons, nvidia-smi and ours", f"{smi['clocks_event_reasons.active']}, {first['slowdowns']:#x}")
    for ours, theirs in ECC.items():
        _same(results, ours, smi[theirs], _text(first[ours]))
    for ours, theirs in FLAGS.items():
        _same(results, ours, {"No": "False", "Yes": "True"}.get(smi[theirs], smi[theirs]), _text(first[ours]))
    up = len(re.findall(r"Link \d+: [\d.]+ GB/s", found["smi_nvlink"]))
    results.check("NVLinks that are up", up, first["links_up"] or 0)
    for what, word in (("link_replays", "Replay"), ("link_recoveries", "Recovery"), ("link_crc_errors", "CRC")):
        counted = [int(one) for one in re.findall(rf"Link \d+: {word}[^:\n]*: (\d+)", found["smi_nvlink_errors"])]
        _same(results, f"NVLinks: {what}", _text(sum(counted) if counted else None), _text(first[what]))
    results.fact("recovery action", first["recovery_action"])


def _heat(results: Results, found: dict[str, Any]) -> None:
    """The margin below the temperature at which clocks fall, from nvidia-smi's own lines."""
    text = found["smi_temperature"]
    first, last = (reading["headroom_c"] for reading in found["readings"])
    for line in text.splitlines():
        if re.search(r"Temp", line) and ":" in line:
            results.fact(" ".join(line.split(":")[0].split()), line.split(":", 1)[1].strip())
    margin = re.search(r"GPU T\.Limit Temp\s*: (-?\d+) C", text)
    slowdown = re.search(r"GPU Slowdown T\.Limit Temp\s*: (-?\d+) C", text)
    now, at = re.search(r"GPU Current Temp\s*: (\d+) C", text), re.search(r"GPU Slowdown Temp\s*: (\d+) C", text)
    if margin and slowdown:
        wanted = int(margin[1]) - int(slowdown[1])
    elif now and at:
        wanted = int(at[1]) - int(now[1])
    else:
        results.not_run("degrees left", f"nvidia-smi has no such temperatures; ours is {first}")
        return
    near = first is not None and any(abs(seen - wanted) <= NEAR_C for seen in (first, last))
    results.check("degrees left", f"{wanted} +- {NEAR_C}", first, near)


def _mig(results: Results, found: dict[str, Any]) -> None:
    reply, gpu = found["mig"], found["gpu"]
    results.fact("state", reply)
    if isinstance(reply, str):
        results.check("the driver answers", "a state", reply, ok=False)
        return
    results.check("mode as in the inventory", gpu["mig"], reply["mig"])
    model = model_of(reply["model"])
    results.check("a table for this model, if it has MIG", reply["capable"], model is not None)
    if isinstance(found["profiles"], str) or model is None:
        results.not_run("profiles of the driver beside the table", found["profiles"])
        return
    table = {profile.number: (profile.name, profile.compute) for profile in model.table.profiles}
    for number, name, compute, mib in found["profiles"]:
        ours = table.get(number)
        seen = (name.removeprefix("MIG ").replace("+", "."), compute)
        if ours is None:
            results.fact(f"profile {number}, not in the table", f"{seen}, {mib} MiB")
        else:
            results.check(f"profile {number}", ours, seen)


def _health_loop(results: Results, found: dict[str, Any]) -> None:
    p50, p99, most = found["health_ms"]
    results.at_most("a query of one GPU, p99, ms", HEALTH_GOAL_MS, round(p99, 2))
    results.fact("a query of one GPU, p50, ms", round(p50, 2))
    results.fact("a query of one GPU, longest, ms", round(most, 2))


def _xid(results: Results, found: dict[str, Any]) -> None:
    seen = found["xid"]
    results.check("the program's error", "700", seen["program"])
    results.check("events can be had", {}, seen["unwatched"])
    if not seen["xids"]:
        results.not_run("the XID", "the driver reported none")
    else:
        results.check("XIDs are a program's", True, set(seen["xids"]) <= APPLICATION_XIDS)
        results.fact("XIDs", seen["xids"])
        results.at_most("seen after the program's end, s", 1.0, seen["seen_after_s"])
    results.check("the GPU answers afterwards", None, seen["answers"])


def _self_test(machine: Machine, results: Results) -> None:
    """As the device plugin makes it before a GPU comes back."""
    root = machine.build / "fake" if machine.fake else Path("/")
    trier = Trier(machine.folder, build(machine.folder), root, report=lambda *_: None, env=machine.base)
    began_s = time.monotonic()
    verdict = asyncio.run(trier.self_test(machine.uuid))
    results.check("outcome", TrialOutcome.WORKS.value, verdict.outcome.value)
    results.fact("reason", verdict.why)
    results.fact("seconds", round(time.monotonic() - began_s, 2))


_CHECKS: dict[str, Callable[[Results, dict[str, Any]], None]] = {
    "facts and labels": _facts,
    "sensors": _sensors,
    "heat": _heat,
    "MIG, read only": _mig,
    "health loop": _health_loop,
    "an XID of a program": _xid,
}


def _same(results: Results, what: str, theirs: str, ours: str) -> None:
    if UNSAID.match(theirs):
        results.not_run(what, f"nvidia-smi says {theirs!r}; ours is {ours}")
    else:
        results.check(what, theirs, ours)


def _within(
    results: Results, what: str, theirs: str, ours: tuple[int | None, int | None], slack: float, unit: int
) -> None:
    """Ours was read before and after."""
    wanted = _number(theirs)
    seen = [one / unit for one in ours if one is not None]
    if wanted is None:
        results.not_run(what, f"nvidia-smi says {theirs!r}; ours is {seen}")
    elif not seen:
        results.check(what, f"{wanted:g} +- {slack:g}", "nothing", ok=False)
    else:
        ok = any(abs(one - wanted) <= slack for one in seen) or min(seen) <= wanted <= max(seen)
        results.check(what, f"{wanted:g} +- {slack:g}", " and ".join(f"{one:g}" for one in seen), ok)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(value: object) -> str:
    return "N/A" if value is None else str(value)
