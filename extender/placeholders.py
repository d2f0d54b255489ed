"""Keep placeholder pods for pods that fit the sum of a node and no single GPU (`vgpu.scheduling.placeholders` decides).

    filter refuses a pod --nodes--> noted: node types --once in `CHECK_S`--> decide --> create, remove; first times --> ConfigMap
    filter finds a node for it, or the watch shows it bound or gone ------> removed at once

Part of the extender, because it alone knows why a pod fits nowhere. It needs no leader election of its own: only the extender beside the active kube-scheduler is
called, so another one notes no pod and makes no placeholder. At a leader change two may be called for some seconds: then the API server refuses a second
placeholder for a pod (its name has the pod's UID), and more in all than a ResourceQuota of the chart allows. All of them remove, by UID, which happens once.

An extender that restarts reads the placeholders and the first times back. Without the API server, nothing is made or removed, and what was due is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
import structlog

from extender.placeholder_pod import INSTANCE_TYPE, READ, name_of, placeholder
from extender.settings import Settings
from extender.state import State
from kube import paths
from kube.cache import Cache, CacheStatistics
from kube.client import Client
from kube.errors import ApiError
from kube.events import Recorder, about
from kube.needs import suits
from kube.objects import ConfigMap, Metadata, Node, Pod
from kube.patch import merge
from vgpu.api.errors import BadRequest
from vgpu.scheduling.explain import scattered
from vgpu.scheduling.placeholders import (
    Limits,
    NodeType,
    PlaceholderPod,
    Plan,
    StrandedPod,
    decide,
    node_types,
    smallest,
)

CHECK_S: Final = 2.0
"""Between checks. Guessed: autoscalers look at pods every 10 s by default."""
SETTLE_S: Final = 5.0
"""From filter's refusal to a placeholder: an eviction, or a pod that ends, may make it needless. Guessed."""
NOTE_S: Final = 600.0
"""A refusal is believed for so long. kube-scheduler tries a pod that fits nowhere again within 5 minutes (pkg/scheduler/backend/queue, 1.36)."""
NOTED: Final = 1000
"""Pods noted at a time. Others are when they are tried again. Guessed."""
AGAIN_S: Final = 10.0
"""The nodes of a pod's refusal are read again after this: 1 ms for 10,000. Guessed."""
JUDGED: Final = 64
"""Pods with different requests that are judged in one check, 1 to 2 ms each at 10,000 nodes. Guessed."""

SHOWN_S: Final = 60.0
"""One that was made counts for so long before the watch shows it. Guessed."""

NO_NODE_TYPE: Final = "NoNodeType"
ADDED: Final = "PlaceholderCreated"
TIMED_OUT: Final = "PlaceholderTimedOut"
FORBIDDEN: Final = 403

log = structlog.get_logger("extender.placeholders")


@dataclass(slots=True)
class _Note:
    """A pod that filter refused, since on some nodes no single GPU has enough."""

    key: str
    since_s: float
    seen_s: float
    read_s: float = float("-inf")
    types: frozenset[str] = frozenset()
    """Node types of the nodes that kube-scheduler named."""


@dataclass(slots=True)
class Counts:
    """What was done since the start."""

    created: int = 0
    removed: int = 0
    refused: int = 0
    """By the API server: a quota, a policy, an account's rights."""
    present: int = field(default=0)


