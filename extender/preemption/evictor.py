"""Evict for a pod that kube-scheduler does not preempt for: the totals of a node are enough for it, and no single GPU is.

kube-scheduler preempts where totals are short. A node that passed its own filters has enough, so it never calls /preempt. If filter finds
no node for such a pod, the evictor waits a moment for other help. Then it plans the least eviction (`planner`), reserves the GPUs
(`preemption_reservations`), nominates the pod to the node, and evicts the victims through the eviction API, which enforces disruption budgets. Before
each eviction it proves the plan again on what is known by then.

A plan that can no longer be proved is given up and made anew; it is not remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from extender.preemption.evictions import Evictions
from extender.preemption.planner import EvictionPlanner, PlannedEviction, UnplacedPod
from extender.preemption.preemption_reservations import PreemptionReservations
from extender.preemption.victim_candidates import VictimCandidates, leaving, priority_of
from extender.state import State
from kube.cache import Cache
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Pod
from kube.patch import nominate
from vgpu.api.errors import BadRequest
from vgpu.api.request import PodRequest
from vgpu.scheduling.reservations import Reservation
from vgpu.scheduling.victims.eligibility import LOWEST, may_evict
from vgpu.scheduling.victims.workloads import BoundWorkload

GRACE_S: Final = 1.0
"""From filter's answer to the evictor's search: kube-scheduler's own preemption comes within milliseconds, and has precedence. Guessed."""

RETRY_S: Final = 5.0
"""Between tries of an eviction that a budget or the API server refused. Guessed."""

VAIN_S: Final = 10.0
"""A pod that no eviction helps is not searched for again for so long: a search of 10,000 nodes takes tenths of a second. Guessed."""

UNPLACED: Final = 256
"""Pods remembered at a time: each keeps a list of its nodes, 80 kB at 10,000. Others are remembered when they are filtered again."""

LONG_AGO: Final = float("-inf")

log = structlog.get_logger("extender.preemption.evictor")


