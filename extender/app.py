"""Assemble the parts of the extender, and run them until a stop signal.

If one part fails, the process ends and Kubernetes starts the container again: all durable state is in the API server and is read back in
seconds.

The caches come first and everything else stands on them. They report changes to the Extender's own methods, once `run` has begun.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Final

import structlog

from extender.bind import Binder
from extender.compact import small_node, small_pod_of
from extender.gangs import GangKeeper
from extender.metrics import Metrics
from extender.nominate.nominator import Nominator
from extender.placeholders import Placeholders
from extender.preemption.coordinator import PreemptionCoordinator
from extender.retry_after_lapse import Retrier
from extender.retry_after_restart import SchedulerRestarter
from extender.server import scheduler_app
from extender.settings import Settings
from extender.snapshot import snapshot_of
from extender.snapshot_writer import SnapshotWriter
from extender.state import UNFINISHED, State
from extender.verbs import Verbs
from extender.watch_intake import WatchIntake
from kube.cache import Cache, CacheStatistics
from kube.client import Client, connect
from kube.needs import WholePod
from kube.objects import Node, Pod
from kube.paths import NODES, PODS
from observe import collecting
from observe.bounds import VERBS
from observe.operations import Operations
from observe.pages import Pages
from observe.ports import listen
from observe.serving import Server
from observe.signals import on_stop_signal
from vgpu.api.readiness import Missing
from vgpu.scheduling.reservations import WatchProgress

HOUSEKEEPING_S: Final = 1.0
"""Between checks for reservations that have lapsed. Each check also counts one node anew."""

SWITCH_S: Final = 0.0005
"""Longest time for which another thread keeps the event loop waiting. Python's default of 5 ms is as long as a whole filter call may take."""

log = structlog.get_logger("extender")


