"""`tangramctl explain pod`: why a pod is pending. It reads and prints; `vgpu.scheduling.explain` decides."""

from __future__ import annotations

import json as plain_json
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from tangramctl.cluster import kubectl, snapshot_at, snapshot_of
from tangramctl.errors import BadOption
from tangramctl.placed import lines_of, placed_pod
from tangramctl.screen import console, put
from vgpu.api.burst import Burst, bursts_of
from vgpu.api.contract import GPUS_ENV
from vgpu.api.errors import BadRequest, TangramError
from vgpu.api.names import Names
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import PodRequest, pod_request, requests_ours
from vgpu.scheduling.explain import Nearest, NodeExplanation, explain_nodes, gpus_of, need_of, summary
from vgpu.scheduling.placement import TOO_LARGE
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.snapshot import PodRecord, Snapshot, snapshot_from_json

SHOWN = 20
"""Nodes in the table; `--json` has all."""
ORPHANED = "orphaned"
"""Stage of a pod that the API has lost and whose processes run on."""
ENDED = ("Succeeded", "Failed")
"""Phases in which a pod has nothing any more."""
STANDING = {
    "reserved": "a place is chosen for it on",
    "in gang": "a place is chosen for it with its gang on",
    "binding": "it is being bound to",
    "in doubt": "it is being bound to",
    "bound": "it is bound to",
    "seen bound": "it is bound to",
    "kept": "others are preempted for it on",
    "planned": "capacity is reserved until it is scheduled on",
    "orphaned": "it was deleted by force, and its processes still run on",
}
"""Stages of a snapshot in words."""


def explain_pod(name: str, *, pod: Path | None, snapshot: Path | None, extender: str, domain: str, json: bool) -> bool:
    """Print why the pod is pending. Returns False where it fits no node: not where it is placed, would fit, or has ended."""
    namespace, slash, short = name.partition("/")
    if not (namespace and slash and short) or "/" in short:
        raise BadOption(f"the pod is {name!r}: it must be NAMESPACE/NAME")
    known = _snapshot(snapshot, extender, Names(domain))
    named = [one for one in known.pods if one.key == name]
    placed = next((one for one in named if one.stage != ORPHANED), None)
    if placed is not None:
        _print_placed(placed, known, json=json, live=snapshot is None)
        return True
    try:
        found = _pod(name, pod)
    except BadOption:
        if not named:
            raise
        _print_placed(named[0], known, json=json)  # the API has lost it, its node has not
        return True
    phase = found.get("status", {}).get("phase")
    if phase in ENDED:
        _print_ended(name, phase, json=json)
        return True
    request = _request(name, found, known)
    bursts = _bursts(name, found, request, known)
    rows = explain_nodes(known, request, bursts)
    admitted = met_webhook(found, Names(known.domain))
    orphans = [one for one in known.pods if one.stage == ORPHANED]
    if json:
        document = _document(name, rows, admitted=admitted) | {"orphans": [_orphan(one) for one in orphans]}
        document |= {"bursts": bursts} if bursts else {}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    else:
        _print(name, request, rows, ["" if admitted else _never_admitted(found), *_notes_of_bursts(bursts, known)])
        _print_orphans(orphans)
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
            f"no extender at {extender}: reading the API; reservations do not show",
            file=sys.stderr,
        )
        return snapshot_of(kubectl("get", "nodes")["items"], kubectl("get", "pods", "-A")["items"], names)
    try:
        return snapshot_from_json(body)
    except TangramError as error:
        raise BadOption(f"{file or extender}: {error}") from None


