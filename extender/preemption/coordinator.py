"""All that has to do with evicting one pod for another, in one hand: the verb, our own way, the room kept, and what each must see.

    filter says no --> the scheduler asks the verb (`preempting`), evicts, nominates --watch--> room is kept (`reservations`)
                   --> the scheduler does not ask --> `evicting` keeps room, nominates, evicts

`pod_changed` stands between the watch and the state, so that room is taken in the moment it comes free.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse
from typing import Final

import structlog

from extender.background import Slices
from extender.filter import filter_nodes
from extender.fit_report import Reporter
from extender.nominate.nominator import Nominator, fits_nowhere, turned_down
from extender.preemption.candidates import Candidates, leaving, priority_of
from extender.preemption.disruption_budgets import Budgets, small_budget
from extender.preemption.evictions import Evictions
from extender.preemption.evictor import Evictor
from extender.preemption.history import PreemptionHistory
from extender.preemption.history_store import HistoryStore
from extender.preemption.kueue_pods import Queues
from extender.preemption.kueue_victims import Wholes
from extender.preemption.reservations import PreemptionReservations
from extender.preemption.verb import Choosing, PreemptionArgs, PreemptionResult
from extender.protocol import FilterArgs, FilterResult
from extender.settings import Settings
from extender.state import State
from kube.cache import Cache, Statistics
from kube.client import Client
from kube.events import Recorder
from kube.objects import Budget, Pod
from kube.paths import BUDGETS
from vgpu.api.errors import BadRequest
from vgpu.scheduling.placement import NO_ROOM
from vgpu.scheduling.victims.allocated_pod import LOWEST
from vgpu.scheduling.victims.bounds import Rules, Terms
from vgpu.scheduling.victims.choice import least_eviction
from vgpu.scheduling.victims.node_search import Eviction

COMPONENT = "tangram-extender"
BY_THE_SCHEDULER = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget that kube-scheduler puts on its victims."""

READ_S: Final = 5.0
"""For so long nobody is evicted before it is known who was preempted lately. Guessed: it is one small list."""

MEET_S: Final = 1.0
"""The scheduler has a watch of its own, and may hear of a pod first. Answered too early that nothing can be done, it would not ask again for
minutes. So a preemptor that is not known yet is waited for. Guessed: a watch is milliseconds behind, and the scheduler places nobody meanwhile."""

ROOM_S: Final = 0.5
"""The same for the room made for a preemptor, when the scheduler thinks that its victims are gone. Guessed."""

HEAR_S: Final = 0.001
"""The same for what may have come free elsewhere. Guessed: enough to read what has arrived, and little beside the scheduler's own cycle."""

BACK_S: Final = 2.0
"""Within so long of an eviction the preemptor is expected where its room is; later another reason may keep it out. Guessed."""

TRIES: Final = 3
"""Searches for one call, as long as what was found has become dearer when it is done: then it is taken all the same. Guessed."""

log = structlog.get_logger("extender.preemption.coordinator")


