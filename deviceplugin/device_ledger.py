"""The node's one ledger of the device IDs that the kubelet gave to containers, for all resources together.

Two plugin servers that do not share a ledger put a pod's memory and compute on different GPUs. This one serves all of them, keeps
the pod in flight between requests, and waits a bounded time for the watch when no known pod fits the request. Its decisions are
those of `allocation`, which is pure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import Final, Protocol

import structlog

from deviceplugin.allocation import (
    Choice,
    DeviceRequest,
    NodePod,
    PodInFlight,
    ServedRequest,
    candidates,
    check_capacity,
    choose_container,
    prefer,
    prefer_anywhere,
)
from deviceplugin.numa_check import misaligned
from deviceplugin.pods.orphan_finder import OrphanFinder
from vgpu.api.contract import uuid_of
from vgpu.api.errors import Refused
from vgpu.api.inventory import Inventory
from vgpu.api.names import Names

POD_WAIT_S: Final = 2.0
"""How long a request waits for the watch to bring its pod. The kubelet admits no other pod meanwhile."""

FLIGHT_S: Final = 10.0
"""A pod is in flight for no longer than this after its last request. Guessed: the kubelet takes milliseconds."""

log = structlog.get_logger("deviceplugin.device_ledger")


class AssignedPods(Protocol):
    """The pods of this node that have an assignment, as `deviceplugin.pods.node_pods.NodePods` has them."""

    @property
    def synced(self) -> bool:
        """Is every pod of the node known?"""

    def node_pods(self) -> Sequence[NodePod]:
        """Every pod of this node with a readable assignment that is not finished."""

    def other_scheduler(self, request: DeviceRequest) -> str | None:
        """Why the pod that the request may be for cannot be served, when the watch has one."""

    async def changed(self) -> None:
        """Return after the next change of any pod."""


class DeviceLedger:
    """Answers the kubelet's requests for all resources of a node."""

    def __init__(
        self,
        pods: AssignedPods,
        inventory: Callable[[], Inventory],
        names: Names,
        *,
        orphans: OrphanFinder | None = None,
        users: Callable[[str], Mapping[str, str]] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        names_numa: Callable[[], bool] = bool,
        clock: Callable[[], float] = time.monotonic,
        pod_wait_s: float = POD_WAIT_S,
    ) -> None:
        self.done: dict[str, dict[tuple[str, str], frozenset[str]]] = {}
        """Pod UID -> (container, resource) -> device IDs."""
        self._had: dict[str, dict[str, frozenset[str]]] = {}
        """Resource -> device ID -> UIDs of pods that `done` may name with it: where to search. A pod may have lost it since."""
        self.swaps = 0
        """Allocations whose devices lie on another GPU than assigned."""
        self._pods, self._inventory, self._names = pods, inventory, names
        self._orphans, self._users_of, self._waiting = orphans, users, waiting
        self._clock, self._pod_wait_s, self._names_numa = clock, pod_wait_s, names_numa
        self._flight, self._flight_at = PodInFlight(), float("-inf")
        self._gave_up_on: DeviceRequest | None = None

    async def prefer(
        self, resource: str, available: Collection[str], must_include: Collection[str], quantity: int
    ) -> list[str]:
        """Device IDs that the kubelet should choose. Empty when no known pod fits the request: Allocate reports why."""
        request = DeviceRequest(resource, quantity)
        first, others = await self._wait_for_choices(request)
        if first is None:
            return []
        free = self._without_used(resource, frozenset(available), must_include)
        ids = _fitting(chain([first], others), free, must_include, quantity)
        if ids is None and free != frozenset(available):
            ids = await self._when_unused(request, frozenset(available), must_include)
        if ids is not None:
            return ids
        log.warning(
            "no assigned GPU has enough free devices", resource=resource, quantity=quantity, pod=str(first.node_pod)
        )
        near = {uuid_of(one) for (c, _), ids in self._given(first).items() if c == first.container for one in ids}
        return prefer_anywhere(free, must_include, near, quantity)

    async def _when_unused(
        self, request: DeviceRequest, available: frozenset[str], must_include: Collection[str]
    ) -> list[str] | None:
        """What fits once processes of pods that the API no longer has are seen to be gone; None when that is not in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pod_wait_s):
                while True:
                    await self._changed()
                    free = self._without_used(request.resource, available, must_include)
                    ids = _fitting(self._choices(request), free, must_include, request.quantity)
                    if ids is not None:
                        return ids
        return None

    async def allocate(self, resource: str, ids: Collection[str]) -> Choice:
        """Enter the kubelet's choice into the ledger. Returns whose it is. Raises Refused."""
        request, these = DeviceRequest(resource, len(ids)), frozenset(ids)
        tired = self._gave_up_on == request
        self._gave_up_on = None
        try:
            return self._allocate(request, these)
        except Refused:
            if tired or self._pod_wait_s <= 0:
                raise
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pod_wait_s):
                while True:
                    await self._changed()
                    with suppress(Refused):
                        return self._allocate(request, these)
        return self._allocate(request, these)

    def restore(self, uid: str, container: str, resource: str, ids: Iterable[str]) -> None:
        """After a restart: this was given before."""
        has = self.done.setdefault(uid, {}).setdefault((container, resource), frozenset(ids))
        had = self._had.setdefault(resource, {})
        had.update({one: had.get(one, frozenset()) | {uid} for one in has})

    def forget_the_gone(self) -> None:
        """Drop the devices of pods that are no longer there."""
        alive = {node_pod.uid for node_pod in self._pods.node_pods()}
        for uid in self.done.keys() - alive:
            del self.done[uid]

    def in_use(self, resource: str) -> frozenset[str]:
        """Device IDs that containers have, or that processes of pods which the API no longer has may use. Before the pods are known, those of every pod that
        had any."""
        alive = {node_pod.uid for node_pod in self._pods.node_pods()} if self._pods.synced else self.done.keys()
        had = {
            one
            for uid in self.done.keys() & alive
            for (_, given), ids in self.done[uid].items()
            if given == resource
            for one in ids
        }
        known = self._users_of(resource) if self._users_of is not None else {}
        users = self._users() if known else {}
        return frozenset(had | {one for one, uid in known.items() if uid in users})

    def holders(self, resource: str, ids: Collection[str]) -> list[tuple[str, str]]:
        """(pod UID, container) of each container that was allocated exactly these devices."""
        wanted = frozenset(ids)
        return [
            (uid, container)
            for uid, given in self.done.items()
            for (container, held), has in given.items()
            if held == resource and has == wanted
        ]

    async def _changed(self) -> None:
        """Return after the next change that may let a request in."""
        sources = [self._pods.changed()] + ([self._orphans.changed()] if self._orphans is not None else [])
        waiting = [asyncio.ensure_future(source) for source in sources]
        try:
            with self._waiting():
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def _check_capacity(self, choice: Choice) -> None:
        """Raises Refused."""
        orphans = () if self._orphans is None else [record.orphan for record in self._orphans.still_using()]
        check_capacity(self._pods.node_pods(), choice.gpus, self._inventory(), orphans)

    def _users(self) -> dict[str, str]:
        """UID -> name of every pod whose processes may use devices now. The kubelet gives none of theirs away, unless it lost its
        checkpoint or a pod left the API before its processes left the node."""
        started = {t.uid: str(t) for t in self._pods.node_pods() if not t.waiting}
        gone = () if self._orphans is None else self._orphans.still_using()
        return started | {
            record.uid: f"pod {record.namespace}/{record.pod}, which the API no longer has" for record in gone
        }

    def _without_used(self, resource: str, available: frozenset[str], must_include: Collection[str]) -> frozenset[str]:
        known = self._users_of(resource) if self._users_of is not None else {}
        had = {one: known[one] for one in known.keys() & available}
        users = self._users() if had else {}
        used = {one for one, user in had.items() if user in users}.difference(must_include)
        if not used:
            return available
        log.info("the kubelet takes devices for free that are in use", resource=resource, devices=len(used))
        return available - used

    def _check_unused(self, node_pod: NodePod, resource: str, ids: frozenset[str]) -> None:
        """Raises Refused."""
        known = self._users_of(resource) if self._users_of is not None else {}
        had = {known[one] for one in ids if one in known} - {node_pod.uid}
        users = self._users() if had else {}
        for user in sorted(had & users.keys()):
            raise Refused(
                f"the kubelet chose {len(ids)} devices of {resource} for {node_pod}, and processes of {users[user]} use some of them: they are free when those processes end"
            )

    async def _wait_for_choices(self, request: DeviceRequest) -> tuple[Choice | None, Iterator[Choice]]:
        """The likeliest choice and the others; None when there is none in time."""
        choices = self._choices(request)
        if (first := next(choices, None)) is not None:
            return first, choices
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pod_wait_s):
                while True:
                    with self._waiting():
                        await self._pods.changed()
                    if (first := next(choices := self._choices(request), None)) is not None:
                        return first, choices
        choices = self._choices(request)
        first = next(choices, None)
        self._gave_up_on = None if first else request
        return first, choices

    def _choices(self, request: DeviceRequest) -> Iterator[Choice]:
        flight = self._flight if self._clock() - self._flight_at < FLIGHT_S else PodInFlight()
        return candidates(self._pods.node_pods(), self.done, flight, request, self._names)

    def _allocate(self, request: DeviceRequest, ids: frozenset[str]) -> Choice:
        # what a container sees of MIG comes from the kubelet's device in each access mode
        must_match = self._inventory().access == "cdi" or self._names.mig_profile(request.resource) is not None
        try:
            choice = choose_container(self._choices(request), ids, request, must_match=must_match)
            if choice.swapped and (wrong := self._misaligned(choice, ids)):
                raise Refused(f"{choice.node_pod}: {wrong}")
        except Refused as error:
            likeliest = next(self._choices(request), None)
            if likeliest is not None:
                self._check_capacity(likeliest)  # then that is why the kubelet found no devices where they should be
            wrong = self._misaligned(likeliest, ids) if likeliest is not None else ""
            wrong = f"{error}: {wrong}" if wrong and wrong not in str(error) else str(error)
            raise Refused(self._pods.other_scheduler(request) or wrong) from None
        self._check_capacity(choice)
        self._check_unused(choice.node_pod, request.resource, ids)
        self._enter(choice, request, ids)
        return choice

    def _misaligned(self, choice: Choice, ids: frozenset[str]) -> str:
        """Why NUMA nodes are the reason for devices of other GPUs; empty if they are not."""
        return misaligned(self._inventory(), map(uuid_of, ids), choice.gpus) if self._names_numa() else ""

    def _enter(self, choice: Choice, request: DeviceRequest, ids: frozenset[str]) -> None:
        uid, flight = choice.node_pod.uid, self._flight
        if choice.moves and uid == flight.uid:
            log.info("the pod in flight has only what it requested itself", uid=uid, pod=str(choice.node_pod))
            flight = flight.own()
        elif choice.moves:
            log.info("the pod in flight is another one", guessed=flight.uid, now=uid, pod=str(choice.node_pod))
            self.done.pop(flight.uid, None)
            flight = PodInFlight(uid, flight.calls, len(flight.calls))
        elif uid != flight.uid or choice.anew:
            flight = PodInFlight(uid)
        if choice.moves:
            self.done[uid] = dict(choice.moves)
            for (_, resource), moved in choice.moves.items():
                self._had.setdefault(resource, {}).update(dict.fromkeys(moved, frozenset((uid,))))
        if choice.anew:
            self.done.pop(uid, None)
        self.swaps += choice.swapped
        self._drop_stale(uid, request.resource, ids)
        self.done.setdefault(uid, {})[choice.container, request.resource] = ids
        self._flight = replace(flight, calls=(*flight.calls, ServedRequest(request, ids)))
        self._flight_at = self._clock()

    def _drop_stale(self, uid: str, resource: str, ids: frozenset[str]) -> None:
        """The kubelet gives no device twice: another pod that has one of these in the ledger no longer has it."""
        had = self._had.setdefault(resource, {})
        for other in frozenset().union(*(had[one] for one in ids if one in had)) - {uid}:
            given = self.done.get(other, {})
            for key in [key for key, has in given.items() if key[1] == resource and not has.isdisjoint(ids)]:
                del given[key]
        had.update(dict.fromkeys(ids, frozenset((uid,))))

    def _given(self, choice: Choice) -> dict[tuple[str, str], frozenset[str]]:
        return self.done.get(choice.node_pod.uid, {}) | dict(choice.moves)


def _fitting(
    choices: Iterable[Choice], free: Collection[str], must_include: Collection[str], quantity: int
) -> list[str] | None:
    """Devices of the likeliest choice whose GPU has enough of them."""
    found = (prefer(choice, free, must_include, quantity) for choice in choices)
    return next((ids for ids in found if ids is not None), None)
