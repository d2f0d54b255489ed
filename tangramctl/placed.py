"""`tangramctl explain pod` of a pod that has its GPUs: what it may use of them and, if it may burst, what it has now and why it does not run.

The first comes from the snapshot, the rest by the caller's own kubectl: the pod, and `tangramctl ps` in the device plugin's pod on its node. What
cannot be read is a line on stderr.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec

from tangramctl.cluster import kubectl, output_of
from tangramctl.errors import CommandError
from tangramctl.screen import amount, sizes
from tangramctl.swapping import ends_of, state_of
from tangramctl.view import RunView, StateRootView
from vgpu.api.burst import Burst, bursts_of
from vgpu.api.errors import BadRequest
from vgpu.api.names import Names
from vgpu.api.request import pod_request
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.snapshot import PodRecord, Snapshot

NODE_PODS: Final = "app.kubernetes.io/part-of=tangram,app.kubernetes.io/component=node"
"""Labels of the device plugin's pods, as the chart sets them."""


class PlacedPod(msgspec.Struct, frozen=True, omit_defaults=True):
    """The document of a pod that is placed."""

    pod: str
    placed: bool = msgspec.field()
    node: str
    stage: str
    bursts: dict[str, Burst] = {}
    """Container -> limits above its guarantee that it requests."""
    containers: tuple[RunView, ...] = ()
    """As `ps --json` has them, if it bursts and its node answers."""
    conditions: tuple[dict[str, Any], ...] = ()
    """Of the pod's status, those of this domain."""


def placed_pod(record: PodRecord, known: Snapshot, *, live: bool) -> PlacedPod:
    """What is known of a placed pod. `live`: by kubectl too."""
    document = PlacedPod(record.key, True, record.node, record.stage)
    if not live:
        return document
    try:
        found = _pod(record)
        if found is None:
            return document
        bursts = bursts_of(
            found["metadata"].get("annotations") or {},
            pod_request(found, names=Names(known.domain), unit_mib=known.unit_mib, policies=POLICIES),
            names=Names(known.domain),
            unit_mib=known.unit_mib,
        )
        document = msgspec.structs.replace(document, bursts=bursts, conditions=_conditions(found, known.domain))
        if bursts:
            document = msgspec.structs.replace(document, containers=_containers(record))
    except (CommandError, BadRequest, msgspec.MsgspecError) as error:
        print(f"what pod {record.key} uses now is not known: {error}", file=sys.stderr)
    return document


def lines_of(document: PlacedPod) -> list[str]:
    """Sentences for a person."""
    lines = []
    for one in document.containers:
        name = one.name.rpartition("/")[2]
        lines += [
            f"container {name} has {amount(gpu.leased_bytes)} of {sizes(gpu.guarantee_bytes, gpu.limit_bytes)} of {gpu.uuid}: "
            f"{amount(gpu.excess_bytes)} above its guarantee, {amount(gpu.away_bytes)} in host memory"
            for gpu in one.gpus
            if gpu.bursts
        ]
        lines += [*state_of(f"container {name}", one.swap, one.gpus), *ends_of(f"container {name}", one.swap)]
    lines += [
        f"condition {one.get('type')} is true since {one.get('lastTransitionTime', 'an unknown time')}: {one.get('message', '')}"
        for one in document.conditions
        if one.get("status") == "True"
    ]
    return lines


def _pod(record: PodRecord) -> dict[str, Any] | None:
    """The pod of the record; None if another has its name by now."""
    namespace, _, name = record.key.partition("/")
    found = kubectl("get", "pod", name, "-n", namespace)
    its = isinstance(found, dict) and found.get("kind") == "Pod" and found.get("metadata", {}).get("uid") == record.uid
    return found if its else None


def _conditions(found: dict[str, Any], domain: str) -> tuple[dict[str, Any], ...]:
    conditions = (found.get("status") or {}).get("conditions") or []
    return tuple(one for one in conditions if str(one.get("type", "")).startswith(f"{domain}/"))


def _containers(record: PodRecord) -> tuple[RunView, ...]:
    """Raises CommandError, MsgspecError."""
    where = f"spec.nodeName={record.node}"
    for one in kubectl("get", "pods", "-A", "-l", NODE_PODS, "--field-selector", where)["items"]:
        meta = one["metadata"]
        inside = ("-n", meta["namespace"], meta["name"], "-c", "arbiter", "--", "tangramctl", "ps", "--json")
        view = msgspec.json.decode(output_of("exec", *inside), type=StateRootView)
        return tuple(entry for entry in view.entries if entry.name.startswith(f"{record.key}/"))
    return ()
