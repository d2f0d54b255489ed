"""GPU capacity set aside for pods that the watch has not shown bound: one store, and one table of what each stage means.

    scheduling   reserved ------------bind--> binding --accepted---> bound, not yet seen      filter placed the pod
                 --gang--> in gang ---bind-->         --no answer--> in doubt
    nomination   planned                                                                      it is nominated ahead of its scheduling cycle
    preemption   kept                                                                         others are evicted for it

`STAGES` is the complete set of rules: which events lead where, which pods may take the capacity, and when it lapses. Another stage or kind is another row.
Whether the reservations of a gang end before they lapse, `vgpu.scheduling.gangs` decides.
Pure: it knows no GPUs and reads no clock. The caller passes the time, and what the watch has shown by then.

A pod has one reservation of a kind. Of several kinds the first of `KINDS` has the capacity. A preemption reservation
takes its capacity back when the pod's scheduling reservation lapses. A pod for which others are evicted is no longer nominated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

from vgpu.api.grant import Assignment
from vgpu.api.request import PodRequest

Kind = Literal["scheduling", "preemption", "nomination"]
Stage = Literal["reserved", "in gang", "binding", "in doubt", "bound", "kept", "planned"]
Event = Literal["gang", "bind", "accepted", "no answer"]
"""`gang`: the pod is scheduled together with others. `bind`: a bind call begins. `accepted`: the API server reports that the pod is bound. `no answer`: it may bind the pod yet."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Taker = Literal["no pod", "its pod", "pods before it"]
"""Which pods may take the capacity of a reservation.

no pod          it may become, or has become, a bound pod whatever the extender decides: if another pod got it, the GPU could be assigned twice
its pod         the pod that it is for, when it is placed anew
pods before it  also a pod of a higher priority that fits no node, and one of the same priority if it is among the last `EQUALS` made
"""

Lapse = Literal["never", "time", "received", "listed"]
"""When a reservation lapses.

never     an event ends the stage
time      when its life is over
received  when its life is over, and the API server has sent something since: before that, the watch may not have shown yet that the pod is bound
listed    when its life is over, and a list of all pods that began after the stage did is complete, and the pod is not in it. A watch that
          goes on reports every change, so until then the pod is there, or its end will be reported: no time proves more
"""

EQUALS: Final = 128
"""Each takes 10 us to set aside and make again (measured), and in a full cluster that is done for every pod that fits no node."""


@dataclass(frozen=True, slots=True)
class StageRule:
    """What a stage means."""

    kind: Kind
    taker: Taker
    lapse: Lapse
    life_s: float = 0.0
    """Unless the operator sets another life."""
    next: Mapping[Event, Stage] = field(default_factory=dict)
    """Events that are not named leave it as it is."""


STAGES: Final[Mapping[Stage, StageRule]] = MappingProxyType(
    {
        # From filter to bind; scheduling cycles with volumes or permits may take seconds. Between 30 and 60 s.
        "reserved": StageRule("scheduling", "its pod", "time", 60.0, {"gang": "in gang", "bind": "binding"}),
        # kube-scheduler's Permit waits 5 minutes for the others (permitTimeoutDuration of its plugin GangScheduling).
        "in gang": StageRule("scheduling", "its pod", "time", 300.0, {"bind": "binding"}),
        "binding": StageRule("scheduling", "no pod", "never", next={"accepted": "bound", "no answer": "in doubt"}),
        # The API server gives up on a write after 60 s (its --request-timeout), so one that was not answered cannot happen later.
        "in doubt": StageRule("scheduling", "no pod", "received", 60.0, {"bind": "binding", "accepted": "bound"}),
        # A watch lags by milliseconds. Guessed: before that a list is not compared with it.
        "bound": StageRule("scheduling", "no pod", "listed", 5.0, {"bind": "binding"}),
        # Victims end within their grace periods.
        "kept": StageRule("preemption", "its pod", "time", 300.0),
        # As long as a preemption reservation; but it yields to other pods, and that does not.
        "planned": StageRule("nomination", "pods before it", "time", 300.0),
    }
)

FIRST: Final[Mapping[Kind, Stage]] = MappingProxyType(
    {"scheduling": "reserved", "preemption": "kept", "nomination": "planned"}
)


@dataclass(slots=True)
class Reservation:
    """One pod's."""

    uid: str
    key: str
    """The pod, as `namespace/name`."""
    node: str
    stage: Stage
    since_s: float
    """When it entered its stage."""
    expires_at_s: float
    """When its life is over; infinite where an event ends its stage."""
    priority: int = 0
    request: PodRequest | None = None
    """What is requested, where a placement has to be found again."""
    assignment: Assignment | None = None
    """What the pod would be given, where its allocation does not show it."""
    nominated: bool = False
    """Did this extender write status.nominatedNodeName?"""

    @property
    def rule(self) -> StageRule:
        """Of its stage."""
        return STAGES[self.stage]

    @property
    def firm(self) -> bool:
        """May this still become, or has it become, a bound pod whatever the extender decides?"""
        return self.rule.taker == "no pod"


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """What the watch has shown."""

    heard_s: float = float("inf")
    """When the API server last sent anything."""
    listed_s: float = float("-inf")
    """When the last complete list of all pods began."""
    has: Callable[[str, str], bool] = lambda _key, _uid: False
    """Is there a pod of this key and UID, as far as is known?"""


