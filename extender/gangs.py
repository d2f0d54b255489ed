"""End the reservations of a gang that kube-scheduler does not schedule (`vgpu.scheduling.gangs` decides).

    kube-scheduler --filter, preempt--> calls --+
    API server --watch--> pods, PodGroups ------+--> Gangs --failed--> reservations end

A PodGroup is an object of an API that clusters need not have (feature gate GenericWorkload). Where it is not served, no pod is of a gang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import structlog

from extender.nominate.nominator import turned_down
from extender.preemption.victim_candidates import leaving
from extender.protocol import FilterArgs, FilterResult
from extender.reasons import GANG_YIELDS, gang_paused
from extender.state import State
from kube.cache import Cache, CacheStatistics
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Metadata, Pod
from kube.paths import POD_GROUPS, POD_GROUPS_API
from kube.pod_groups import PodGroup
from vgpu.scheduling.gang_facts import GangFailure, ReservationFacts, Standing
from vgpu.scheduling.gang_pauses import LONGEST_QUIET_S
from vgpu.scheduling.gangs import Gangs

CHECK_S: Final = 60.0
"""Between checks whether the API server serves PodGroups. Guessed: an operator who enables them restarts the API server."""

LOG_S: Final = 10.0
"""Between log lines about gangs that are not scheduled. Guessed."""

log = structlog.get_logger("extender.gangs")


class GangKeeper:
    """Follows the watch of pods and kube-scheduler's calls; watches PodGroups itself."""

    def __init__(
        self,
        client: Client,
        state: State,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.gangs = Gangs()
        self._failures = 0
        self._client, self._state, self._clock, self._sleep = client, state, clock, sleep
        self._groups = Cache(client, POD_GROUPS, PodGroup, on_change=self.group_changed, shrink=_small_group)
        self._served, self._logged_s = False, float("-inf")
        self._facts = ReservationFacts(self._reserved, self._kept, self._expected)
        self._nominated: dict[str, str] = {}
        """UIDs of pods of groups that are not bound -> the node to which each is nominated."""
        self._node = ""
        """On which a gang's reservation ended last."""

    def statistics(self) -> Mapping[str, CacheStatistics]:
        """What its cache has seen, by name; nothing where PodGroups are not served."""
        return {"podgroups": self._groups.statistics()} if self._served else {}

    def failed(self) -> int:
        """Times that the reservations of a gang ended because it was not scheduled."""
        return self._failures

    async def run(self) -> None:
        """Until cancelled."""
        while not await self._is_served():
            await self._sleep(CHECK_S)
        self._served = True
        await self._groups.run()

    async def _is_served(self) -> bool:
        try:
            await self._client.get(POD_GROUPS_API)
        except ApiError as error:
            if not error.not_found:
                log.warning("it is not known whether PodGroups are served", error=str(error))
            return False
        return True

    # --- what the watches show ---

    def group_changed(self, old: PodGroup | None, new: PodGroup | None) -> None:
        """A PodGroup was added, changed or removed."""
        known = new if new is not None else old
        if known is not None:
            self.gangs.set_min_count(known.key, new.min_count if new is not None else None)
            if old is not None and not old.scheduled and new is not None and new.scheduled:
                self.gangs.fitted(known.key, self._facts)
            self._wake()

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod was added, changed or removed."""
        if new is None or new.finished or (leaving(new) and not new.spec.node_name):
            for pod in (old, new):
                if pod is None or not group_of(pod):
                    continue
                self._nominated.pop(pod.uid, None)
                if (failed := self.gangs.gone(pod.uid, self._facts)) is not None:
                    self._end(failed)
                else:
                    self._end_own(pod.uid)
        elif group := group_of(new):
            expected = self._expected(new.uid)
            self._nominated.pop(new.uid, None)
            if new.status.nominated_node_name and not new.spec.node_name:
                self._nominated[new.uid] = new.status.nominated_node_name
            self.gangs.see(new.uid, group, _standing(new))
            if self._expected(new.uid):
                self.gangs.nominated(new.uid, group)
            elif expected and not new.spec.node_name:
                self.gangs.withdrawn(new.uid, group, self._clock())
            refusal = self._refusal(group)
            if refusal and any(one.message == refusal for one in new.status.conditions):
                self.gangs.refusal_shown(new.uid, group)
                self._wake()

    # --- what kube-scheduler calls ---

    def refuses(self, args: FilterArgs) -> FilterResult | None:
        """Before all else in filter: the answer for a pod whose gang has lost reservations in a cycle that continues; else None."""
        pod, reservation = args.pod, self._state.reservations.get(args.pod.uid)
        if reservation is not None and reservation.firm:
            return None
        group = group_of(pod)
        refused = self.gangs.refuses(pod.uid, group, self._clock())
        self._wake()
        if not refused:
            return None
        self._end_own(pod.uid)
        return FilterResult(
            unresolvable={self._refusal(group) or GANG_YIELDS: list(dict.fromkeys(args.node_names or ()))}
        )

    def _refusal(self, group: str) -> str:
        """The reason that its pods are given while they are refused; empty if they are not."""
        found = self.gangs.refusal(group)
        return gang_paused(found.paused_s, LONGEST_QUIET_S, found.number) if found is not None else ""

    def next_pod(self, pod: Pod) -> None:
        """Before filter: kube-scheduler tries this pod."""
        group, reservation = group_of(pod), self._state.reservations.get(pod.uid)
        again = reservation is not None and not reservation.firm
        for failed in self.gangs.next_pod(pod.uid, group, self._facts, again=again):
            self._end(failed)
        if group:
            self.gangs.called(pod.uid, group, self._clock())

    @contextmanager
    def calling(self, pod: Pod, until_s: float) -> Iterator[None]:
        """During a call about this pod that may take until then."""
        group = group_of(pod)
        if group:
            self.gangs.called(pod.uid, group, until_s)
        try:
            yield
        finally:
            if group:
                self.gangs.called(pod.uid, group, self._clock())

    def answered(self, pod: Pod, result: FilterResult) -> None:
        """After filter."""
        group, reserved = group_of(pod), self._state.reservations.get(pod.uid) is not None
        self.gangs.answered(pod.uid, group, fits=bool(result.node_names), reserved=reserved)
        if group in self.gangs:
            self._state.on("gang", pod.uid)

    def expire(self) -> None:
        """Once a second."""
        for failed in self.gangs.quiet(self._clock(), self._facts):
            self._end(failed)
        self._wake()

    def _reserved(self, uid: str) -> bool:
        return self._state.reservations.get(uid) is not None

    def _kept(self, uid: str) -> bool:
        return self._state.reservations.get(uid, "preemption") is not None

    def _expected(self, uid: str) -> bool:
        """kube-scheduler nominates a pod whose Binding waits for other pods of the gang, or for a volume, and withdraws that if the pod fails."""
        reservation, node = self._state.reservations.get(uid), self._nominated.get(uid)
        if reservation is None:
            return node is not None
        return reservation.firm or reservation.node == node

    def _end_own(self, uid: str) -> None:
        """Only this one's."""
        own = self._state.reservations.get(uid)
        if own is not None and not own.firm:
            self._state.end_reservation(uid)
            self._state.on_lapse(own.node)

    def _end(self, failed: GangFailure) -> None:
        ended = [one for uid in failed.uids if (one := self._state.reservations.get(uid)) is not None and not one.firm]
        for one in ended:
            self._state.end_reservation(one.uid)
        if not ended:
            return
        self._failures += 1
        self._node = ended[-1].node
        now_s = self._clock()
        if now_s >= self._logged_s + LOG_S:  # a gang may be tried hundreds of times a second
            self._logged_s = now_s
            log.info("a gang is not scheduled: its reservations end", group=failed.group, reservations=len(ended))
        if failed.others_wait:
            self._state.on_lapse(self._node)

    def _wake(self) -> None:
        """Make kube-scheduler retry pods that were refused for their gang, if no other event will."""
        if self.gangs.wakes():
            self._state.on_lapse(self._node)


def group_of(pod: Pod) -> str:
    """The PodGroup of a pod, as `namespace/name`; empty for a pod of none."""
    group = pod.spec.scheduling_group
    return f"{pod.metadata.namespace}/{group.pod_group_name}" if group is not None and group.pod_group_name else ""


def _small_group(group: PodGroup) -> PodGroup:
    meta = group.metadata
    return PodGroup(Metadata(meta.name, meta.namespace, meta.uid, meta.resource_version), group.spec, group.status)


def _standing(pod: Pod) -> Standing:
    if pod.spec.node_name:
        return "bound"
    if pod.spec.containers or pod.spec.init_containers:  # else the cache keeps none (`compact`)
        return "waits"
    return "unschedulable" if turned_down(pod) and not pod.status.nominated_node_name else "requests nothing"