def _pod(name: str, file: Path | None) -> dict[str, Any]:
    """The pod, decoded."""
    namespace, _, short = name.partition("/")
    try:
        found = plain_json.loads(file.read_bytes()) if file else kubectl("get", "pod", short, "-n", namespace)
    except OSError as error:
        raise BadOption(f"--pod {file}: {error.strerror}") from None
    except ValueError as error:
        raise BadOption(f"--pod {file}: it must be what kubectl get pod -o json writes: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != "Pod":
        raise BadOption(f"--pod {file}: it must be one Pod, as kubectl get pod -o json writes it")
    return found


def _request(name: str, found: dict[str, Any], known: Snapshot) -> PodRequest:
    try:
        request = pod_request(found, names=Names(known.domain), unit_mib=known.unit_mib, policies=POLICIES)
    except BadRequest as error:
        raise BadOption(f"pod {name}: {error}") from None
    if not request:
        raise BadOption(f"pod {name} requests no resource of {known.domain}: Tangram does not place it")
    return request


def _bursts(name: str, found: dict[str, Any], request: PodRequest, known: Snapshot) -> dict[str, Burst]:
    """Container -> limits above its guarantee that the pod requests."""
    annotations = (found.get("metadata") or {}).get("annotations") or {}
    try:
        return bursts_of(annotations, request, names=Names(known.domain), unit_mib=known.unit_mib)
    except BadRequest as error:
        raise BadOption(f"pod {name}: {error}") from None


def _notes_of_bursts(bursts: dict[str, Burst], known: Snapshot) -> list[str]:
    """A line for each container that may use more than its guarantee."""
    lines = []
    counts = "its guarantee alone has to fit"
    if known.overcommit is not None:
        counts = f"the limits on a GPU may add up to {known.overcommit:g} times its memory (burst.overcommit)"
    for name, burst in bursts.items():
        memory = "all that is not guaranteed to others" if burst.mib == LARGEST_GPU_MIB else size(burst.mib)
        time = f" and {burst.core_percent} %" if burst.core_percent else ""
        lines.append(
            f"container {name} may burst to {memory}{time} of a GPU, if the cluster has bursts enabled; {counts}"
        )
    return lines


def met_webhook(found: dict[str, Any], names: Names) -> bool:
    """It sets a variable in each container that requests a share or a GPU, and the class of every pod. The scheduler's name is less certain: a cluster may run Tangram's under any."""
    spec, annotations = found.get("spec") or {}, (found.get("metadata") or {}).get("annotations") or {}
    requesting = [
        one
        for one in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
        if requests_ours(one, names)
    ]
    if all(_only_mig(one, names) for one in requesting):
        return names.service_class in annotations
    requesting = [one for one in requesting if not _only_mig(one, names)]
    return all(any(env.get("name") == GPUS_ENV for env in one.get("env") or []) for one in requesting)


def _only_mig(container: dict[str, Any], names: Names) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return all(names.mig_profile(one) for one in limits if names.ours(one))


def _never_admitted(found: dict[str, Any]) -> str:
    """What is wrong with a pod that was stored without the webhook, and what helps."""
    scheduler = (found.get("spec") or {}).get("schedulerName") or "not named"
    return f"it never met Tangram's webhook, so its quantities are as written and its scheduler is {scheduler}: delete it and create it anew, in a namespace that Tangram does not leave out"


def _document(name: str, rows: list[NodeExplanation], *, admitted: bool) -> dict[str, Any]:
    return {
        "pod": name,
        "placed": False,
        "met_webhook": admitted,
        "fits": any(not row.reason for row in rows),
        "why_not": summary(rows),
        "nodes": rows,
    }


def _print_placed(placed: PodRecord, known: Snapshot, *, json: bool, live: bool = False) -> None:
    document = placed_pod(placed, known, live=live)
    if json:
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return
    print(f"pod {placed.key}: {STANDING[placed.stage]} node {placed.node}")
    for gpu in placed.assignment.held():
        limit = f", at most {size(gpu.limit_mib)} in all" if gpu.limit_mib else ""
        print(f"  GPU {gpu.index} {gpu.uuid}: {_share(gpu.mib, gpu.core_percent, ', ')}{limit}")
    for line in [*_notes_of_bursts(document.bursts, known), *lines_of(document)]:
        print(f"  {line}")


def _orphan(one: PodRecord) -> dict[str, Any]:
    gpus = [
        {"uuid": gpu.uuid, "mib": gpu.mib, "core_percent": gpu.core_percent, "kind": gpu.kind}
        for gpu in one.assignment.held()
    ]
    return {"pod": one.key, "uid": one.uid, "node": one.node, "gpus": gpus}


def _print_orphans(orphans: list[PodRecord]) -> None:
    """Room that no pod of the API explains."""
    for one in orphans[:SHOWN]:
        gpus = [
            f"GPU {gpu.index} {'(whole)' if gpu.kind == 'whole' else f'({_share(gpu.mib, gpu.core_percent)})'}"
            for gpu in one.assignment.held()
        ]
        print(
            f"pod {one.key} was deleted by force, and its processes still run: they keep {', '.join(gpus)} of node {one.node}"
        )


def _print_ended(name: str, phase: str, *, json: bool) -> None:
    if json:
        sys.stdout.write(msgspec.json.encode({"pod": name, "placed": False, "ended": phase}).decode() + "\n")
    else:
        print(f"pod {name} has ended ({phase}): it has no GPU and waits for none")


def _print(name: str, request: PodRequest, rows: list[NodeExplanation], notes: list[str]) -> None:
    """The first of `notes` is what keeps it pending whatever the nodes have; it may be empty."""
    fit = [row.node for row in rows if not row.reason]
    why = "" if notes[0] else ": the scheduler has other reasons"
    verdict = f"fits {len(fit)} of {len(rows)} nodes{why}" if fit else "fits no node"
    print(f"pod {name} requests {_wanted(request)} and {verdict}")
    for condition in filter(None, [*notes, *_conditions(request)]):
        print(f"  {condition}")
    for reason, count in summary(rows).items():
        print(f"  {count} {'node' if count == 1 else 'nodes'}: {reason}{figures(reason, request, rows)}")
    table = Table("NODE", "BEST GPU", "FREE", "LACKS", "WHY NOT", box=None, pad_edge=False)
    for row in rows[:SHOWN]:
        best = row.nearest
        free = free_text(best) if best else "-"
        table.add_row(row.node, _best(row), free, _lacks(row), row.reason or "fits")
    put(table, console())
    if len(rows) > SHOWN:
        print(f"and {len(rows) - SHOWN} more nodes: --json shows all")


def figures(reason: str, request: PodRequest, rows: list[NodeExplanation]) -> str:
    """What is requested of a GPU and what the largest has, where none is large enough; else nothing."""
    need, largest_mib = need_of(request), max((row.largest_mib for row in rows if row.reason == reason), default=0)
    if reason != TOO_LARGE or need is None or not largest_mib:
        return ""
    return f" ({size(need[0])} requested, the largest allowed there has {size(largest_mib)})"


def _wanted(request: PodRequest) -> str:
    """What is requested of the GPUs, in words."""
    need, gpus = need_of(request), gpus_of(request)
    mig = sorted({f"MIG instances {part.profile}" for part in request.containers if part.kind == "mig"})
    if any(part.kind == "whole" for part in request.containers):
        parts = [f"{gpus} whole GPU{'s' if gpus > 1 else ''}", *([f"{_share(*need)} of one GPU"] if need else [])]
    else:
        parts = [f"{_share(*need)} of {'one GPU' if gpus == 1 else f'each of {gpus} GPUs'}"] if need else []
    return ", ".join([*parts, *mig])


def _share(mib: int, percent: int, joint: str = " and ") -> str:
    """A share without what it has no limit of."""
    return joint.join([size(mib), *([f"{percent} %"] if percent else [])])


def size(mib: int) -> str:
    """`200 GiB`; in MiB what is no whole number of them."""
    return f"{mib} MiB" if mib % 1024 or not mib else f"{mib // 1024} GiB"


def _conditions(request: PodRequest) -> list[str]:
    """The pod's conditions on GPUs, a line each."""
    reported = (
        ("of model", request.models),
        ("not of model", request.not_models),
        ("", request.uuids),
        ("not", request.not_uuids),
    )
    return [f"only GPUs {how} {' or '.join(sorted(names))}".replace("  ", " ") for how, names in reported if names]


def _best(row: NodeExplanation) -> str:
    """The nearest GPU, or what the node has where the pod may have none of it."""
    if row.nearest is not None:
        return f"{row.nearest.index} {row.nearest.model}"
    return f"none of {', '.join(row.models)}" if row.models else "-"


def free_text(gpu: Nearest) -> str:
    """What is free of it; less than nothing where a GPU shrank below what was granted."""
    parts = (gpu.free_mib, size, "0 MiB"), (gpu.free_percent, lambda percent: f"{percent} %", "0 %")
    return ", ".join(
        reported(free) if free >= 0 else f"{nothing} ({reported(-free)} too much is granted)"
        for free, reported, nothing in parts
    )


def _lacks(row: NodeExplanation) -> str:
    best = row.nearest
    if best is None:
        return "-"
    if row.lacks_gpus:
        return f"{row.lacks_gpus} GPU{'s' if row.lacks_gpus > 1 else ''}"
    parts = [size(best.lacks_mib)] if best.lacks_mib else []
    parts += [f"{best.lacks_percent} %"] if best.lacks_percent else []
    return ", ".join(parts) or "nothing"