class Reservations:
    """By pod UID and kind. `lives_s`: where the operator sets other lives than the table's."""

    def __init__(self, lives_s: Mapping[Stage, float] | None = None) -> None:
        self._lives_s = {stage: rule.life_s for stage, rule in STAGES.items()} | dict(lives_s or {})
        self._by_kind: dict[Kind, dict[str, Reservation]] = {kind: {} for kind in KINDS}
        self._none_before_s: dict[Kind, float] = dict.fromkeys(KINDS, float("inf"))
        """Nothing of a kind lapses before this: a filter call need not check each."""

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def __contains__(self, uid: str) -> bool:
        for some in self._by_kind.values():  # noqa: SIM110 - `any` takes twice as long, and this is called for each pod
            if uid in some:
                return True
        return False

    def __iter__(self) -> Iterator[Reservation]:
        for some in self._by_kind.values():
            yield from some.values()

    def of(self, kind: Kind) -> Mapping[str, Reservation]:
        """Those of a kind, by UID, in the order in which they were made."""
        return self._by_kind[kind]

    def get(self, uid: str, kind: Kind = "scheduling") -> Reservation | None:
        """A pod's reservation of a kind."""
        return self._by_kind[kind].get(uid)

    def first(self, uid: str) -> Reservation | None:
        """The reservation of a pod that has the capacity."""
        return next((one for kind in KINDS if (one := self._by_kind[kind].get(uid)) is not None), None)

    def put(
        self,
        kind: Kind,
        uid: str,
        key: str,
        node: str,
        now_s: float,
        *,
        priority: int = 0,
        request: PodRequest | None = None,
        assignment: Assignment | None = None,
        nominated: bool = False,
    ) -> Reservation:
        """Reserve, in place of an earlier reservation of this kind."""
        stage = FIRST[kind]
        self._by_kind[kind].pop(uid, None)  # the new one is the last in order
        one = Reservation(uid, key, node, stage, now_s, 0.0, priority, request, assignment, nominated)
        self._by_kind[kind][uid] = one
        if kind == "preemption":
            self._by_kind["nomination"].pop(uid, None)
        self._enter(one, stage, now_s)
        return one

    def on(self, event: Event, uid: str, now_s: float) -> None:
        """Something happened to a pod's Binding. Nothing when the watch was faster and the reservation is gone."""
        one = self._by_kind["scheduling"].get(uid)
        if one is not None and event in one.rule.next:
            self._enter(one, one.rule.next[event], now_s)

    def end(self, uid: str, kind: Kind = "scheduling") -> Reservation | None:
        """End a reservation. Returns it, None when there was none."""
        return self._by_kind[kind].pop(uid, None)

    def end_all(self, uid: str) -> None:
        """The pod is seen bound, or gone."""
        for some in self._by_kind.values():
            some.pop(uid, None)

    def lapsed(self, kind: Kind, now_s: float, shown: WatchProgress | None = None) -> list[str]:
        """UIDs whose reservation of a kind is over. They stay until `end`."""
        if now_s < self._none_before_s[kind]:
            return []
        some = self._by_kind[kind]
        self._none_before_s[kind] = min((one.expires_at_s for one in some.values()), default=float("inf"))
        return [uid for uid, one in some.items() if _is_over(one, now_s, shown or WatchProgress())]

    def yielding(self, priority: int) -> list[str]:
        """UIDs of the nominations that yield to a pod of this priority that fits no node."""
        planned = self._by_kind["nomination"]
        equals = [uid for uid, one in planned.items() if one.priority == priority]
        return [*equals[-EQUALS:], *(uid for uid, one in planned.items() if one.priority < priority)]

    def _enter(self, one: Reservation, stage: Stage, now_s: float) -> None:
        rule = STAGES[stage]
        one.stage, one.since_s = stage, now_s
        one.expires_at_s = float("inf") if rule.lapse == "never" else now_s + self._lives_s[stage]
        self._none_before_s[rule.kind] = min(self._none_before_s[rule.kind], one.expires_at_s)


def _is_over(one: Reservation, now_s: float, shown: WatchProgress) -> bool:
    if now_s < one.expires_at_s:
        return False
    match one.rule.lapse:
        case "listed":
            return shown.listed_s > one.since_s and not shown.has(one.key, one.uid)
        case "received":
            return shown.heard_s >= one.expires_at_s
        case lapse:
            return lapse == "time"
