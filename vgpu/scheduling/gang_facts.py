"""What `vgpu.scheduling.gangs` decides by, and what it answers: values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Standing = Literal["bound", "waits", "requests nothing", "unschedulable"]
"""What the watch shows of a pod. `waits`: it is not bound, and requests something of ours. Else it requests nothing of ours, and is
`unschedulable` if kube-scheduler reports that."""

Predicate = Callable[[str], bool]
"""About the pod of a UID."""


def no_pod(_uid: str) -> bool:
    """True of no pod."""
    return False


@dataclass(frozen=True, slots=True)
class ReservationFacts:
    """Which pods have reservations, and what the watch shows of them."""

    reserved: Predicate
    """Is there a reservation that ends with the gang's?"""
    kept: Predicate = no_pod
    """Does it have a preemption reservation? That does not end with the gang's reservations."""
    expected: Predicate = no_pod
    """Is kube-scheduler seen to bind it to the node of its reservation, or to be about to?"""


@dataclass(frozen=True, slots=True)
class GangFailure:
    """A gang that is not scheduled."""

    group: str
    uids: tuple[str, ...]
    """All of its pods but those in flight, with one that is gone now: reservations of those that are not bound end."""
    others_wait: bool
    """Was a pod of others refused since the gang's first call?"""
