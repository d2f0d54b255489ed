"""Nominate pods to nodes ahead of their scheduling cycle, while many wait (`vgpu.scheduling.nominate`) and it saves time
(`vgpu.scheduling.nominate_pacing`).

    waiting pods --WaitingQueue--> due --placement over the fleet--> nomination reservation --one write--> status.nominatedNodeName
    kube-scheduler filters that one node --> a scheduling reservation; or it filters all nodes, as without a nomination

No other part depends on it. A nomination that kube-scheduler does not follow (another pod's anti-affinity, memory, a new taint) costs it
one filter call for one node. The pod is then scheduled in the ordinary way and never nominated again, also not by an extender that starts
later. If most nominations are not followed, the nominator pauses. Only one extender nominates: the one beside the active kube-scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Final, Literal

import msgspec
import structlog

from extender.nominate.nomination_reservations import NominationReservations
from extender.state import State
from kube.cache import Cache
from kube.client import Client
from kube.errors import ApiError
from kube.needs import suits
from kube.objects import Condition, Needs, Node, Pod
from kube.patch import nominate
from vgpu.api.errors import BadRequest
from vgpu.api.request import PodRequest
from vgpu.scheduling.nodes.name_index import Quoted
from vgpu.scheduling.nominate import NominationSuccess, WaitingPod, WaitingQueue, due
from vgpu.scheduling.nominate_pacing import Pacing
from vgpu.scheduling.placement import NoFit, Placement, place
from vgpu.scheduling.policies.registry import POLICIES

ACTIVE_S: Final = 10.0
"""An extender that was not called for so long is not the active one: while pods wait, the active one is called many times a second. Guessed."""

VAIN_S: Final = 5.0
"""A request that fits nowhere is not tried again for so long: a try takes 5 ms for 10,000 nodes. Guessed."""

WRITERS: Final = 4
"""Nominations being written at a time. More are not faster on two cores (measured)."""

KINDS: Final = 64
"""Kinds of needs whose nodes are kept, and requests that fit nowhere. Guessed."""

SCHEDULER_ERROR: Final = "SchedulerError"
GATED: Final = "SchedulingGated"
"""Reasons of the condition PodScheduled. Specified by the API (core/v1, PodReasonSchedulerError and PodReasonSchedulingGated)."""

TOGETHER: Final = 512
"""Nodes checked before kube-scheduler's calls may run: 0.5 ms."""

When = Literal["auto", "always", "never"]
"""Whether pods are nominated ahead: where it is worth it, wherever pods wait, or not at all."""

log = structlog.get_logger("extender.nominate.nominator")


