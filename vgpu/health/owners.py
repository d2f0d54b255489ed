"""Which GPUs are withdrawn from new pods because they are somebody else's, or may be. Pure.

    NotSelected     the operator's selectors (`selection`) do not match the GPU
    GpuClash        another device plugin or DRA driver offers it, or has given it to a pod
    OwnerUnknown    what others offer is not known: no source has answered yet, or not for `LAST_ANSWER_S`

Two plugins that give away one GPU would put containers without a limit beside containers with one, and neither would know. So a GPU is offered only once
every source has answered that it is nobody else's. Later a source may be silent for a while (a kubelet or an API server restarts): then its last answer
counts, and no longer than `LAST_ANSWER_S`.

Another plugin that restarts seems to be gone for some seconds. So a GPU comes back only after a time without a clash.

Times are seconds of a clock that never jumps, except `since_s` of a condition: seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Inventory, Withdrawal
from vgpu.health.foreign import ForeignDevice, offered_by_others
from vgpu.health.selection import Selection

LAST_ANSWER_S: Final = 300.0
"""Guessed: longer than a kubelet or an API server takes to restart."""
RETURN_S: Final = 60.0
"""By default. Guessed: longer than the pod of another plugin takes to be replaced."""
MESSAGE_LIMIT: Final = 200


class Source(StrEnum):
    """Who is asked."""

    KUBELET = "the kubelet's list of devices"
    SLICES = "the node's ResourceSlices"


@dataclass(frozen=True, slots=True)
class Answer:
    """The last one of a source."""

    devices: tuple[ForeignDevice, ...]
    at_s: float
    heard_s: float
    """When the source itself was last heard: a watch answers from what it has, also if it is silent."""


class Owners:
    """Of one node's GPUs. `return_s`: without a clash, until a GPU is offered again."""

    def __init__(self, selection: Selection, return_s: float = RETURN_S) -> None:
        self.selection, self._return_s = selection, return_s
        self.failing: dict[Source, str] = {}
        """Why a source does not answer now."""
        self._answers: dict[Source, Answer] = {}
        self._clashes: dict[str, tuple[frozenset[str], float]] = {}
        """UUID -> who else has it, and when that was seen last."""
        self._since: dict[tuple[str, Withdrawal], int] = {}
        self._labels: Mapping[str, str] | None = None

    def answered(
        self, source: Source, devices: Iterable[ForeignDevice], at_s: float, *, heard_s: float | None = None
    ) -> None:
        """What others offer or have given away, as this source knows it. `heard_s`: if that was earlier than now, `at_s`."""
        self._answers[source] = Answer(tuple(devices), at_s, at_s if heard_s is None else heard_s)
        self.failing.pop(source, None)

    def failed(self, source: Source, why: str) -> None:
        """It did not answer."""
        self.failing[source] = why

    def know_labels(self, labels: Mapping[str, str] | None) -> None:
        """The node's labels; None = not known now: what was known stands."""
        self._labels = labels if labels is not None else self._labels

    def withdrawn(self, inventory: Inventory, at_s: float, since_1970_s: float) -> dict[str, GpuCondition]:
        """UUID -> why the GPU is not offered to new pods. GPUs that are left out are offered. Both times are now, by their clocks."""
        self._follow_clashes(inventory)
        found = {}
        for gpu in inventory.gpus:
            why = self._why(gpu, at_s)
            if why is not None:
                reason, message = why
                since_s = self._since.setdefault((gpu.uuid, reason), int(since_1970_s))
                found[gpu.uuid] = GpuCondition(reason, WITHDRAWN, since_s, message[:MESSAGE_LIMIT])
        standing = {(uuid, one.reason) for uuid, one in found.items()}
        self._since = {key: since_s for key, since_s in self._since.items() if key in standing}
        return found

    def _why(self, gpu: Gpu, at_s: float) -> tuple[Withdrawal, str] | None:
        if self._labels is None and self.selection.label_keys:
            return Withdrawal.UNKNOWN, "the node's labels, which node.gpus reads, are not known yet"
        if not self.selection.has(gpu, self._labels or {}):
            return Withdrawal.NOT_SELECTED, "node.gpus does not select it"
        if gpu.uuid in self._clashes:
            others = ", ".join(sorted(self._clashes[gpu.uuid][0]))
            return Withdrawal.CLASH, f"it is also offered or in use as {others}"
        for source in Source:
            answer = self._answers.get(source)
            if answer is None:
                return Withdrawal.UNKNOWN, f"{source} did not answer yet: whether another plugin offers it is not known"
            if at_s - answer.heard_s > LAST_ANSWER_S:
                return (
                    Withdrawal.UNKNOWN,
                    f"{source} did not answer for {LAST_ANSWER_S:.0f} s: whether another plugin offers it is not known",
                )
        return None

    def _follow_clashes(self, inventory: Inventory) -> None:
        found: dict[str, tuple[frozenset[str], float]] = {}
        for answer in self._answers.values():
            for uuid, by in offered_by_others(answer.devices, inventory).items():
                before, seen_s = found.get(uuid, (frozenset(), answer.at_s))
                found[uuid] = before | by, max(seen_s, answer.at_s)
        known_s = min((answer.at_s for answer in self._answers.values()), default=0.0)
        there = {gpu.uuid for gpu in inventory.gpus}
        for uuid, (by, seen_s) in self._clashes.items():
            if uuid in there and uuid not in found and known_s - seen_s < self._return_s:
                found[uuid] = by, seen_s
        self._clashes = found