class Placeholders:
    """`clock` is monotonic, `wall` in seconds since 1970."""

    def __init__(
        self,
        client: Client,
        state: State,
        settings: Settings,
        *,
        pods: Cache[Pod],
        nodes: Cache[Node],
        recorder: Recorder,
        clock: Callable[[], float],
        wall: Callable[[], float],
        check_s: float = CHECK_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.counts = Counts()
        self._client, self._state, self._settings, self._pods, self._nodes = client, state, settings, pods, nodes
        self._recorder, self._clock, self._wall = recorder, clock, wall
        self._check_s, self._settle_s = check_s, settle_s
        self._limits = Limits(settings.placeholder_most, settings.placeholder_timeout_s)
        self._namespace, _, self._config_map = settings.placeholder_config_map.partition("/")
        self._label = settings.names.placeholder_for
        self._present = Cache(
            client, paths.pods(self._namespace), Pod, label_selector=self._label, on_change=self._shown
        )
        self._records = Cache(
            client, paths.config_map(self._namespace), ConfigMap, field_selector=f"metadata.name={self._config_map}", on_change=self._read,
        )  # fmt: skip
        self._notes: dict[str, _Note] = {}
        self._first: dict[str, tuple[float, str]] = {}
        """UID -> when its first placeholder was made, and `namespace/name`."""
        self._unwritten = set[str]()
        self._made: dict[str, PlaceholderPod] = {}
        """Name -> one that the watch has not shown yet."""
        self._due = asyncio.Event()

    @property
    def enabled(self) -> bool:
        """Are there any?"""
        return bool(self._config_map)

    def statistics(self) -> dict[str, CacheStatistics]:
        """What its caches have seen, by name."""
        if not self.enabled:
            return {}
        return {"placeholders": self._present.statistics(), "placeholder_records": self._records.statistics()}

    # --- what the extender sees ---

    def is_placeholder(self, pod: Pod) -> bool:
        """Is this pod one of ours? Also one that somebody labelled so: it is bound to no node."""
        return self._label in (pod.metadata.labels or {})

    def found_no_single_gpu(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Filter refused a pod: on these nodes no single GPU has enough free."""
        now_s, note = self._clock(), self._notes.get(pod.uid)
        if note is None:
            if not self.enabled or len(self._notes) >= NOTED:
                return
            note = self._notes[pod.uid] = _Note(pod.key, now_s, now_s)
        note.seen_s = now_s
        if now_s >= note.read_s + AGAIN_S:
            note.read_s, note.types = now_s, frozenset(filter(None, map(self._type_of, nodes)))

    def placed(self, uid: str) -> None:
        """Filter found a node for this pod."""
        if self._notes.pop(uid, None) is not None or self._first.get(uid) is not None:
            self._due.set()

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod was added, changed or removed."""
        pod = new or old
        if pod is not None and (new is None or new.spec.node_name or new.finished):
            self.placed(pod.uid)

    def _shown(self, old: Pod | None, new: Pod | None) -> None:
        self.counts.present = len(self._present)
        for pod in filter(None, (old, new)):
            self._made.pop(pod.metadata.name, None)

    def _read(self, _: ConfigMap | None, new: ConfigMap | None) -> None:
        """Also what another extender wrote."""
        for uid, text in ((new.data if new is not None else None) or {}).items():
            at, key = [*text.split(" ", 1), ""][:2]
            try:
                first_s = float(at)
            except ValueError:
                log.warning("a record of a placeholder cannot be read", uid=uid, text=text[:80])
                continue
            known = self._first.get(uid)
            if key and (known is None or first_s < known[0]):
                self._first[uid] = first_s, key

    # --- what is done ---

    async def run(self) -> None:
        """Until cancelled."""
        if not self.enabled:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._present.run())
            group.create_task(self._records.run())
            group.create_task(self._keep())

    async def _keep(self) -> None:
        for cache in (self._pods, self._nodes, self._present, self._records):
            await cache.has_synced.wait()
        while True:
            self._due.clear()
            try:
                await self.check()
            except (ApiError, msgspec.MsgspecError) as error:
                log.warning("placeholders are checked again later", error=str(error))
            try:
                async with asyncio.timeout(self._check_s):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def check(self) -> None:
        """Once: do what is to be done now. Raises ApiError and MsgspecError; what was not done is done at the next check."""
        owner = self._records.get(f"{self._namespace}/{self._config_map}")
        types = node_types((self._type_of(name), inventory) for name, inventory in self._state.fleet.inventory.items())
        present = [self._as_placeholder(pod) for pod in self._present.items()]
        self._made = {name: one for name, one in self._made.items() if self._wall() < one.created_s + SHOWN_S}
        present += self._made.values()
        waiting = self._waiting(types)
        plan = decide(
            waiting, present, {uid: first[0] for uid, first in self._first.items()}, self._limits, self._wall()
        )
        await self._remove(plan)
        for pod in waiting.values():
            if pod.stranded and not pod.node_type:
                self._report_no_type(pod.uid)
        if owner is not None:
            for one in plan.create:
                await self._create(one, types[one.node_type], owner.metadata)
            await self._write(plan.forget)
        elif plan.create:
            log.warning(
                "no placeholder is made: the ConfigMap is not there", config_map=self._settings.placeholder_config_map
            )

    def _type_of(self, node: str) -> str:
        known = self._nodes.get(node)
        return ((known.metadata.labels if known is not None else None) or {}).get(INSTANCE_TYPE, "")

    def _as_placeholder(self, pod: Pod) -> PlaceholderPod:
        meta = pod.metadata
        uid = (meta.labels or {}).get(self._label, "")
        created_s = (
            datetime.fromisoformat(meta.creation_timestamp).timestamp() if meta.creation_timestamp else self._wall()
        )
        key = meta.annotation(self._label)
        if uid not in self._first and key and name_of(uid) == meta.name:
            self._first[uid] = created_s, key  # made, and not recorded before the extender ended
            self._unwritten.add(uid)
        return PlaceholderPod(meta.name, uid, created_s, meta.deletion_timestamp is not None)

    def _waiting(self, types: Mapping[str, NodeType]) -> dict[str, StrandedPod]:
        now_s = self._clock()
        self._notes = {uid: note for uid, note in self._notes.items() if now_s < note.seen_s + NOTE_S}
        keys = {uid: note.key for uid, note in self._notes.items()} | {
            uid: key for uid, (_, key) in self._first.items()
        }
        judged: dict[Any, tuple[bool, str]] = {}
        nodes_of: dict[str, list[str]] = {}
        for name in self._state.fleet.inventory:
            nodes_of.setdefault(self._type_of(name), []).append(name)
        found = {}
        for uid, key in keys.items():
            pod = self._pods.get(key)
            if pod is None or pod.uid != uid or pod.spec.node_name or pod.finished or pod.metadata.deletion_timestamp:
                continue
            priority, placed = pod.spec.priority or 0, uid in self._state.reservations
            note, stranded, node_type = self._notes.get(uid), None, ""
            if note is not None and not placed and now_s >= note.since_s + self._settle_s:
                stranded, node_type = self._judged(pod, note, types, nodes_of, judged)
            since_s = note.since_s if note is not None else now_s
            found[uid] = StrandedPod(uid, priority, since_s, stranded, placed, node_type)
        return found

    def _judged(
        self, pod: Pod, note: _Note, types: Mapping[str, NodeType], nodes_of: Mapping[str, list[str]], known: dict[Any, tuple[bool, str]],
    ) -> tuple[bool | None, str]:  # fmt: skip
        """Is a sum of GPUs enough for it and no single GPU, and which node type would place it? Pods that request the same are judged once."""
        try:
            request = self._state.request_of(pod)
        except BadRequest:
            return None, ""
        needs = pod.spec.needs
        what = request, note.types, needs
        if what not in known:
            if len(known) >= JUDGED:
                return None, ""
            names = [name for one in note.types for name in nodes_of.get(one, ())]
            allowed = set(note.types)
            if needs is not None:
                for name in types.keys() - allowed:
                    nodes = filter(None, map(self._nodes.get, nodes_of.get(name, ())))
                    if any(
                        suits(needs, one.metadata.labels or {}, one.spec.taints, unschedulable=False) for one in nodes
                    ):
                        allowed.add(name)
            stranded = not names or scattered(self._state.fleet, request, names) is not None
            chosen = smallest((types[one] for one in sorted(allowed) if one in types), request) if stranded else ""
            known[what] = stranded, chosen
        return known[what]

    async def _remove(self, plan: Plan) -> None:
        for one, reason in plan.remove:
            pod = self._present.get(f"{self._namespace}/{one.name}")
            if pod is None:
                continue
            body = {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "preconditions": {"uid": pod.uid},
                "gracePeriodSeconds": 0,
            }
            try:
                await self._client.send("DELETE", paths.pod(self._namespace, one.name), body)
            except ApiError as error:
                if not (error.not_found or error.conflict):
                    raise
                continue
            self.counts.removed += 1
            log.info("a placeholder is removed", pod=pod.metadata.annotation(self._label), reason=reason)
            if reason == "timed out" and (waits := self._pods.get(pod.metadata.annotation(self._label) or "")):
                minutes = self._limits.timeout_s / 60
                note = f"No node came for the placeholder in {minutes:g} minutes: it is removed, and none is made again for this pod"
                self._recorder.event(about(waits), TIMED_OUT, note, "Warning", action="Scheduling")

    async def _create(self, one: StrandedPod, kind: NodeType, owner: Metadata) -> None:
        pod = self._pods.get(self._notes[one.uid].key)
        if pod is None or pod.uid != one.uid or one.uid in self._state.reservations:
            return
        settings = self._settings
        try:
            whole = READ.decode(await self._client.get(paths.pod(pod.metadata.namespace, pod.metadata.name)))
            if whole.metadata.uid != one.uid:
                return
            body = placeholder(
                whole, kind, settings.names, self._state.request_of(pod).requests, scheduler=settings.scheduler_name,
                image=settings.placeholder_image, priority_class=settings.placeholder_priority_class,
                owner={"apiVersion": "v1", "kind": "ConfigMap", "name": owner.name, "uid": owner.uid},
            )  # fmt: skip
            await self._client.send("POST", paths.pods(self._namespace), body)
        except BadRequest:
            return
        except ApiError as error:
            if error.status == FORBIDDEN:
                self.counts.refused += 1
                log.warning("a placeholder is refused", pod=pod.key, error=str(error))
            elif not (error.conflict or error.not_found):
                raise
            return
        self._first.setdefault(one.uid, (self._wall(), pod.key))
        if self._present.get(f"{self._namespace}/{name_of(one.uid)}") is None:
            self._made[name_of(one.uid)] = PlaceholderPod(name_of(one.uid), one.uid, self._wall())
        self._unwritten.add(one.uid)
        self.counts.created += 1
        note = f"Placeholder {name_of(one.uid)} requests a node of type {kind.name} from the cluster's autoscaler, which counts the sums of nodes"
        self._recorder.event(about(pod), ADDED, note, action="Scheduling")
        log.info("a placeholder is made", pod=pod.key, node_type=kind.name)

    async def _write(self, forget: Sequence[str]) -> None:
        """The first times, by pod: other extenders write others."""
        change: dict[str, str | None] = {
            uid: f"{first[0]:.0f} {first[1]}" for uid in self._unwritten if (first := self._first.get(uid))
        }
        change |= dict.fromkeys(forget)
        if not change:
            return
        await merge(self._client, paths.config_map(self._namespace, self._config_map), {"data": change})
        self._unwritten.clear()
        for uid in forget:
            self._first.pop(uid, None)

    def _report_no_type(self, uid: str) -> None:
        note = self._notes.get(uid)
        pod = self._pods.get(note.key) if note is not None else None
        if pod is not None:
            text = "Fits the sum of a node, no single GPU, and no known node type that the pod may use would place it on an empty node: no node is requested"
            self._recorder.event(about(pod), NO_NODE_TYPE, text, "Warning", action="Scheduling", series=NO_NODE_TYPE)
