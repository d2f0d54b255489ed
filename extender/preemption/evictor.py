"""Evict for a pod that the scheduler sees no way to help: the node's total is enough for it, and no single GPU is.

The scheduler preempts where totals are short. On a node that passed its own filters they are not, so it never asks. Here such a pod
is remembered when filter turns it away, and a moment later, if it was not helped otherwise: the least set of victims is chosen, the
place is kept (`reservations`), the pod is nominated to the node, and the victims are evicted through the eviction API, which keeps to
disruption budgets. Before each eviction the plan is proved again on what is then known.

Gives up and starts anew, rather than remembers, whatever it cannot prove any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Final

import structlog

from extender.background import Slices
from extender.preemption.candidates import Candidates, leaving, priority_of
from extender.preemption.evictions import Evictions
from extender.preemption.kueue_pods import Queues
from extender.preemption.kueue_victims import Wholes, WholeSearch
from extender.preemption.pending import Begun, Looking, Wanting
from extender.preemption.reservations import PreemptionReservations
from extender.state import State
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Pod
from kube.patch import nominate
from kube.pod_requests import requests_of
from vgpu.api.errors import BadRequest
from vgpu.api.request import PodRequest
from vgpu.scheduling.placement import Placement
from vgpu.scheduling.reservations import Reservation
from vgpu.scheduling.victims.allocated_pod import LOWEST
from vgpu.scheduling.victims.bounds import Rules, Terms
from vgpu.scheduling.victims.choice import Search, least_eviction
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.workloads import Whole

GRACE_S: Final = 1.0
"""From filter's no to our own look: the scheduler's preemption comes within milliseconds, and goes first. Guessed."""

RETRY_S: Final = 5.0
"""Between tries of an eviction that a budget or the API server refused. Guessed."""

VAIN_S: Final = 10.0
"""A pod that no eviction can help is not looked at again for so long: a look at 10,000 nodes costs tenths of a second. Guessed."""

WANTING: Final = 256
"""Pods remembered at a time: each keeps a list of its nodes, 80 kB at 10,000. Others are when they are filtered again."""

LONG_AGO: Final = float("-inf")

log = structlog.get_logger("extender.preemption.evictor")


class Evictor:
    """`pod_of` finds a pod by `namespace/name`; `requested` says when the scheduler was last told victims for a UID; `active` says whether
    the scheduler beside us is the one that schedules."""

    def __init__(
        self,
        client: Client,
        state: State,
        candidates: Candidates,
        reservations: PreemptionReservations,
        evictions: Evictions,
        *,
        pod_of: Callable[[str], Pod | None],
        requested: Callable[[str], float],
        active: Callable[[], bool],
        clock: Callable[[], float],
        deadline_s: float,
        slices: Slices,
        queues: Queues | None = None,
        wholes: Wholes | None = None,
        grace_s: float = GRACE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._client, self._state, self._candidates, self._reservations = client, state, candidates, reservations
        self._evictions, self._wholes, self._pod_of, self._requested = evictions, wholes, pod_of, requested
        self._active = active
        self._clock, self._grace_s, self._retry_s = clock, grace_s, retry_s
        self._deadline_s, self._slices, self._queues = deadline_s, slices, queues
        self._wanting: dict[str, Wanting] = {}
        self._plans: dict[str, Begun] = {}
        self._waited: set[str] = set()
        """UIDs for which room was kept in vain while others left by themselves."""
        self._counted_on: dict[str, frozenset[str]] = {}
        """UIDs of pods that others are evicted for -> holders of the node that left by themselves when that was planned."""
        self._in_vain: dict[str, float] = {}
        """UID -> when no eviction was found that helps."""
        self._withdrawn: list[Reservation] = []
        """Holds that lapsed, whose pods are still nominated."""
        self._wake = asyncio.Event()
        self._ending: dict[str, list[Whole]] = {}
        """UIDs of pods -> Workloads that were deactivated for each: until their pods leave, nothing shows that they will."""

    def no_room(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Filter has turned a pod away."""
        vain = self._clock() - self._in_vain.get(pod.uid, LONG_AGO) < VAIN_S
        room = pod.uid in self._wanting or len(self._wanting) < WANTING
        if pod.spec.preemption_policy != "Never" and room and not vain:
            self._wanting[pod.uid] = Wanting(pod.key, pod.uid, self._state.fleet.known(nodes), self._clock())
            self._wake.set()

    def forget(self, uid: str) -> None:
        """The pod is bound or gone."""
        self._wanting.pop(uid, None)
        self._plans.pop(uid, None)
        self._waited.discard(uid)
        self._counted_on.pop(uid, None)
        self._ending.pop(uid, None)
        self._in_vain.pop(uid, None)

    def lapsed(self, hold: Reservation) -> None:
        """Room was kept for long enough: the pod is no longer nominated by us."""
        if not self._counted_on.pop(hold.uid, frozenset()).isdisjoint(self._candidates.terminating(hold.node)):
            self._waited.add(hold.uid)
        deactivated = self._ending.pop(hold.uid, ())
        if self._wholes is not None:
            self._wholes.lapsed(deactivated)
        if hold.nominated:
            self._withdrawn.append(hold)
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
            for hold in withdrawn:
                await self._guarded(hold.key, partial(self._withdraw, hold))
            for uid in list(self._plans):
                await self._guarded(uid, self._carry_on)
            some, self._wanting = self._wanting, {}
            for one in sorted(some.values(), key=lambda one: -self._priority(one.key)):
                await self._guarded(one.uid, partial(self._help, one))

    async def _guarded(self, uid: str, step: Callable[[str], Awaitable[None]]) -> None:
        try:
            await step(uid)
        except ApiError as error:
            log.warning("evicting for a pod met the API server's refusal", uid=uid, error=str(error))

    async def _withdraw(self, hold: Reservation, key: str) -> None:
        pod = self._pod_of(key)
        if pod is not None and not pod.spec.node_name and pod.status.nominated_node_name == hold.node:
            await nominate(self._client, pod.metadata, None)

    def _priority(self, key: str) -> int:
        pod = self._pod_of(key)
        return priority_of(pod) if pod is not None else LOWEST

    def _waiting(self, key: str, uid: str) -> tuple[Pod, PodRequest] | None:
        """The pod and its ask, if it still waits for a place."""
        pod = self._state.unplaced(self._pod_of(key), uid)
        if pod is None or leaving(pod):
            return None
        try:
            return pod, self._state.request_of(pod)
        except BadRequest:
            return None

    async def _help(self, one: Wanting, _: str) -> None:
        found = self._waiting(one.key, one.uid)
        if found is None or one.uid in self._plans or not self._is_ours_to_help(one, found[1]):
            return
        pod, request = found
        hold = self._reservations.get(one.uid)
        if hold is not None and (one.uid in self._ending or self._candidates.terminating(hold.node)):
            return
        found_plan = await self._plan(one, pod, request)
        if self._waiting(one.key, one.uid) is None or not self._is_ours_to_help(one, request):
            return
        if found_plan is None:
            self._in_vain[one.uid] = self._clock()
            if self._queues is not None:
                self._queues.nobody_goes_on(one.nodes)
            return
        plan, wholes = found_plan
        self._reservations.put(one.uid, pod.key, plan.node, plan.assignment, nominated=bool(plan.victims))
        if not plan.victims:
            self._waited.add(one.uid)
            return
        self._counted_on[one.uid] = self._leaving(one.uid, plan.node)
        try:
            await nominate(self._client, pod.metadata, plan.node)
        except ApiError:
            self._reservations.drop(one.uid)
            raise
        self._plans[one.uid] = Begun(one, plan, pod.status.nominated_node_name, wholes)
        await self._carry_on(one.uid)

    def _is_ours_to_help(self, one: Wanting, request: PodRequest) -> bool:
        """The scheduler beside us has not found another way, nor another scheduler taken over, nor room come free meanwhile."""
        return self._active() and self._requested(one.uid) < one.since_s and not self._fits(one, request)

    def _fits(self, one: Wanting, request: PodRequest, but: str = "") -> bool:
        """Is there room for it now, on another node than `but`? The scheduler heard of it as we did, and will be back."""
        nodes = [name for name in one.nodes if name != but]
        with self._reservations.lifted(one.uid):
            found = self._state.place(request, nodes)
            if isinstance(found, Placement) and self._lacking(one.uid, found.node, request):
                found = self._state.place(
                    request, [name for name in nodes if not self._lacking(one.uid, name, request)]
                )
            return isinstance(found, Placement)

    async def _plan(self, one: Wanting, pod: Pod, request: PodRequest) -> tuple[Eviction, Sequence[Whole]] | None:
        """The least eviction over all nodes, or over those that there was time for; none needed where those who leave by themselves make room."""
        looking, until_s = Looking(one, pod, request), self._clock() + self._deadline_s
        if self._queues is not None:
            await self._queues.read(self._candidates.touching(one.nodes), self._slices, until_s)
        await self._slices.do(self._steps(looking, until_s), until_s=until_s)
        return looking.best

    def _steps(self, looking: Looking, until_s: float) -> Iterator[None]:
        one, request = looking.wanting, looking.request
        leave = dict[str, frozenset[str]]()  # who leaves by itself: gone, unless room was kept in vain for that

        def terms(node: str, gone: frozenset[str] = frozenset()) -> Terms:
            return self._terms(one.uid, request, node, gone | leave.get(node, frozenset()))

        if one.uid not in self._waited:
            for node in one.nodes:
                if gone := self._leaving(one.uid, node):
                    leave[node] = gone
                    if found := self._after(one.uid, request, node, gone):
                        looking.found = found
                        return
                yield
        rules = Rules(priority_of(looking.pod), self._candidates.headroom(), violate=False, may_be_nobody=False)
        only, own = self._state.allocations.only(request, self._state.names), self._state.allocations.get(one.uid)
        apart = leave.keys() | ({own.node} if own is not None else set())
        looking.search = Search(request, one.nodes, self._candidates.view, rules, only, terms=terms, apart=apart)
        singles = looking.search.steps()
        if self._wholes is not None:
            half_s = (self._clock() + until_s) / 2
            yield from takewhile(lambda _: self._clock() < half_s, singles)
            looking.wholes = WholeSearch(self._wholes, self._candidates, looking.pod, request, one.nodes, terms, only)
            yield from looking.wholes.steps(looking.single.cost if looking.single is not None else None)
        yield from singles

    def _terms(self, uid: str, request: PodRequest, node: str, gone: frozenset[str]) -> Terms:
        """When these are gone: the pod's own room is not in its way, and what the node lacks for it beside GPUs must be freed too."""
        lacking = self._lacking(uid, node, request)
        freed = self._candidates.requests(gone) if lacking else {}
        frees = {name: amount - freed.get(name, 0) for name, amount in lacking.items()}
        return Terms(frees={name: amount for name, amount in frees.items() if amount > 0}, aside=gone | {uid})

    def _leaving(self, uid: str, node: str) -> frozenset[str]:
        """UIDs of those who leave the node by themselves, but for those on GPUs that pods are to have for which others were evicted before."""
        gone, promised = self._candidates.terminating(node), self._reservations.promised(uid, node)
        held = self._state.allocations.on(node) if gone and promised else {}
        return gone - {one for one in gone if not promised.isdisjoint(piece.uuid for piece in held.get(one, ()))}

    def _lacking(self, uid: str, node: str, request: PodRequest) -> dict[str, int]:
        """What the node has too little beside GPUs, also for those that others were evicted for before."""
        before = [pod for one in self._reservations.before(uid, node) if (pod := self._pod_of(one.key)) is not None]
        return self._state.lacking(node, request, [requests_of(pod) for pod in before])

    def _after(self, uid: str, request: PodRequest, node: str, gone: frozenset[str]) -> Eviction | None:
        """Where the ask fits when these are gone, and nobody else goes."""
        rules = Rules(LOWEST, terms={node: self._terms(uid, request, node, gone)})
        only = self._state.allocations.only(request, self._state.names)
        return least_eviction(request, [node], self._candidates.view, rules, only)

    async def _carry_on(self, uid: str) -> None:
        """Evict what is left of a plan, one by one, as long as it leads anywhere."""
        begun, staying = self._plans.get(uid), set[str]()
        for victim in begun.singles if begun is not None else ():
            found = self._still_wanted(uid)
            if begun is None or found is None:
                self._plans.pop(uid, None)
                return
            pod, request = found
            if not self._needed(uid, request, begun.plan, {victim}, staying):
                staying.add(victim)
                continue
            if self._candidates.is_doubted(self._candidates.pod(victim)):
                return  # later, if the room is still kept by then
            if (
                self._goes_elsewhere(begun, request)
                or not self._leads_anywhere(uid, request, begun.plan, staying)
                or not self._candidates.alone(self._candidates.pod(victim))
            ):
                await self._give_up(uid, pod, begun)
                return
            if not await self._evictions.evict(pod, begun.plan.node, victim):
                return  # later: the plan stays
            begun.evicted = True
        for planned in begun.wholes if begun is not None else ():
            if begun is None or not (
                planned.key in begun.deactivated or await self._end_whole(uid, begun, planned, staying)
            ):
                return
        self._plans.pop(uid, None)

    async def _end_whole(self, uid: str, begun: Begun, planned: Whole, staying: set[str]) -> bool:
        """Deactivate a Workload of a plan. Does the plan go on? Else it is given up, or for later."""
        known: dict[str, Whole] = {}

        def renew() -> Iterator[None]:
            if self._wholes is not None:
                known.update((yield from self._wholes.known({planned.key})))

        whole_known = await self._slices.do(renew(), until_s=self._clock() + self._deadline_s)
        found = self._still_wanted(uid)
        if found is None or self._plans.get(uid) is not begun:
            self._plans.pop(uid, None)
            return False
        pod, request = found
        here = {one for one in begun.plan.victims if one in planned.uids}
        if not self._needed(uid, request, begun.plan, here, staying):
            staying |= here
            return True
        whole = known.get(planned.key)
        if not whole_known or (whole is None and self._in_doubt(here)):
            return False  # later, if the room is still kept by then
        if (
            whole is None
            or not whole.may_go(priority_of(pod), self._candidates.headroom())
            or self._goes_elsewhere(begun, request)
            or not self._leads_anywhere(uid, request, begun.plan, staying | (here - whole.uids))
        ):
            await self._give_up(uid, pod, begun)
            return False
        try:
            if not await self._evictions.deactivate(pod, begun.plan.node, whole):
                return False
        except ApiError:  # for good
            if self._wholes is not None:
                self._wholes.pass_over(whole)
            await self._give_up(uid, pod, begun)
            raise
        begun.evicted = True
        begun.deactivated.add(planned.key)
        if self._plans.get(uid) is begun:  # else the pod is gone by now
            self._ending.setdefault(uid, []).append(whole)
        return True

    def _in_doubt(self, uids: Set[str]) -> bool:
        return any(self._candidates.is_doubted(self._candidates.pod(uid)) for uid in uids)

    async def _give_up(self, uid: str, pod: Pod, begun: Begun) -> None:
        log.info("an eviction is given up: it would not help any more", pod=pod.key, node=begun.plan.node)
        self._plans.pop(uid, None)
        self._reservations.drop(uid)
        await nominate(self._client, pod.metadata, None)

    def _still_wanted(self, uid: str) -> tuple[Pod, PodRequest] | None:
        """The pod that others are evicted for, if it still waits for that: its room is kept, and nobody nominated it elsewhere."""
        begun, hold = self._plans.get(uid), self._reservations.get(uid)
        found = self._waiting(hold.key, uid) if hold is not None else None
        if begun is None or found is None:
            return None
        node = begun.plan.node
        if found[0].status.nominated_node_name not in ("", begun.before, node):
            log.info("an eviction is given up: somebody nominated the pod elsewhere", pod=found[0].key, node=node)
            self._reservations.drop(uid)
            return None
        return found

    def _goes_elsewhere(self, begun: Begun, request: PodRequest) -> bool:
        """Did room come free on another node before the first was evicted?"""
        pods = map(self._candidates.pod, begun.plan.victims)
        nobody_went = not begun.evicted and all(pod is not None and not leaving(pod) for pod in pods)
        return nobody_went and self._fits(begun.wanting, request, but=begun.plan.node)

    def _leads_anywhere(self, uid: str, request: PodRequest, plan: Eviction, staying: Set[str]) -> bool:
        gone = (frozenset(plan.victims) - staying) | self._leaving(uid, plan.node)
        return self._after(uid, request, plan.node, gone) is not None

    def _needed(self, uid: str, request: PodRequest, plan: Eviction, victims: Set[str], staying: Set[str]) -> bool:
        """Is one of these victims still there to stay, and would the pod not fit with them? `staying`: those of whom that was answered no."""
        pods = [self._candidates.pod(victim) for victim in victims]
        if all(pod is None or leaving(pod) for pod in pods):
            return False
        gone = (frozenset(plan.victims) - staying - victims) | self._leaving(uid, plan.node)
        return self._after(uid, request, plan.node, gone) is None
