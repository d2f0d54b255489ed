"""`tangramctl explain pod`: why a pod is pending. It reads and prints; `vgpu.explain` decides."""

from __future__ import annotations

import json as plain_json
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tangramctl.cluster import kubectl, snapshot_at, snapshot_of
from tangramctl.errors import BadOption
from vgpu.errors import BadAsk, TangramError
from vgpu.explain import Nearest, Row, need_of, rows_of, summary
from vgpu.names import Names
from vgpu.policy import POLICIES
from vgpu.request import PodAsk, pod_ask
from vgpu.snapshot import PodRecord, Snapshot, snapshot_from_json

SHOWN = 20
"""Nodes in the table; `--json` has all."""


def explain_pod(name: str, *, pod: Path | None, snapshot: Path | None, extender: str, domain: str, json: bool) -> bool:
    """Print why the pod is pending. Returns whether it is placed, or would fit."""
    namespace, slash, short = name.partition("/")
    if not (namespace and slash and short) or "/" in short:
        raise BadOption(f"the pod is {name!r}: it must be NAMESPACE/NAME")
    known = _snapshot(snapshot, extender, Names(domain))
    placed = next((one for one in known.pods if one.key == name), None)
    if placed is not None:
        _say_placed(placed, json=json)
        return True
    ask = _ask(name, pod, known)
    rows = rows_of(known, ask)
    if json:
        sys.stdout.write(msgspec.json.encode(_document(name, rows)).decode() + "\n")
    else:
        _say(name, ask, rows)
    return any(not row.reason for row in rows)


def _snapshot(file: Path | None, extender: str, names: Names) -> Snapshot:
    body = None
    if file is not None:
        try:
            body = file.read_bytes()
        except OSError as error:
            raise BadOption(f"--snapshot {file}: {error.strerror}") from None
    else:
        body = snapshot_at(extender)
    if body is None:
        print(
            f"no extender at {extender}: reading the API; places promised and not yet bound do not show",
            file=sys.stderr,
        )
        return snapshot_of(kubectl("get", "nodes")["items"], kubectl("get", "pods", "-A")["items"], names)
    try:
        return snapshot_from_json(body)
    except TangramError as error:
        raise BadOption(f"{file or extender}: {error}") from None


def _ask(name: str, file: Path | None, known: Snapshot) -> PodAsk:
    namespace, _, short = name.partition("/")
    try:
        found = plain_json.loads(file.read_bytes()) if file else kubectl("get", "pod", short, "-n", namespace)
    except OSError as error:
        raise BadOption(f"--pod {file}: {error.strerror}") from None
    except ValueError as error:
        raise BadOption(f"--pod {file}: it must be what kubectl get pod -o json writes: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != "Pod":
        raise BadOption(f"--pod {file}: it must be one Pod, as kubectl get pod -o json writes it")
    try:
        ask = pod_ask(found, names=Names(known.domain), unit_mib=known.unit_mib, policies=POLICIES)
    except BadAsk as error:
        raise BadOption(f"pod {name}: {error}") from None
    if not ask:
        raise BadOption(f"pod {name} asks for no resource of {known.domain}: Tangram has no say in where it goes")
    return ask


def _document(name: str, rows: list[Row]) -> dict[str, Any]:
    return {
        "pod": name,
        "placed": False,
        "fits": any(not row.reason for row in rows),
        "why_not": summary(rows),
        "nodes": rows,
    }


def _say_placed(placed: PodRecord, *, json: bool) -> None:
    if json:
        document = {"pod": placed.key, "placed": True, "node": placed.node, "stage": placed.stage}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return
    how = "room is kept for it" if placed.stage == "kept" else f"it has its place ({placed.stage})"
    print(f"pod {placed.key}: {how} on node {placed.node}")
    for piece in placed.assignment.held():
        print(f"  GPU {piece.index} {piece.uuid}: {piece.mib} MiB, {piece.core_percent} %")


def _say(name: str, ask: PodAsk, rows: list[Row]) -> None:
    fit = [row.node for row in rows if not row.reason]
    need = need_of(ask)
    wanted = f" asks for {need[0]} MiB and {need[1]} % of one GPU and" if need else ""
    verdict = f"fits {len(fit)} of {len(rows)} nodes: the scheduler has other reasons" if fit else "fits no node"
    print(f"pod {name}{wanted} {verdict}")
    for reason, count in summary(rows).items():
        print(f"  {count} {'node' if count == 1 else 'nodes'}: {reason}")
    table = Table("NODE", "BEST GPU", "FREE", "LACKS", "WHY NOT", box=None, pad_edge=False)
    for row in rows[:SHOWN]:
        best = row.nearest
        table.add_row(
            row.node,
            f"{best.index} {best.model}" if best else "-",
            f"{best.free_mib} MiB, {best.free_percent} %" if best else "-",
            _lacks(best),
            row.reason or "fits",
        )
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    if len(rows) > SHOWN:
        print(f"and {len(rows) - SHOWN} more nodes: --json shows all")


def _lacks(best: Nearest | None) -> str:
    if best is None:
        return "-"
    parts = [f"{best.lacks_mib} MiB"] if best.lacks_mib else []
    parts += [f"{best.lacks_percent} %"] if best.lacks_percent else []
    return ", ".join(parts) or "nothing"