class Extender:
    """One running extender. Ports are those in use, also where the settings are 0."""

    def __init__(self, settings: Settings, client: Client) -> None:
        self.stopping = asyncio.Event()
        names = settings.names
        self.pods = Cache(
            client,
            PODS,
            WholePod if settings.nominate_ahead != "never" or settings.placeholder_config_map else Pod,
            on_change=self._pod_changed,
            field_selector=UNFINISHED,
            shrink=small_pod_of(names, controllers=settings.kueue),
        )
        self.nodes = Cache(client, NODES, Node, on_change=self._node_changed, shrink=small_node(names))
        self.state = State(
            time.monotonic,
            names=names,
            unit_mib=settings.unit_mib,
            reservation_life_s=settings.reservation_s,
            preemption_life_s=settings.preemption_reservation_s,
            shown=self._shown,
            bursts=settings.burst_enabled,
            overcommit=settings.burst_overcommit,
        )
        self._intake = WatchIntake(self.state)
        self.nominator = Nominator(
            client,
            self.state,
            pods=self.pods,
            nodes=self.nodes,
            clock=time.monotonic,
            scheduler=settings.scheduler_name,
            when=settings.nominate_ahead,
        )
        self.preemption = PreemptionCoordinator(client, self.state, self._intake, self.pods, settings, self.nominator)
        self.gangs = GangKeeper(client, self.state, clock=time.monotonic)
        self.placeholders = Placeholders(
            client, self.state, settings, pods=self.pods, nodes=self.nodes, recorder=self.preemption.recorder, clock=time.monotonic,
            wall=time.time,
        )  # fmt: skip
        self.preemption.on_no_single_gpu = self.placeholders.found_no_single_gpu
        self.metrics = Metrics(
            self.state,
            self.caches,
            evicted=self.preemption.evicted,
            nominations=self.nominator.counts,
            gang_failures=self.gangs.failed,
            unread_controllers=self.preemption.unread_controllers,
            placeholders=self.placeholders.counts,
        )
        binder = Binder(
            self.state, client, timeout_s=settings.bind_timeout_s, lifted=self.preemption.lifted,
            wait_s=settings.bind_timeout_s / 2,
        )  # fmt: skip
        snapshots = SnapshotWriter(partial(snapshot_of, self.state))
        self._verbs = Verbs(
            self.state, binder, self.preemption, self.gangs, self.metrics, snapshots, self.not_synced, self.placeholders
        )  # fmt: skip
        self._restarter = SchedulerRestarter(settings.scheduler_process)
        self._retrier = Retrier(client, self._waiting)
        if settings.preemption or settings.nominate_ahead != "never":  # else it may not nominate
            self.state.on_lapse = self._retrier.capacity_freed
        self._operations = Operations(
            Pages(self.metrics.registry, self.not_ready),
            settings.metrics_host,
            settings.metrics_port,
            refused=self.metrics.refused.of("metrics"),
        )
        self.metrics_port = self._operations.port
        self._socket = listen(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        self._intake.node_changed(old, new)
        self.nominator.node_changed(old, new)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        self.preemption.pod_changed(old, new)
        self.gangs.pod_changed(old, new)
        self.placeholders.pod_changed(old, new)

    def _shown(self) -> WatchProgress:
        return WatchProgress(self.pods.heard_s, self.pods.listed_s, self.pods.has)

    def _waiting(self) -> list[Pod]:
        """Pods that fit nowhere and have no reservation of any kind."""
        return [pod for pod in self.preemption.waiting() if pod.uid not in self.state.reservations]

    def caches(self) -> Mapping[str, CacheStatistics]:
        """What the caches have seen, by name."""
        return {
            "pods": self.pods.statistics(),
            "nodes": self.nodes.statistics(),
            **self.preemption.statistics(),
            **self.gangs.statistics(),
            **self.placeholders.statistics(),
        }

    def not_synced(self) -> str | None:
        """Which lists are not complete yet; placing pods without them would assign GPUs twice."""
        missing = [
            name for name, cache in (("nodes", self.nodes), ("pods", self.pods)) if not cache.has_synced.is_set()
        ]
        return Missing.CACHE.because(" and ".join(missing)) if missing else None

    def not_ready(self) -> str | None:
        """What is missing before kube-scheduler should call."""
        return Missing.STOPPING.because() if self.stopping.is_set() else self.not_synced()

    async def run(self) -> None:
        """Until `stopping` is set."""
        sys.setswitchinterval(SWITCH_S)
        verbs = Server(scheduler_app(self._verbs), VERBS, self.metrics.refused.of("scheduler"))
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(verbs.serve([self._socket]))
            rest = [
                group.create_task(part)
                for part in (
                    self._operations.run(),
                    self.pods.run(),
                    self.nodes.run(),
                    self.preemption.run(),
                    self.nominator.run(),
                    self.gangs.run(),
                    self.placeholders.run(),
                    self._housekeeping(),
                    collecting.keep_tidy(),
                    self._note_sync(),
                    self._restart_scheduler(),
                    self._retrier.run(),
                )
            ]
            log.info("serving", port=self.port, metrics_port=self.metrics_port)
            await self.stopping.wait()
            verbs.should_exit = True
            await asyncio.wait([serving])  # Bindings under way are completed first
            for task in rest:
                task.cancel()
        log.info("stopped")

    async def _note_sync(self) -> None:
        await self.nodes.has_synced.wait()
        await self.pods.has_synced.wait()
        collecting.set_aside()
        log.info(
            "synced",
            pods=len(self.pods),
            nodes=len(self.nodes),
            gpu_nodes=len(self.state.fleet),
            gpu_pods=len(self.state.allocations),
        )

    async def _restart_scheduler(self) -> None:
        """If pods may wait for a preempt call that failed. Without preemption, kube-scheduler repeats every call that fails."""
        if self.preemption.enabled:
            await self.nodes.has_synced.wait()
            await self.pods.has_synced.wait()
            await self.preemption.verb.informed.wait()
            await self._restarter.restart(len(self.preemption.waiting()), missed=self.preemption.verb.missed)

    async def _housekeeping(self) -> None:
        for round_ in count(1):
            await asyncio.sleep(HOUSEKEEPING_S)
            self.state.expire()
            self.gangs.expire()
            self.preemption.expire()
            self.nominator.expire()
            nodes = list(self.state.fleet.column)
            if nodes:
                self.state.allocations.recount(nodes[round_ % len(nodes)])


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    async with connect(settings.kubeconfig or None) as client:
        extender = Extender(settings, client)
        on_stop_signal(extender.stopping.set)
        await extender.run()
