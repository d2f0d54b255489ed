"""Coordinate preemption: what the watch shows and what kube-scheduler calls, passed to the parts in the order that keeps them consistent.

    filter finds no node --> kube-scheduler calls /preempt (`verb`), evicts, nominates --watch--> reservation (`preemption_reservations`)
                         --> kube-scheduler does not call --> `evictor` reserves, nominates, evicts

`pod_changed` stands between the watch and the state, so that a reservation takes freed capacity at the moment when it comes free. No
decision is made here: `verb` and `preempt_call` answer kube-scheduler, `planner` and `evictor` evict where it does not call.
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

from extender.filter import filter_nodes
from extender.fit_report import FitReporter
from extender.nominate.nominator import Nominator, fits_nowhere, turned_down
from extender.preemption.background import BackgroundWork
from extender.preemption.disruption_budgets import DisruptionBudgets, small_budget
from extender.preemption.evictions import Evictions
from extender.preemption.evictor import Evictor
from extender.preemption.history import PreemptionHistory
from extender.preemption.history_store import HistoryStore
from extender.preemption.kueue_pods import KueuePods
from extender.preemption.kueue_victims import WorkloadCandidates
from extender.preemption.planner import EvictionPlanner
from extender.preemption.preemption_reservations import PreemptionReservations
from extender.preemption.verb import VICTIMS_S, PreemptVerb
from extender.preemption.victim_candidates import VictimCandidates, leaving, priority_of
from extender.protocol import FilterArgs, FilterResult
from extender.settings import Settings
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.cache import Cache, CacheStatistics
from kube.client import Client
from kube.events import Recorder
from kube.objects import Pod, PodDisruptionBudget
from kube.paths import BUDGETS
from vgpu.api.errors import BadRequest
from vgpu.scheduling.placement import NO_SINGLE_GPU, TOO_LARGE
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms
from vgpu.scheduling.victims.eligibility import LOWEST
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.victim_search import least_eviction

COMPONENT = "tangram-extender"
BY_KUBE_SCHEDULER = "PreemptionByScheduler"
"""Reason of the condition DisruptionTarget that kube-scheduler writes to its victims."""

READ_S: Final = 5.0
"""Longest wait for the preemption history before evictions begin. Guessed: it is one small list."""

NEWS_S: Final = 0.001
"""From a call until filter answers that there is no capacity, at least: what comes free by then is found. Guessed: kube-scheduler's watch may be so
much ahead, and it is little beside a scheduling cycle. To place a pod on 10,000 nodes takes as long, so there nothing is waited for."""

log = structlog.get_logger("extender.preemption.coordinator")


class PreemptionCoordinator:
    """`pods` is the cache whose changes are passed to `pod_changed`."""

    def __init__(
        self,
        client: Client,
        state: State,
        intake: WatchIntake,
        pods: Cache[Pod],
        settings: Settings,
        nominator: Nominator,
        clock: Callable[[], float] = time.monotonic,
        *,
        read_s: float = READ_S,
    ) -> None:
        self.enabled = settings.preemption
        self.on_no_single_gpu: Callable[[Pod, Sequence[str]], object] = lambda _, __: None
        """Called where filter refused a pod, with the nodes on which no single GPU has enough free, else with those on which none is large enough."""
        self._state, self._intake, self._pods, self._nominator = state, intake, pods, nominator
        self._read_s, self._has_read_back = read_s, False
        self.disruptions = DisruptionBudgets()
        self.budgets = Cache(
            client, BUDGETS, PodDisruptionBudget, on_change=self.disruptions.changed, shrink=small_budget
        )
        self.background, self.reservations = BackgroundWork(clock), PreemptionReservations(state)
        self._history = PreemptionHistory(
            time.time, times=settings.preempted_times, period_s=settings.preempted_period_s
        )
        self._history_store = HistoryStore(client, self._history, settings.preempted_config_map)
        resources = filter(None, settings.kueue_controllers.split(","))
        self.kueue_pods = KueuePods(client, resources, clock) if settings.preemption and settings.kueue else None
        self._candidates = VictimCandidates(state, self._history, pods, self.disruptions, self.kueue_pods)
        self.recorder = Recorder(client, COMPONENT, socket.gethostname())
        self._reporter = FitReporter(
            state, self.recorder, pod_of=pods.get, is_preemptor=self.reservations.__contains__, clock=clock
        )
        self.verb = PreemptVerb(
            state, pods, self._candidates, self.reservations, nominator, clock=clock,
            deadline_s=settings.preemption_deadline_s, remember_s=settings.preemption_reservation_s, background=self.background,
            kueue_pods=self.kueue_pods, enabled=settings.preemption,
        )  # fmt: skip
        workloads = (
            WorkloadCandidates(self._candidates, self.kueue_pods, pods, clock)
            if settings.kueue_evict == "whole"
            else None
        )
        planner = EvictionPlanner(
            state, pods, self._candidates, self.reservations, clock=clock, deadline_s=settings.preemption_deadline_s,
            background=self.background, kueue_pods=self.kueue_pods, workloads=workloads,
        )  # fmt: skip
        self._evictions = Evictions(client, self._candidates, self._history, self.recorder, self.kueue_pods)
        self._evictor = Evictor(
            client, state, pods, self._candidates, self.reservations, planner, self._evictions,
            answered_at_s=self.verb.answered_at_s, is_active=nominator.is_active, clock=clock,
        )  # fmt: skip

    def statistics(self) -> dict[str, CacheStatistics]:
        """What its caches have seen, by name."""
        if not self.enabled:
            return {}
        history = {"preempted": self._history_store.statistics()} if self._history_store.enabled else {}
        kueue_pods = self.kueue_pods.statistics() if self.kueue_pods else {}
        return {"budgets": self.budgets.statistics(), **history, **kueue_pods}

    def evicted(self) -> int:
        """Pods that the extender itself has evicted."""
        return self._evictions.evicted

    def unread_controllers(self) -> int:
        """Controllers of pods that are not read yet or cannot be; 0 without Kueue."""
        return self.kueue_pods.unread if self.kueue_pods is not None else 0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.recorder.run())
            if self.enabled:
                for part in (self.budgets.run(), self._evict(), self._history_store.run()):
                    group.create_task(part)
            if self.kueue_pods is not None:
                group.create_task(self.kueue_pods.run())

    async def _evict(self) -> None:
        await self.budgets.has_synced.wait()
        try:
            async with asyncio.timeout(self._read_s):
                await self._history_store.read()
        except TimeoutError:
            log.warning("the preemption history cannot be read: pods are evicted without it", waited_s=self._read_s)
        self.verb.informed.set()
        await self._evictor.run()

    # --- what the watch shows ---

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod was added, changed or removed."""
        self._candidates.pod_changed(old, new)
        self._intake.pod_changed(old, new)
        self._nominator.pod_changed(old, new)
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
            self._follow_nomination(old, new)

    def _forget(self, uid: str) -> None:
        self.reservations.end(uid)
        self.verb.forget(uid)
        self._evictor.forget(uid)

    def _follow_nomination(self, old: Pod | None, pod: Pod) -> None:
        """Reserve for a pod that kube-scheduler has nominated after evictions; end the reservation when it withdraws the nomination."""
        node, reservation = pod.status.nominated_node_name, self.reservations.get(pod.uid)
        if leaving(pod):
            self._forget(pod.uid)
        elif not node:
            if reservation is not None and not reservation.nominated and old and old.status.nominated_node_name:
                self.reservations.end(pod.uid)
        elif not self._nominator.has_nominated(pod.uid) and (
            reservation is None or (reservation.node != node and not reservation.nominated)
        ):
            eviction = self.verb.answered_on(pod.uid, node)
            if eviction is None and turned_down(pod):  # others were nominated early, by another replica
                eviction = self._eviction_under_way(pod, node)
            if eviction is not None:
                self.reservations.put(pod.uid, pod.key, node, eviction.assignment)

    def _read_back(self) -> None:
        """Once, when all is known and before any decision: the reservations of an extender that ran before this one.

        A nominated pod that kube-scheduler never rejected was nominated ahead of its scheduling cycle. For the other nominated pods, victims were evicted: their
        reservations come first, in whatever order pods are listed.
        """
        if self._has_read_back or not self._pods.has_synced.is_set():
            return
        self._has_read_back = True
        nominated = [
            pod
            for pod in self._pods.items()
            if pod.status.nominated_node_name
            and not (pod.spec.node_name or leaving(pod) or self.reservations.get(pod.uid) is not None)
        ]
        for pod in filter(turned_down, nominated if self.enabled else ()):
            node = pod.status.nominated_node_name
            if (eviction := self._eviction_under_way(pod, node, restarted=True)) is not None:
                self.reservations.put(pod.uid, pod.key, node, eviction.assignment)
        for pod in filterfalse(turned_down, nominated):
            self._nominator.read_back(pod)

    def _eviction_under_way(self, pod: Pod, node: str, *, restarted: bool = False) -> Eviction | None:
        """The eviction that an earlier extender must have begun for this pod: the pod fits once the terminating pods have ended."""
        terminating = self._candidates.terminating(node)
        if not terminating and not restarted:
            return None
        try:
            request = self._state.request_to_set_aside(pod)
        except BadRequest:
            return None
        if not request or self._state.allocations.place_of(pod.uid) is not None:
            return None
        rules = EvictionRules(LOWEST, terms={node: EvictionTerms(aside=terminating)})
        return least_eviction(request, [node], self._candidates.view, rules)

    # --- what kube-scheduler calls ---

    def filter(self, args: FilterArgs) -> FilterResult:
        """The filter verb. The pod's own preemption reservation is open to it, and then the nominations that yield to it."""
        uid = args.pod.uid
        self._read_back()
        self._nominator.called(args.pod)
        with self.reservations.lifted(uid):
            result = filter_nodes(self._state, args)
            if _nowhere(result):
                names = args.node_names or ()
                with self._nominator.reservations.aside(priority_of(args.pod), names) as others:
                    result = filter_nodes(self._state, args, may_list=False) if others else result
        if _nowhere(result) and args.node_names is not None:
            if self.enabled:
                self._evictor.found_no_node(args.pod, args.node_names)
            if nodes := result.failed.get(NO_SINGLE_GPU):
                self._reporter.found_no_single_gpu(args.pod, nodes)
            if nodes := nodes or result.unresolvable.get(TOO_LARGE):
                self.on_no_single_gpu(args.pod, nodes)
        return result

    async def has_news(self, args: FilterArgs, result: FilterResult, elapsed_s: float) -> bool:
        """Before filter answers that no node fits: did the watch show something that kube-scheduler may have seen already? `elapsed_s`: since the call."""
        pod, names = args.pod, args.node_names
        if not _nowhere(result) or names is None:
            return False
        reservation = self.reservations.get(pod.uid)
        if reservation is not None and not reservation.nominated and reservation.node in names:
            is_complete = await self._pods.wait_for(
                lambda: self.reservations.is_complete(pod.uid) or None, timeout_s=VICTIMS_S
            )
            return is_complete is not None
        return await self._pods.changes_within(NEWS_S - elapsed_s)

    @contextmanager
    def lifted(self, uid: str) -> Iterator[None]:
        """While bind chooses GPUs for this pod: its reservations do not block it. Do not await inside."""
        self._nominator.reservations.end(uid)
        with self.reservations.lifted(uid):
            yield

    def waiting(self) -> list[Pod]:
        """Pods that request a GPU and fit nowhere, as kube-scheduler reports, without placeholders. Of others no container is kept (`small_pod_of`)."""
        placeholder = self._state.names.placeholder_for
        waits = [pod for pod in self._pods.items() if not (pod.spec.node_name or leaving(pod)) and fits_nowhere(pod)]
        ours = [pod for pod in waits if pod.spec.containers or pod.spec.init_containers]
        return [pod for pod in ours if placeholder not in (pod.metadata.labels or {})]

    def expire(self) -> None:
        """Once a second: end the reservations that have lapsed, and let the others reserve what came free."""
        self.verb.expire()
        self._evictor.expire()
        self._reporter.expire()
        if self.kueue_pods is not None and (node := self.kueue_pods.expire()):
            self._evictor.try_again()
            self._state.on_lapse(node)
        for uid in self.reservations.lapsed():
            reservation = self.reservations.end(uid)
            if reservation is not None:
                self._evictor.lapsed(reservation)
        self.reservations.refresh()


def _nowhere(result: FilterResult) -> bool:
    return not (result.error or result.node_names)


def _preempted(pod: Pod) -> bool:
    return any(one.reason == BY_KUBE_SCHEDULER for one in pod.status.conditions)
