"""`tangramctl cordon` and `uncordon`: keep new pods off one GPU of a cluster's node, and let them on again.

The order stands in an annotation of the node (`vgpu.api.cordon`), written by the caller's own kubectl with the caller's rights. Two who write at once do not
overrun each other: the node's version is in the patch, and who loses reads again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tangramctl.cluster import kubectl, output_of
from tangramctl.errors import BadOption, CommandError
from vgpu.api.codec import inventory_from_json
from vgpu.api.coherent import why_whole_only
from vgpu.api.cordon import Cordon, cordons_from_json, cordons_to_json
from vgpu.api.errors import BadDocument
from vgpu.api.inventory import CORDON_REASONS, Gpu, Inventory
from vgpu.api.names import Names

TRIES: Final = 5
"""When others write the node at the same time: the kubelet does every 10 s at least. Guessed."""
MOST_NAMED: Final = 50
"""Nodes in an error. Guessed: a screen."""
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,2}")


class Conflict(CommandError):
    """Others wrote the node each time in between."""

    code = 75


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """What the node's annotations show."""

    name: str
    version: str
    inventory: Inventory
    cordons: Mapping[str, Cordon]

    def named(self, text: str) -> str:
        """The UUID of the GPU that an index, a UUID or the unique beginning of one names: in the inventory, or cordoned. Raises BadOption."""
        known = {gpu.uuid: gpu for gpu in self.inventory.gpus} | {
            uuid: None for uuid in self.cordons if self.inventory.gpu(uuid) is None
        }
        if _INDEX.fullmatch(text):
            found = [gpu.uuid for gpu in self.inventory.gpus if gpu.index == int(text)]
        else:
            wanted = text.lower().removeprefix("gpu-")
            found = [uuid for uuid in known if wanted and uuid.removeprefix("GPU-").startswith(wanted)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(
            f"{gpu.index} ({uuid})" if gpu is not None else f"{uuid} (cordoned, not in the node)"
            for uuid, gpu in known.items()
        )
        what = f"{len(found)} GPUs begin so" if found else "there is no such GPU"
        raise BadOption(f"node {self.name}: GPU is {text[:80]!r}: {what}; it has {there or 'no GPUs'}")


def read(node: str, names: Names) -> NodeGpus:
    """Raises BadOption, NotFound."""
    try:
        found: dict[str, Any] = kubectl("get", "node", node)
    except BadOption as error:
        raise BadOption(f"{error}{_others(names)}" if "(NotFound)" in str(error) else str(error)) from None
    annotations = found["metadata"].get("annotations") or {}
    text = annotations.get(names.inventory)
    if text is None:
        raise BadOption(
            f"node {node} has no annotation {names.inventory}: Tangram's device plugin has published no GPUs of it"
        )
    try:
        inventory = inventory_from_json(text)
        cordons = cordons_from_json(annotations.get(names.cordoned_gpus))
    except BadDocument as error:
        raise BadOption(f"node {node}: {error}") from None
    return NodeGpus(node, found["metadata"]["resourceVersion"], inventory, cordons)


def _others(names: Names) -> str:
    """The nodes that have GPUs, for the end of a sentence; empty where the caller may not list nodes."""
    try:
        nodes = kubectl("get", "nodes")["items"]
    except BadOption:
        return ""
    found = sorted(
        one["metadata"]["name"] for one in nodes if names.inventory in (one["metadata"].get("annotations") or {})
    )
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"; nodes with GPUs are {', '.join(found[:MOST_NAMED])}{more}" if found else "; no node has GPUs"


def cordon(node: str, gpu: str, reason: str, names: Names, now: Callable[[], float] = time.time) -> str:
    """Returns the GPU's UUID. A GPU that is cordoned keeps its time, and its reason where none is given. Raises CommandError."""

    def change(found: NodeGpus, uuid: str) -> Mapping[str, Cordon]:
        before = found.cordons.get(uuid)
        if before is not None:
            return {**found.cordons, uuid: Cordon(reason or before.reason, before.since_s)}
        return {**found.cordons, uuid: Cordon(reason, int(now()))}

    found, uuid, changed = _change(node, gpu, names, change)
    print(f"{described(found, uuid)} {'is cordoned' if changed else 'was cordoned before'}")
    return uuid


def uncordon(node: str, gpu: str, names: Names) -> None:
    """Raises CommandError."""

    def change(found: NodeGpus, uuid: str) -> Mapping[str, Cordon]:
        return {one: value for one, value in found.cordons.items() if one != uuid}

    found, uuid, changed = _change(node, gpu, names, change)
    if not changed:
        print(f"{described(found, uuid)} was not cordoned")
        return
    print(
        f"{described(found, uuid)} is no longer cordoned. Pods get it once its self-test has passed: kubectl describe node {node} shows the Events"
    )


def described(found: NodeGpus, uuid: str) -> str:
    """A GPU, for a person."""
    gpu = found.inventory.gpu(uuid)
    return f"GPU {gpu.index} of node {found.name} ({uuid})" if gpu is not None else f"GPU {uuid} of node {found.name}"


def _change(
    node: str, gpu: str, names: Names, change: Callable[[NodeGpus, str], Mapping[str, Cordon]]
) -> tuple[NodeGpus, str, bool]:
    """The node as it was, the UUID, and whether anything was written."""
    for _ in range(TRIES):
        found = read(node, names)
        uuid = found.named(gpu)
        now = change(found, uuid)
        if now == found.cordons:
            return found, uuid, False
        try:
            text = cordons_to_json(now)
        except BadDocument as error:
            raise BadOption(str(error)) from None
        patch = {"metadata": {"resourceVersion": found.version, "annotations": {names.cordoned_gpus: text}}}
        try:
            output_of("patch", "node", node, "--type", "merge", "-p", json.dumps(patch), "-o", "name")
        except BadOption as error:
            if "the object has been modified" not in str(error):
                raise
            continue
        return found, uuid, True
    raise Conflict(f"node {node} was written by others {TRIES} times in between: try again")


def lines(found: NodeGpus) -> list[str]:
    """A line for each GPU: its state, cordon and conditions."""
    rows = [_line(gpu, found.cordons.get(gpu.uuid)) for gpu in found.inventory.gpus]
    missing = [uuid for uuid in found.cordons if found.inventory.gpu(uuid) is None]
    return rows + [f"-  {uuid}  not in the node  {_cordon(found.cordons[uuid], None)}" for uuid in missing]


def _line(gpu: Gpu, one: Cordon | None) -> str:
    parts = [str(gpu.index), gpu.uuid, gpu.model, gpu.state]
    if one is not None or gpu.cordon:
        parts.append(_cordon(one, gpu.cordon))
    if gpu.whole_only:
        parts.append(f"given whole only: {why_whole_only(gpu.coherent)}")
    standing = (c for c in gpu.conditions if c.reason not in CORDON_REASONS)
    parts += [f"{c.reason} since {_time(c.since_s)}: {c.message}" for c in standing]
    return "  ".join(parts)


def _cordon(one: Cordon | None, state: str | None) -> str:
    if one is None:
        return state or ""
    return f"{state or 'cordoned'} since {_time(one.since_s)}" + (f" ({one.reason})" if one.reason else "")


def _time(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