class Preemption:
    """`pods` is told of once the cache of pods is made: that cache calls us."""

    def __init__(
        self,
        client: Client,
        state: State,
        settings: Settings,
        ahead: Nominator,
        clock: Callable[[], float] = time.monotonic,
        *,
        read_s: float = READ_S,
    ) -> None:
        self.enabled, self.ahead = settings.preemption, ahead
        self.disruptions = Budgets()
        self.budgets = Cache(client, BUDGETS, Budget, on_change=self.disruptions.changed, shrink=small_budget)
        self.pods: Cache[Pod] | None = None
        self.informed = asyncio.Event()
        """Is known whom to spare? Before that nobody is evicted."""
        self.missed = False
        """Was a call answered before that? kube-scheduler does not ask again."""
        self._state, self._clock, self._hold_s = state, clock, settings.hold_s
        self._deadline_s = settings.preemption_deadline_s
        self.slices, self.reservations = Slices(clock), PreemptionReservations(state)
        self._history = PreemptionHistory(
            time.time, times=settings.preempted_times, period_s=settings.preempted_period_s
        )
        self._history_store = HistoryStore(client, self._history, settings.preempted_config_map)
        resources = filter(None, settings.kueue_controllers.split(","))
        self.queues = Queues(client, resources, clock) if settings.preemption and settings.kueue else None
        self._candidates = Candidates(state, self._history, self._pod_of, self._all_pods, self.disruptions, self.queues)
        self._recorder = Recorder(client, COMPONENT, socket.gethostname())
        self._reporter = Reporter(
            state,
            self._recorder,
            pod_of=self._pod_of,
            helped=lambda uid: self.reservations.get(uid) is not None,
            clock=clock,
        )
        self._known_before, self._read_s = False, read_s
        self._answered: dict[str, tuple[float, dict[str, Eviction]]] = {}
        """UID of a preemptor -> when the verb last named victims, and the plan for each node."""
        self._evictions = Evictions(client, self._candidates, self._history, self._recorder, self.queues)
        self._evictor = Evictor(
            client, state, self._candidates, self.reservations, self._evictions,
            pod_of=self._pod_of, requested=self._requested, active=ahead.is_requested, clock=clock,
            deadline_s=settings.preemption_deadline_s, slices=self.slices, queues=self.queues,
            wholes=Wholes(self._candidates, self.queues, self._all_pods, clock) if settings.kueue_evict == "whole" else None,
        )  # fmt: skip

    def statistics(self) -> dict[str, Statistics]:
        """What its caches have seen, by name."""
        if not self.enabled:
            return {}
        remembered = {"preempted": self._history_store.statistics()} if self._history_store.enabled else {}
        queues = self.queues.statistics() if self.queues else {}
        return {"budgets": self.budgets.statistics(), **remembered, **queues}

    @property
    def remembered(self) -> int:
        """Answers of the verb that are remembered."""
        return len(self._answered)

    @property
    def evicted(self) -> int:
        """Pods that were evicted on our own way."""
        return self._evictions.evicted

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._recorder.run())
            if self.enabled:
                for part in (self.budgets.run(), self._evict(), self._history_store.run()):
                    group.create_task(part)
            if self.queues is not None:
                group.create_task(self.queues.run())

    async def _evict(self) -> None:
        await self.budgets.has_synced.wait()
        try:
            async with asyncio.timeout(self._read_s):
                await self._history_store.read()
        except TimeoutError:
            log.warning("who was preempted lately is not known: pods are evicted all the same", waited_s=self._read_s)
        self.informed.set()
        await self._evictor.run()

    # --- what the watch tells ---

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod came, changed or went."""
        self._candidates.pod_changed(old, new)
        self._state.pod_changed(old, new)
        self.ahead.pod_changed(old, new)
        if new is None or new.finished:
            for pod in (old, new):
                if pod is not None:
                    self._forget(pod.uid)
                    self.reservations.refresh(pod.spec.node_name)
        elif new.spec.node_name:
            self._forget(new.uid)
            if leaving(new) and not (old is not None and old.uid == new.uid and leaving(old)) and _preempted(new):
                self._history.preempted(new)
        elif self.enabled:
            self._nominated(old, new)

    def _forget(self, uid: str) -> None:
        self.reservations.drop(uid)
        self._answered.pop(uid, None)
        self._evictor.forget(uid)

    def _nominated(self, old: Pod | None, pod: Pod) -> None:
        """Keep room for a pod that the scheduler has evicted others for."""
        node, hold = pod.status.nominated_node_name, self.reservations.get(pod.uid)
        if leaving(pod):
            self._forget(pod.uid)
        elif not node:
            if hold is not None and not hold.nominated and old is not None and old.status.nominated_node_name:
                self.reservations.drop(pod.uid)
        elif not self.ahead.planned(pod.uid) and (hold is None or (hold.node != node and not hold.nominated)):
            _, plans = self._answered.get(pod.uid, (0.0, {}))
            plan = plans.get(node)
            if plan is None and turned_down(pod):  # others were nominated ahead by another replica
                plan = self._plan_of_before(pod, node)
            if plan is not None:
                self.reservations.put(pod.uid, pod.key, node, plan.assignment)

    def _read_back(self) -> None:
        """Once, when all is known and before anything is decided: what an extender that ran before this one kept for whom.

        Who was nominated and never turned down by the scheduler was nominated ahead of its turn. Others have had pods evicted for them: they
        come first, whatever order pods are listed in.
        """
        if self._known_before or self.pods is None or not self.pods.has_synced.is_set():
            return
        self._known_before = True
        nominated = [
            pod
            for pod in self._all_pods()
            if pod.status.nominated_node_name
            and not (pod.spec.node_name or leaving(pod) or self.reservations.get(pod.uid) is not None)
        ]
        for pod in filter(turned_down, nominated if self.enabled else ()):
            node = pod.status.nominated_node_name
            if (plan := self._plan_of_before(pod, node, restarted=True)) is not None:
                self.reservations.put(pod.uid, pod.key, node, plan.assignment)
        for pod in filterfalse(turned_down, nominated):
            self.ahead.read_back(pod)

    def _plan_of_before(self, pod: Pod, node: str, *, restarted: bool = False) -> Eviction | None:
        """What an extender that ran before this one must have had in mind: the pod fits once those who leave are gone."""
        leave = self._candidates.terminating(node)
        if not leave and not restarted:
            return None
        try:
            request = self._state.request_of(pod)
        except BadRequest:
            return None
        if not request or self._state.allocations.place_of(pod.uid) is not None:
            return None
        return least_eviction(request, [node], self._candidates.view, Rules(LOWEST, terms={node: Terms(aside=leave)}))

    # --- what the scheduler asks ---

    def filter(self, args: FilterArgs) -> FilterResult:
        """The filter verb, with the room that is kept for the pod open to it alone."""
        uid = args.pod.uid
        self._read_back()
        self.ahead.requested(args.pod)
        with self.reservations.lifted(uid):
            result = filter_nodes(self._state, args)
            if _nowhere(result):
                with self.ahead.plans.aside(priority_of(args.pod), args.node_names or ()) as others:
                    result = filter_nodes(self._state, args, may_list=False) if others else result
        if _nowhere(result) and args.node_names is not None:
            if self.enabled:
                self._evictor.no_room(args.pod, args.node_names)
            if nodes := result.failed.get(NO_ROOM):
                self._reporter.no_room(args.pod, nodes)
        return result

    async def hears_more(self, args: FilterArgs, result: FilterResult) -> bool:
        """Before `filter` turns a pod away: is there news that the scheduler may have heard and we had not?"""
        pod, names = args.pod, args.node_names
        if not _nowhere(result) or names is None or self.pods is None:
            return False
        hold = self.reservations.get(pod.uid)
        if hold is not None and not hold.nominated and hold.node in names:
            return (
                await self.pods.wait_for(lambda: self.reservations.is_whole(pod.uid) or None, timeout_s=ROOM_S)
                is not None
            )
        return await self.pods.changes_within(HEAR_S)

    @contextmanager
    def making_way(self, uid: str) -> Iterator[None]:
        """Bind chooses a place for this pod: what is kept for it is not in its way meanwhile. Do not await inside."""
        self.ahead.plans.drop(uid)
        with self.reservations.lifted(uid):
            yield

    async def meet(self, pod: Pod) -> None:
        """Return when the watch has told of a preemptor and of the first of its victims, if there are any yet, or has had its time."""
        if self.enabled and self.pods is not None:
            await self.pods.wait_for(lambda: not self._is_gone(pod) or None, timeout_s=MEET_S)
            hold = self.reservations.get(pod.uid)
            if hold is not None and not hold.nominated:
                await self.pods.wait_for(lambda: self._is_being_helped(pod.uid) or None, timeout_s=ROOM_S)

    def deadline(self) -> float:
        """Until when a call that comes now is to be answered."""
        return self._clock() + self._deadline_s

    async def preempt(self, args: PreemptionArgs, until_s: float) -> PreemptionResult:
        """The preempt verb, once `meet` has returned. When time is up the best answer so far, or nobody. Raises BadAsk."""
        choosing = Choosing(self._state, self._candidates, args)
        if self.enabled and not self.informed.is_set():
            self.missed = True
            log.warning(
                "nobody is evicted before disruption budgets are known, and who was preempted lately",
                pod=choosing.pod.key,
            )
            return PreemptionResult()
        if self.queues is not None:
            await self.queues.read(choosing.touching(), self.slices, until_s)
        if not choosing.request:
            return choosing.as_proposed()
        found = await self._found(choosing, until_s)
        if found is not None:
            return choosing.answer(found)
        if self.queues is not None:
            self.queues.nobody_goes_on(args.nodes)
        return PreemptionResult()

    async def _found(self, choosing: Choosing, until_s: float) -> Eviction | None:
        """The least eviction, proved; None where nobody is to be evicted."""
        for tries_left in reversed(range(TRIES)):
            if self._evicts_nobody(choosing.pod):
                break
            self._state.expire()
            whole = await self.slices.do(choosing.steps(self._making_way(choosing.pod)), until_s=until_s)
            if not whole:
                log.warning("whom to evict is answered before all nodes were looked at", pod=choosing.pod.key)
            if choosing.best is None or self._evicts_nobody(choosing.pod):
                break
            last = not (whole and tries_left) or self._clock() >= until_s
            found = self._proved(choosing, choosing.best, at_any_cost=last)
            if found is not None or last:
                return found
        return None

    def _evicts_nobody(self, pod: Pod) -> bool:
        """Is nobody to be evicted for it by the scheduler, whatever there is?"""
        if (
            not self.enabled
            or pod.spec.preemption_policy == "Never"
            or self._state.allocations.place_of(pod.uid) is not None
        ):
            return True
        return self._is_gone(pod) or self._is_being_helped(pod.uid)

    def _making_way(self, pod: Pod) -> dict[str, set[str]]:
        """Node -> UIDs of claims there that are not in this pod's way: its own room, and what is planned for pods that yield to it."""
        found, hold = self.ahead.plans.making_way(priority_of(pod)), self.reservations.get(pod.uid)
        if hold is not None:
            found.setdefault(hold.node, set()).add(pod.uid)
        return found

    def _proved(self, choosing: Choosing, best: Eviction, *, at_any_cost: bool) -> Eviction | None:
        """The choice once more, on what is known by now, and the room kept for it. None where it costs more than it seemed to."""
        pod, node = choosing.pod, best.node
        unchanged = choosing.still_holds(self._making_way(pod))
        with self.reservations.lifted(pod.uid), self.ahead.plans.aside(priority_of(pod), [node]):
            found = best if unchanged else choosing.proved(node)
            if found is None or (found.cost > best.cost and not at_any_cost):
                return None
            # before plans come back: those whose room this takes do not
            self._answered[pod.uid] = self._clock(), {node: found}
            self.reservations.put(pod.uid, pod.key, node, found.assignment)
        return found

    def _is_gone(self, pod: Pod) -> bool:
        """Is it not there? Then nothing would ever end what is kept for it."""
        known = self._pod_of(pod.key)
        return known is None or known.uid != pod.uid

    def _is_being_helped(self, uid: str) -> bool:
        hold = self.reservations.get(uid)
        if hold is None:
            return False
        comes_back = self._clock() < hold.since_s + BACK_S and self.reservations.is_whole(uid)
        return hold.nominated or comes_back or bool(self._candidates.terminating(hold.node))

    def waiting(self) -> list[Pod]:
        """Pods that request a GPU and fit nowhere, as kube-scheduler says. Of others no container is kept (`small_pod_of`)."""
        waits = [pod for pod in self._all_pods() if not (pod.spec.node_name or leaving(pod)) and fits_nowhere(pod)]
        return [pod for pod in waits if pod.spec.containers or pod.spec.init_containers]

    def expire(self) -> None:
        """Once a second: end what has lapsed, take what came free."""
        long_ago_s = self._clock() - self._hold_s
        for uid in [uid for uid, (at_s, _) in self._answered.items() if at_s <= long_ago_s]:
            del self._answered[uid]
        self._evictor.expire()
        self._reporter.expire()
        if self.queues is not None and (node := self.queues.expire()):
            self._evictor.try_again()
            self._state.on_lapse(node)
        for uid in self.reservations.lapsed():
            hold = self.reservations.drop(uid)
            if hold is not None:
                self._evictor.lapsed(hold)
        self.reservations.refresh()

    # --- what there is ---

    def _requested(self, uid: str) -> float:
        return self._answered.get(uid, (float("-inf"), {}))[0]

    def _pod_of(self, key: str) -> Pod | None:
        return self.pods.get(key) if self.pods is not None else None

    def _all_pods(self) -> Sequence[Pod]:
        return list(self.pods.items()) if self.pods is not None else []


def _nowhere(result: FilterResult) -> bool:
    return not (result.error or result.node_names)


def _preempted(pod: Pod) -> bool:
    return any(one.reason == BY_THE_SCHEDULER for one in pod.status.conditions)
