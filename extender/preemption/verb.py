"""The preempt verb: when kube-scheduler's request is answered, and what is reserved with the answer.

    wait_for_preemptor --> preempt --PreemptCall--> the least eviction --proved again--> reservation of kind preemption, answer

`extender.preemption.preempt_call` chooses; this module checks whether any pod may be evicted now, repeats the search while what it found has
become dearer, and remembers the answers: kube-scheduler evicts and nominates after it has read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from extender.nominate.nominator import Nominator
from extender.preemption.background import BackgroundWork
from extender.preemption.kueue_pods import KueuePods
from extender.preemption.preempt_call import PreemptCall
from extender.preemption.preemption_reservations import PreemptionReservations
from extender.preemption.victim_candidates import VictimCandidates, priority_of
from extender.protocol import PreemptionArgs, PreemptionResult
from extender.state import State
from kube.cache import Cache
from kube.objects import Pod
from vgpu.scheduling.victims.eligibility import may_evict
from vgpu.scheduling.victims.node_search import Eviction

PREEMPTOR_S: Final = 1.0
"""Longest wait for the watch to show a preemptor. kube-scheduler has a watch of its own, which may be ahead; if the answer names no node, it
does not call again for minutes. Guessed: a watch is milliseconds behind, and kube-scheduler schedules nothing meanwhile."""

VICTIMS_S: Final = 0.5
"""Longest wait for the watch to show that victims of an earlier answer end, when kube-scheduler has seen their end already. Guessed."""

RETURN_S: Final = 2.0
"""A preemptor is expected back on its reserved node within this time; later, another reason may keep it out. Guessed."""

SEARCHES: Final = 3
"""Searches for one call while the eviction that was found has become dearer at its end. The last one's is answered at any cost. Guessed."""

log = structlog.get_logger("extender.preemption.verb")