class Evictor:
    """`answered_at_s`: when /preempt last named victims for a UID. `is_active`: is the kube-scheduler beside this extender the one that
    schedules?"""

    def __init__(
        self,
        client: Client,
        state: State,
        pods: Cache[Pod],
        candidates: VictimCandidates,
        reservations: PreemptionReservations,
        planner: EvictionPlanner,
        evictions: Evictions,
        *,
        answered_at_s: Callable[[str], float],
        is_active: Callable[[], bool],
        clock: Callable[[], float],
        grace_s: float = GRACE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._client, self._state, self._pods, self._candidates = client, state, pods, candidates
        self._reservations, self._planner, self._evictions = reservations, planner, evictions
        self._answered_at_s, self._is_active, self._clock = answered_at_s, is_active, clock
        self._grace_s, self._retry_s = grace_s, retry_s
        self._unplaced: dict[str, UnplacedPod] = {}
        self._plans: dict[str, PlannedEviction] = {}
        self._counted_on: dict[str, frozenset[str]] = {}
        """UID of a preemptor -> pods of the node that were ending by themselves when its eviction was planned."""
        self._in_vain: dict[str, float] = {}
        """UID -> when no eviction was found that helps."""
        self._withdrawn: list[Reservation] = []
        """Reservations that lapsed, whose pods are still nominated."""
        self._wake = asyncio.Event()
        self._ending: dict[str, list[BoundWorkload]] = {}
        """UID of a preemptor -> Workloads that were deactivated for it: until their pods are deleted, no other state shows that they will be."""

    def found_no_node(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Filter has found no node for a pod."""
        vain = self._clock() - self._in_vain.get(pod.uid, LONG_AGO) < VAIN_S
        may_remember = pod.uid in self._unplaced or len(self._unplaced) < UNPLACED
        if may_evict(pod.spec.preemption_policy) and may_remember and not vain:
            self._unplaced[pod.uid] = UnplacedPod(pod.key, pod.uid, self._state.fleet.known(nodes), self._clock())
            self._wake.set()

    def forget(self, uid: str) -> None:
        """The pod is bound or gone."""
        self._unplaced.pop(uid, None)
        self._plans.pop(uid, None)
        self._planner.forget(uid)
        self._counted_on.pop(uid, None)
        self._ending.pop(uid, None)
        self._in_vain.pop(uid, None)

    def lapsed(self, reservation: Reservation) -> None:
        """A preemption reservation has lapsed: the extender withdraws its nomination of the pod."""
        uid = reservation.uid
        if not self._counted_on.pop(uid, frozenset()).isdisjoint(self._candidates.terminating(reservation.node)):
            self._planner.do_not_wait(uid)
        deactivated = self._ending.pop(uid, ())
        if self._planner.workloads is not None:
            self._planner.workloads.lapsed(deactivated)
        if reservation.nominated:
            self._withdrawn.append(reservation)
            self._wake.set()

    def try_again(self) -> None:
        """More pods may be evicted than before: an eviction that helps may be found now."""
        self._in_vain.clear()

    def expire(self) -> None:
        """Once a second: forget what matters no more."""
        long_ago_s = self._clock() - VAIN_S
        for uid in [uid for uid, at_s in self._in_vain.items() if at_s <= long_ago_s]:
            del self._in_vain[uid]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s if self._plans else None):
                    await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(self._grace_s)
            withdrawn, self._withdrawn = self._withdrawn, []
            for reservation in withdrawn:
                await self._guarded(reservation.key, partial(self._withdraw, reservation))
            for uid in list(self._plans):
                await self._guarded(uid, self._carry_on)
            some, self._unplaced = self._unplaced, {}
            for one in sorted(some.values(), key=lambda one: -self._priority(one.key)):
                await self._guarded(one.uid, partial(self._help, one))

    async def _guarded(self, uid: str, step: Callable[[str], Awaitable[None]]) -> None:
        try:
            await step(uid)
        except ApiError as error:
            log.warning("the API server refused a step of an eviction", uid=uid, error=str(error))

    async def _withdraw(self, reservation: Reservation, key: str) -> None:
        pod = self._pods.get(key)
        if pod is not None and not pod.spec.node_name and pod.status.nominated_node_name == reservation.node:
            await nominate(self._client, pod.metadata, None)

    def _priority(self, key: str) -> int:
        pod = self._pods.get(key)
        return priority_of(pod) if pod is not None else LOWEST

    def _waiting(self, key: str, uid: str) -> tuple[Pod, PodRequest] | None:
        """The pod and its request, if it is still unplaced."""
        pod = self._state.unplaced(self._pods.get(key), uid)
        if pod is None or leaving(pod):
            return None
        try:
            return pod, self._state.request_to_set_aside(pod)
        except BadRequest:
            return None

    async def _help(self, one: UnplacedPod, _: str) -> None:
        found = self._waiting(one.key, one.uid)
        if found is None or one.uid in self._plans or not self._is_ours_to_help(one, found[1]):
            return
        pod, request = found
        reservation = self._reservations.get(one.uid)
        if reservation is not None and (one.uid in self._ending or self._candidates.terminating(reservation.node)):
            return
        found_plan = await self._planner.plan(one, pod, request)
        if self._waiting(one.key, one.uid) is None or not self._is_ours_to_help(one, request):
            return
        if found_plan is None:
            self._in_vain[one.uid] = self._clock()
            if self._planner.kueue_pods is not None:
                self._planner.kueue_pods.no_eviction_on(one.nodes)
            return
        plan, workloads = found_plan
        self._reservations.put(one.uid, pod.key, plan.node, plan.assignment, nominated=bool(plan.victims))
        if not plan.victims:
            self._planner.do_not_wait(one.uid)
            return
        self._counted_on[one.uid] = self._planner.terminating(one.uid, plan.node)
        try:
            await nominate(self._client, pod.metadata, plan.node)
        except ApiError:
            self._reservations.end(one.uid)
            raise
        self._plans[one.uid] = PlannedEviction(one, plan, pod.status.nominated_node_name, workloads)
        await self._carry_on(one.uid)

    def _is_ours_to_help(self, one: UnplacedPod, request: PodRequest) -> bool:
        """Is kube-scheduler still without another way for this pod, is it still the active one, and has nothing come free meanwhile?"""
        return (
            self._is_active()
            and self._answered_at_s(one.uid) < one.since_s
            and not self._planner.fits_now(one, request)
        )

    async def _carry_on(self, uid: str) -> None:
        """Evict what is left of a plan, one by one, as long as the plan still helps."""
        begun, staying = self._plans.get(uid), set[str]()
        for victim in begun.singles if begun is not None else ():
            found = self._still_waiting(uid)
            if begun is None or found is None:
                self._plans.pop(uid, None)
                return
            pod, request = found
            if not self._planner.needs(uid, request, begun.plan, {victim}, staying):
                staying.add(victim)
                continue
            if self._candidates.is_doubted(self._candidates.pod(victim)):
                return  # retried while the reservation lives
            if (
                self._fits_elsewhere(begun, request)
                or not self._planner.still_helps(uid, request, begun.plan, staying)
                or not self._candidates.alone(self._candidates.pod(victim))
            ):
                await self._give_up(uid, pod, begun)
                return
            if not await self._evictions.evict(pod, begun.plan.node, victim):
                return  # retried: the plan stays
            begun.evicted = True
        for planned in begun.workloads if begun is not None else ():
            if begun is None or not (
                planned.key in begun.deactivated or await self._end_workload(uid, begun, planned, staying)
            ):
                return
        self._plans.pop(uid, None)

    async def _end_workload(self, uid: str, begun: PlannedEviction, planned: BoundWorkload, staying: set[str]) -> bool:
        """Deactivate a Workload of a plan. Does the plan go on? Else it is given up, or retried later."""
        complete, workload = await self._planner.known_workload(planned.key)
        found = self._still_waiting(uid)
        if found is None or self._plans.get(uid) is not begun:
            self._plans.pop(uid, None)
            return False
        pod, request = found
        here = {one for one in begun.plan.victims if one in planned.uids}
        if not self._planner.needs(uid, request, begun.plan, here, staying):
            staying |= here
            return True
        if not complete or (workload is None and self._in_doubt(here)):
            return False  # retried while the reservation lives
        if (
            workload is None
            or not workload.may_go(priority_of(pod), self._candidates.headroom())
            or self._fits_elsewhere(begun, request)
            or not self._planner.still_helps(uid, request, begun.plan, staying | (here - workload.uids))
        ):
            await self._give_up(uid, pod, begun)
            return False
        try:
            if not await self._evictions.deactivate(pod, begun.plan.node, workload):
                return False
        except ApiError:  # refused for good
            if self._planner.workloads is not None:
                self._planner.workloads.pass_over(workload)
            await self._give_up(uid, pod, begun)
            raise
        begun.evicted = True
        begun.deactivated.add(planned.key)
        if self._plans.get(uid) is begun:  # else the preemptor is gone by now
            self._ending.setdefault(uid, []).append(workload)
        return True

    def _in_doubt(self, uids: Set[str]) -> bool:
        return any(self._candidates.is_doubted(self._candidates.pod(uid)) for uid in uids)

    async def _give_up(self, uid: str, pod: Pod, begun: PlannedEviction) -> None:
        log.info("an eviction is given up: it would not help any more", pod=pod.key, node=begun.plan.node)
        self._plans.pop(uid, None)
        self._reservations.end(uid)
        await nominate(self._client, pod.metadata, None)

    def _still_waiting(self, uid: str) -> tuple[Pod, PodRequest] | None:
        """The preemptor of a plan, if it still waits for it: its reservation lives, and it was not nominated elsewhere."""
        begun, reservation = self._plans.get(uid), self._reservations.get(uid)
        found = self._waiting(reservation.key, uid) if reservation is not None else None
        if begun is None or found is None:
            return None
        node = begun.plan.node
        if found[0].status.nominated_node_name not in ("", begun.before, node):
            log.info("an eviction is given up: the pod was nominated to another node", pod=found[0].key, node=node)
            self._reservations.end(uid)
            return None
        return found

    def _fits_elsewhere(self, begun: PlannedEviction, request: PodRequest) -> bool:
        """Does the pod fit another node by now, before the first victim was evicted?"""
        pods = map(self._candidates.pod, begun.plan.victims)
        all_run = not begun.evicted and all(pod is not None and not leaving(pod) for pod in pods)
        return all_run and self._planner.fits_now(begun.wanting, request, but=begun.plan.node)
