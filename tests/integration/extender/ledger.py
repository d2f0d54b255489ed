"""An independent count of which pod has what, from what the API server reports and nothing else.

Slow and plain on purpose: it shares no code with what it checks, not even the reader of assignments. It sees every change of every
pod and notes whatever must never be, in the moment in which it is:

    I1  more memory or compute time assigned of a GPU than it has, over all pods that are bound and have not ended
    I2  a pod that requests GPUs, is bound and has none, or the other way round; GPUs of another node; another amount than it requested; an
        annotation for its containers that differs from its assignment
    I4  a pod that moves, or whose GPUs change, once it is bound

I3 is `differences`: the same count against what an extender believes. I5 is for the tests, which know which pod should be evicted for which.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from vgpu.scheduling.snapshot import Snapshot

DOMAIN: Final = "tangram.sh"
UNIT_MIB: Final = 1024
GPU_PERCENT: Final = 100

Thing = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AssignedShare:
    """What one container has of one GPU."""

    gpu: str
    mib: int
    percent: int


@dataclass(slots=True)
class AssignmentLedger:
    """`gpus` is every GPU that ever was: node -> UUID -> MiB."""

    gpus: dict[str, dict[str, int]]
    wrong: list[str] = field(default_factory=list)
    held: dict[str, tuple[AssignedShare, ...]] = field(default_factory=dict)
    """UID -> what a bound pod has on its node."""
    alive: dict[str, Thing] = field(default_factory=dict)
    """UID -> pod as last seen."""
    bound_ever: int = 0
    leaving: set[str] = field(default_factory=set)
    """UIDs of pods that were deleted while they were bound."""
    names: dict[str, str] = field(default_factory=dict)
    """UID -> name, of all that ever were."""
    _where: dict[str, tuple[str, str]] = field(default_factory=dict)
    """UID -> node and assignment at first sight."""
    _on: dict[str, set[str]] = field(default_factory=dict)
    """GPU -> UIDs of pods that use some of it."""

    def report(self, kind: str, pod: Thing) -> None:
        """A change, as a watch reports it."""
        uid = pod["metadata"]["uid"]
        self.names[uid] = pod["metadata"]["name"]
        if kind == "DELETED" or pod["status"].get("phase") in ("Succeeded", "Failed"):
            self._ended(uid)
            return
        self.alive[uid] = pod
        node = pod["spec"].get("nodeName", "")
        text = pod["metadata"].get("annotations", {}).get(f"{DOMAIN}/assignment", "")
        if (bool(node) and _requests(pod)) != bool(text):
            self._note(pod, f"is on node {node!r} and has the assignment {text!r}")
            return
        if not text:
            return
        if "deletionTimestamp" in pod["metadata"]:
            self.leaving.add(uid)
        if self._where.setdefault(uid, (node, text)) != (node, text):
            self._note(pod, f"was {self._where[uid]} and is {(node, text)}")
        if uid not in self.held:
            self._bound(uid, pod, node, text)

    def bound(self) -> list[Thing]:
        """Pods that are bound and have not ended."""
        return [pod for uid, pod in self.alive.items() if uid in self.held]

    def waiting(self) -> list[Thing]:
        """Pods that are there and not bound."""
        return [pod for uid, pod in self.alive.items() if uid not in self.held]

    def gpus_of(self, uid: str) -> set[str]:
        """UUIDs of the GPUs that a pod has, or had when it was last bound."""
        return {share.gpu for share in _shares(json.loads(self._where[uid][1]))}

    def used(self) -> tuple[Counter[str], Counter[str]]:
        """GPU -> MiB, and GPU -> percent, counted from nothing."""
        mib: Counter[str] = Counter()
        percent: Counter[str] = Counter()
        for shares in self.held.values():
            for share in shares:
                mib[share.gpu] += share.mib
                percent[share.gpu] += share.percent
        return mib, percent

    def differences(self, believed: Snapshot) -> list[str]:
        """Where an extender's state differs from what the API reports."""
        mib, percent = self.used()
        found = []
        for record in believed.nodes:
            for one in record.free:
                size_mib = self.gpus[record.name][one.uuid]
                reported = size_mib - mib[one.uuid], GPU_PERCENT - percent[one.uuid]
                if reported != (one.mib, one.core_percent):
                    found.append(f"{record.name} {one.uuid}: by the API {reported} are free, by the extender {one}")
        theirs, ours = {record.uid for record in believed.pods}, set(self.held)
        return found + [f"pod {self.names.get(uid, uid)} is known to one of them only" for uid in theirs ^ ours]

    def _bound(self, uid: str, pod: Thing, node: str, text: str) -> None:
        self.bound_ever += 1
        containers = json.loads(text)["containers"]
        shares = _shares({"containers": containers})
        self.held[uid] = shares
        for name, of_it in containers.items():
            visible = pod["metadata"]["annotations"].get(f"{DOMAIN}/gpus.{name}", "").split(",")
            if sorted(visible) != sorted(one["uuid"] for one in of_it):
                self._note(pod, f"container {name} sees {visible} and is assigned {of_it}")
        if sum(share.mib for share in shares) != _requested_mib(pod):
            self._note(pod, f"requests {_requested_mib(pod)} MiB and has {shares}")
        for share in shares:
            if share.gpu not in self.gpus[node]:
                self._note(pod, f"is on node {node} and has {share.gpu}, which is none of its GPUs")
                continue
            self._on.setdefault(share.gpu, set()).add(uid)
            self._check(pod, share.gpu, self.gpus[node][share.gpu])

    def _check(self, pod: Thing, gpu: str, room_mib: int) -> None:
        there = [share for uid in self._on[gpu] for share in self.held[uid] if share.gpu == gpu]
        mib, percent = sum(share.mib for share in there), sum(share.percent for share in there)
        if mib > room_mib or percent > GPU_PERCENT:
            self._note(pod, f"brings GPU {gpu} to {mib} of {room_mib} MiB and {percent} of {GPU_PERCENT} percent")

    def _ended(self, uid: str) -> None:
        self.alive.pop(uid, None)
        for share in self.held.pop(uid, ()):
            self._on.get(share.gpu, set()).discard(uid)

    def _note(self, pod: Thing, what: str) -> None:
        self.wrong.append(f"pod {pod['metadata']['name']} {what}")


def _requests(pod: Thing) -> bool:
    """Does it request anything of Tangram?"""
    containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    return any(
        name.startswith(f"{DOMAIN}/") for one in containers for name in one.get("resources", {}).get("limits", {})
    )


def _shares(document: Thing) -> tuple[AssignedShare, ...]:
    return tuple(
        AssignedShare(one["uuid"], one["mib"], one.get("core", 0))
        for of_it in document["containers"].values()
        for one in of_it
    )


def _requested_mib(pod: Thing) -> int:
    limits = (one["resources"]["limits"] for one in pod["spec"]["containers"])
    return sum(int(one[f"{DOMAIN}/gpu-mem"]) * UNIT_MIB for one in limits)