class Nominator:
    """`scheduler`: name of the scheduler whose pods are nominated. With `when` never it does nothing."""

    def __init__(
        self,
        client: Client,
        state: State,
        *,
        pods: Cache[Pod],
        nodes: Cache[Node],
        clock: Callable[[], float],
        scheduler: str,
        when: When,
    ) -> None:
        self.reservations = NominationReservations(state)
        self.counts = {"written": 0, "refused": 0, "taken": 0, "left": 0}
        """Nominations written, refused by the API server, followed by kube-scheduler (`taken`), not followed (`left`)."""
        self._client, self._state, self._pods, self._nodes = client, state, pods, nodes
        self._clock, self._scheduler, self._when = clock, scheduler, when
        self._line, self._trust, self._pacing = WaitingQueue[Needs](), NominationSuccess(), Pacing()
        self._seen: dict[str, str] = {}
        """UID of every waiting pod that was nominated, or that must not be -> its node, or an empty string."""
        self._written: set[str] = set()
        """UIDs of waiting pods whose nomination this extender has written."""
        self._suitable: dict[Needs, Sequence[str]] = {}
        self._in_vain: dict[tuple[PodRequest, Needs], float] = {}
        self._called_at_s = float("-inf")
        self._wake, self._rests = asyncio.Event(), asyncio.Event()
        self._rests.set()
        self._writes: asyncio.Queue[WaitingPod[Needs]] = asyncio.Queue(WRITERS)

    # --- what the watch shows ---

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod was added, changed or removed."""
        if new is None or new.finished:
            for pod in (old, new):
                if pod is not None:
                    self._forget(pod.uid)
        elif new.spec.node_name:
            self._judge(new.uid, useful=new.spec.node_name == self._seen.get(new.uid))
            self._forget(new.uid)
        elif new.metadata.deletion_timestamp is not None:
            self._forget(new.uid)
        elif fits_nowhere(new):
            self._judge(new.uid, useful=False)
            self._set_aside(new.uid)
        elif self._is_anothers(new):
            self._forget(new.uid)
            self.read_back(new)
        elif self._when != "never" and new.uid not in self._seen and new.uid not in self._line:
            self._join(new)

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        """A node was added, changed or removed."""
        if old is None or new is None or _grounds(old) != _grounds(new):
            self._suitable.clear()

    def _join(self, pod: Pod) -> None:
        needs = pod.spec.needs
        if needs is None or pod.spec.scheduler_name != self._scheduler or pod.status.nominated_node_name:
            return
        try:
            request = self._state.request_to_set_aside(pod)
        except BadRequest:  # filter reports it to the user
            return
        if request and not POLICIES[request.policy].lists and self._state.allocations.place_of(pod.uid) is None:
            self._line.join(WaitingPod(pod.uid, pod.key, pod.spec.priority or 0, request, needs))
            self._wake.set()

    def _is_anothers(self, pod: Pod) -> bool:
        """Did another extender nominate the pod, while it is in line here, or to another node? Then this one was not active, or is not."""
        node = pod.status.nominated_node_name
        return (
            bool(node) and node != self._seen.get(pod.uid) and (pod.uid in self._line or pod.uid in self.reservations)
        )

    def _judge(self, uid: str, *, useful: bool) -> None:
        if uid in self._written:
            self.counts["taken" if useful else "left"] += 1
            self._trust.note(self._clock(), useful=useful)

    def _set_aside(self, uid: str) -> None:
        """Its nomination ends, and it is not nominated again."""
        self._forget(uid)
        self._seen[uid] = ""

    def _forget(self, uid: str) -> None:
        self._line.leave(uid)
        self.reservations.end(uid)
        self._seen.pop(uid, None)
        self._written.discard(uid)

    # --- what kube-scheduler calls ---

    def called(self, pod: Pod) -> None:
        """kube-scheduler tries this pod: it is placed now, and its nomination reservation ends."""
        self._called_at_s = self._clock()
        nominated = pod.uid in self._written
        if self._line.leave(pod.uid):
            self._seen[pod.uid] = ""
        waiting = len(self._line) + len(self.reservations)
        self._pacing.called(self._called_at_s, nominated=nominated, waiting=waiting)
        if self.reservations.end(pod.uid) or self._line:
            self._wake.set()

    def is_active(self) -> bool:
        """Is the kube-scheduler beside this extender the active one, as far as its calls show?"""
        return self._clock() - self._called_at_s < ACTIVE_S

    def has_nominated(self, uid: str) -> bool:
        """Did this extender nominate the pod ahead of its scheduling cycle?"""
        return bool(self._seen.get(uid))

    def read_back(self, pod: Pod) -> None:
        """Reserve for a pod that another or an earlier extender has nominated, if its node still has the capacity."""
        node = pod.status.nominated_node_name
        try:
            request = self._state.request_to_set_aside(pod)
        except BadRequest:
            return
        if (
            self._when == "never"
            or not request
            or self._state.allocations.place_of(pod.uid) is not None
            or pod.uid in self.reservations
        ):
            return
        found = self._place(request, [node])
        if found is not None:
            self._seen[pod.uid] = node
            self._put(WaitingPod(pod.uid, pod.key, pod.spec.priority or 0, request, Needs()), found)

    def expire(self) -> None:
        """Once a second: end the reservations that have lapsed."""
        for uid in self.reservations.lapsed():
            self.reservations.end(uid)

    # --- the nominator's own tasks ---

    async def run(self) -> None:
        """Until cancelled."""
        if self._when == "never":
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._plan_ahead())
            for _ in range(WRITERS):
                group.create_task(self._write())

    async def _plan_ahead(self) -> None:
        while True:
            if not self._wake.is_set():
                self._rests.set()
            await self._wake.wait()
            self._rests.clear()
            self._wake.clear()
            while (one := self._next()) is not None:
                await self._plan(one)
                await asyncio.sleep(0)  # kube-scheduler's calls run first

    def _next(self) -> WaitingPod[Needs] | None:
        now_s = self._clock()
        if not self.is_active() or self._trust.paused(now_s):
            return None
        if self._when == "auto" and not self._pacing.worth(now_s):
            return None
        return due(self._line, len(self.reservations))

    async def _plan(self, one: WaitingPod[Needs]) -> None:
        nodes = await self._candidates(one.needs)
        if not self._line.leave(one.uid):
            return  # kube-scheduler has tried it, or it is gone
        self._seen[one.uid] = ""
        kind = one.request, one.needs
        if self._clock() - self._in_vain.get(kind, float("-inf")) < VAIN_S:
            return
        found = self._place(one.request, nodes)
        if found is None:
            while len(self._in_vain) >= KINDS:
                del self._in_vain[next(iter(self._in_vain))]
            self._in_vain.pop(kind, None)
            self._in_vain[kind] = self._clock()
            return
        self._seen[one.uid] = found.node
        self._put(one, found)
        await self._writes.put(one)

    def _put(self, one: WaitingPod[Needs], found: Placement) -> None:
        self.reservations.put(one.uid, one.key, one.priority, one.request, found)

    async def _candidates(self, needs: Needs) -> Sequence[str]:
        """Nodes with GPUs that suit the pod, whatever their GPUs have free."""
        found = self._suitable.get(needs)
        if found is not None:
            return found
        self._suitable[needs] = ()  # removed if a node changes meanwhile
        names, nodes = list[str](), [one for one in self._nodes.items() if one.metadata.annotations]
        for first in range(0, len(nodes), TOGETHER):
            names += _suiting(needs, nodes[first : first + TOGETHER])
            await asyncio.sleep(0)
        found = _quoted(names)
        if needs in self._suitable:
            self._suitable[needs] = found
        while len(self._suitable) > KINDS:
            del self._suitable[next(iter(self._suitable))]
        return found

    def _place(self, request: PodRequest, names: Sequence[str]) -> Placement | None:
        """Where it fits, also by CPU as far as that is known."""
        fleet, only = self._state.fleet, self._state.only(request)
        found = place(fleet, request, names, only)
        if isinstance(found, Placement) and fleet.free_cpu_milli[fleet.column[found.node]] < request.cpu_milli:
            known = [name for name in names if name in fleet]
            columns = [fleet.column[name] for name in known]
            enough = (fleet.free_cpu_milli[columns] >= request.cpu_milli).tolist()
            found = place(fleet, request, tuple(compress(known, enough)), only)
        return None if isinstance(found, NoFit) else found

    async def _write(self) -> None:
        while True:
            one = await self._writes.get()
            try:
                await self._nominate(one)
            finally:
                self._writes.task_done()

    async def flush(self) -> None:
        """Return when every waiting pod was considered, and each nomination is written or refused. For tests."""
        if self._wake.is_set():
            self._rests.clear()
        await self._rests.wait()
        await self._writes.join()

    async def _nominate(self, one: WaitingPod[Needs]) -> None:
        pod, node = self._pods.get(one.key), self._seen.get(one.uid)
        if (
            pod is None
            or pod.uid != one.uid
            or not node
            or one.uid not in self.reservations
            or pod.status.nominated_node_name
        ):
            return
        try:
            await nominate(self._client, pod.metadata, node, unchanged=True)
            self.counts["written"] += 1
            if one.uid in self._seen:  # else it is gone, or bound already
                self._written.add(one.uid)
        except ApiError as error:
            log.warning("a pod was not nominated ahead", pod=one.key, node=node, error=str(error))
            self.counts["refused"] += 1
            if self._seen.get(one.uid) == node:
                self._judge_refused(one.uid)

    def _judge_refused(self, uid: str) -> None:
        self._trust.note(self._clock(), useful=False)
        self._set_aside(uid)


def turned_down(pod: Pod) -> bool:
    """Has kube-scheduler tried this pod, and found no node?"""
    return any(map(unplaced, pod.status.conditions))


def fits_nowhere(pod: Pod) -> bool:
    """The same, unless the extender could not be called, as when it restarts: kube-scheduler then tries the pod once more."""
    return any(unplaced(one) and one.reason != SCHEDULER_ERROR for one in pod.status.conditions)


def unplaced(condition: Condition) -> bool:
    """Does this condition report that? A pod with scheduling gates has one too, though kube-scheduler has not tried it yet."""
    return condition.type == "PodScheduled" and condition.status == "False" and condition.reason != GATED


def _grounds(node: Node) -> tuple[object, ...]:
    """What of a node may matter to a pod."""
    return node.metadata.annotations is None, node.metadata.labels, node.spec


def _suiting(needs: Needs, nodes: Iterable[Node]) -> list[str]:
    return [
        one.key
        for one in nodes
        if suits(needs, one.metadata.labels or {}, one.spec.taints, unschedulable=one.spec.unschedulable)
    ]


def _quoted(names: Sequence[str]) -> Sequence[str]:
    """The same, in the form in which the fleet looks up thousands fastest."""
    if not names:
        return ()
    text = b" " * 7 + msgspec.json.encode(names)
    return Quoted(text, 8, len(text) - 1)
