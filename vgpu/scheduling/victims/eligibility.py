"""A pod with GPUs on a node, and whether another pod may evict it.

All rules are here: which preemptors may evict at all (`may_evict`), which pods have a priority that is low enough (`is_lower`), and which of
those may not be evicted all the same (`AllocatedPod.protected`). `extender.preemption.victim_candidates` finds the facts behind `protected`.
"""

from __future__ import annotations

from typing import Final, overload

import msgspec
import numpy as np
import numpy.typing as npt

from vgpu.api.grant import AssignedGpu

UNSTARTED: Final = 10**14
"""Later than any time of four digits a year: a pod that has not started is the youngest."""

LOWEST: Final = -(2**31)
"""No pod has a lower priority."""

MOST: Final = 2**46
"""Amounts of a resource that are distinguished: 64 TiB of memory. What is more counts as so much, so that sums of pods stay exact."""

PODS: Final = "pods"
"""The resource of which each pod has one: a node runs so many (core/v1, ResourcePods)."""


class AllocatedPod(msgspec.Struct, frozen=True, gc=False):
    """A pod with GPUs on a node. Thousands are made at once: a dataclass takes seven times as long."""

    uid: str
    held: tuple[AssignedGpu, ...]
    priority: int = 0
    service_class: str = "standard"
    started: int = UNSTARTED
    """When (`started_at`)."""
    budgets: frozenset[str] = frozenset()
    """Disruption budgets that it counts in."""
    protected: bool = False
    """Never to be evicted: it terminates already, has only a reservation, was evicted too often lately, or is part of a whole (a queue's)."""
    requests: dict[str, int] = {}
    """What its end frees of each resource (`kube.pod_requests`)."""

    def may_be_evicted_for(self, priority: int) -> bool:
        """May a pod of this priority evict it? A service class gives no right to evict: only the priority counts."""
        return not self.protected and is_lower(self.priority, priority)

    def frees(self, resource: str) -> int:
        """What its end frees of a resource, as far as amounts are distinguished."""
        return 1 if resource == PODS else min(MOST, self.requests.get(resource, 0))


def may_evict(preemption_policy: str) -> bool:
    """May a pod with this preemptionPolicy evict others? The field is empty or `PreemptLowerPriority`, or `Never` (scheduling/v1, PriorityClass)."""
    return preemption_policy != "Never"


def started_at(text: str) -> int:
    """RFC 3339 in UTC, to the second, as a number that compares: YYYYMMDDhhmmss. `UNSTARTED` for an empty text."""
    digits = text[:4] + text[5:7] + text[8:10] + text[11:13] + text[14:16] + text[17:19]
    if text[4:17:3] != "--T::" or not (digits.isascii() and digits.isdigit()):  # not as Kubernetes writes it
        digits = "".join(letter for letter in text[:19] if letter.isascii() and letter.isdigit())
    return int(digits) if digits else UNSTARTED


@overload
def is_lower(priority: int, than: int) -> bool: ...


@overload
def is_lower(priority: npt.NDArray[np.int64], than: int) -> npt.NDArray[np.bool_]: ...


def is_lower(priority: int | npt.NDArray[np.int64], than: int) -> bool | npt.NDArray[np.bool_]:
    """Is this priority lower than that of the pod that needs the capacity? Of an array: of each. Pods of equal priority never evict each other."""
    return priority < than