class PreemptVerb:
    """Answers /preempt. `enabled`: may pods be evicted at all? `remember_s`: how long the reservation for a preemptor lives."""

    def __init__(
        self,
        state: State,
        pods: Cache[Pod],
        candidates: VictimCandidates,
        reservations: PreemptionReservations,
        nominator: Nominator,
        *,
        clock: Callable[[], float],
        deadline_s: float,
        remember_s: float,
        background: BackgroundWork,
        kueue_pods: KueuePods | None,
        enabled: bool,
    ) -> None:
        self._state, self._pods, self._candidates, self._reservations = state, pods, candidates, reservations
        self._nominator, self._clock, self._deadline_s, self._remember_s = nominator, clock, deadline_s, remember_s
        self._background, self._kueue_pods, self._enabled = background, kueue_pods, enabled
        self.informed = asyncio.Event()
        """Are disruption budgets and the preemption history known? Before that no pod is evicted."""
        self.missed = False
        """Was a call answered before that? kube-scheduler does not repeat it."""
        self._answered: dict[str, tuple[float, Eviction]] = {}
        """UID of a preemptor -> when the verb last named victims, and the eviction that it named."""

    @property
    def remembered(self) -> int:
        """Answers that are remembered."""
        return len(self._answered)

    def answered_at_s(self, uid: str) -> float:
        """When victims were last named for this pod; minus infinity for never."""
        answered = self._answered.get(uid)
        return answered[0] if answered is not None else float("-inf")

    def answered_on(self, uid: str, node: str) -> Eviction | None:
        """The eviction that was last named for this pod, if it is on this node."""
        answered = self._answered.get(uid)
        return answered[1] if answered is not None and answered[1].node == node else None

    def forget(self, uid: str) -> None:
        """The pod is bound or gone."""
        self._answered.pop(uid, None)

    def expire(self) -> None:
        """Once a second: forget answers that no nomination follows any more."""
        long_ago_s = self._clock() - self._remember_s
        for uid in [uid for uid, (at_s, _) in self._answered.items() if at_s <= long_ago_s]:
            del self._answered[uid]

    def deadline(self) -> float:
        """Until when a call that comes now is to be answered."""
        return self._clock() + self._deadline_s

    async def wait_for_preemptor(self, pod: Pod) -> None:
        """Return when the watch has shown the preemptor and that victims of an earlier answer end, or when its time is up."""
        if self._enabled:
            await self._pods.wait_for(lambda: not self._is_gone(pod) or None, timeout_s=PREEMPTOR_S)
            reservation = self._reservations.get(pod.uid)
            if reservation is not None and not reservation.nominated:
                await self._pods.wait_for(lambda: self._has_victims_leaving(pod.uid) or None, timeout_s=VICTIMS_S)

    async def preempt(self, args: PreemptionArgs, until_s: float) -> PreemptionResult:
        """The answer, once `wait_for_preemptor` has returned. When time is up the best so far, or no node. Raises BadRequest."""
        choice = PreemptCall(self._state, self._candidates, args)
        if self._enabled and not self.informed.is_set():
            self.missed = True
            log.warning(
                "no pod is evicted before disruption budgets and the preemption history are known", pod=choice.pod.key
            )
            return PreemptionResult()
        if self._kueue_pods is not None:
            await self._kueue_pods.read(choice.touching(), self._background, until_s)
        if not choice.request:
            return choice.as_proposed()
        found = await self._least_eviction(choice, until_s)
        if found is not None:
            return choice.answer(found)
        if self._kueue_pods is not None:
            self._kueue_pods.no_eviction_on(args.nodes)
        return PreemptionResult()

    async def _least_eviction(self, choice: PreemptCall, until_s: float) -> Eviction | None:
        """The least eviction, proved; None if no pod may be evicted."""
        for tries_left in reversed(range(SEARCHES)):
            if self._must_evict_none(choice.pod):
                break
            self._state.expire()
            complete = await self._background.run(choice.steps(self._set_aside_for(choice.pod)), until_s=until_s)
            if not complete:
                log.warning("preempt is answered before all nodes were searched", pod=choice.pod.key)
            if choice.best is None or self._must_evict_none(choice.pod):
                break
            last = not (complete and tries_left) or self._clock() >= until_s
            found = self._reserved(choice, choice.best, at_any_cost=last)
            if found is not None or last:
                return found
        return None

    def _must_evict_none(self, pod: Pod) -> bool:
        """Must kube-scheduler evict no pod for this one, whatever the search finds?"""
        if (
            not self._enabled
            or not may_evict(pod.spec.preemption_policy)
            or self._state.allocations.place_of(pod.uid) is not None
        ):
            return True
        return self._is_gone(pod) or self._has_victims_leaving(pod.uid)

    def _set_aside_for(self, pod: Pod) -> dict[str, set[str]]:
        """Node -> UIDs of reservations there that do not block this pod: its own, and nominations that yield to it."""
        found, own = self._nominator.reservations.yielding(priority_of(pod)), self._reservations.get(pod.uid)
        if own is not None:
            found.setdefault(own.node, set()).add(pod.uid)
        return found

    def _reserved(self, choice: PreemptCall, best: Eviction, *, at_any_cost: bool) -> Eviction | None:
        """Prove the choice on what is known by now, and reserve for it. None if it costs more than the search found."""
        pod, node = choice.pod, best.node
        unchanged = choice.is_unchanged(self._set_aside_for(pod))
        with self._reservations.lifted(pod.uid), self._nominator.reservations.aside(priority_of(pod), [node]):
            found = best if unchanged else choice.proved(node)
            if found is None or (found.cost > best.cost and not at_any_cost):
                return None
            # inside the block: nominations that no longer fit beside this reservation are then not made again
            self._answered[pod.uid] = self._clock(), found
            self._reservations.put(pod.uid, pod.key, node, found.assignment)
        return found

    def _is_gone(self, pod: Pod) -> bool:
        """Is the pod unknown? Then no event would ever end its reservation."""
        known = self._pods.get(pod.key)
        return known is None or known.uid != pod.uid

    def _has_victims_leaving(self, uid: str) -> bool:
        """Is capacity being freed for this pod already, or has it just been?"""
        reservation = self._reservations.get(uid)
        if reservation is None:
            return False
        returns = self._clock() < reservation.since_s + RETURN_S and self._reservations.is_complete(uid)
        return reservation.nominated or returns or bool(self._candidates.terminating(reservation.node))
