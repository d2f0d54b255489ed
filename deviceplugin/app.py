"""Put the parts together and run them until SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import msgspec
import structlog

from deviceplugin.access import arbiters_reviews, reviewer
from deviceplugin.admission import DevicesSwapped, PreStart
from deviceplugin.calls_in_progress import CallsInProgress
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.devices_in_use import DevicesInUse
from deviceplugin.gpus import cdi
from deviceplugin.gpus.burst_annotation import BurstAnnotation
from deviceplugin.gpus.cordon_watch import CordonWatch, OpenedGpus
from deviceplugin.gpus.earlier import EarlierInventory
from deviceplugin.gpus.health_watch import HealthWatch
from deviceplugin.gpus.host_pool import HostPoolWatch, SharedGpusFile
from deviceplugin.gpus.node_gpus import NodeGpus
from deviceplugin.gpus.node_taint import NodeTaint
from deviceplugin.gpus.numa_watch import NumaWatch
from deviceplugin.gpus.nvml_service import NvmlService
from deviceplugin.gpus.offer import Offer
from deviceplugin.gpus.owner_watch import OwnerWatch
from deviceplugin.gpus.publish import Publisher
from deviceplugin.gpus.slice_watch import SliceWatch
from deviceplugin.gpus.untested import UntestedGpus
from deviceplugin.grants.atomic_file import make_folder
from deviceplugin.grants.container_ids import ContainerIds
from deviceplugin.grants.earlier_mounts import PreloadingPod, without_variables
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.grants.mount_check import MountCheck
from deviceplugin.metrics import Metrics
from deviceplugin.mig.instances import InstanceReplaced, MigInstances
from deviceplugin.mig.on_demand import MigOnDemand
from deviceplugin.mig.record import MigRecord
from deviceplugin.pod_resources import KubeletUnreachable, PodResources
from deviceplugin.pods.burst import BurstUpdater
from deviceplugin.pods.conditions import PodConditions
from deviceplugin.pods.node_pods import NodePods, fetch_pod
from deviceplugin.pods.orphan_finder import OrphanFinder
from deviceplugin.pods.pod_processes import PodProcesses
from deviceplugin.pods.service_class import ServiceClassUpdater
from deviceplugin.pods.status_watch import StatusWatch
from deviceplugin.pods.usage_records import UsageRecords
from deviceplugin.registration import KubeletRegistration
from deviceplugin.reports import Reports
from deviceplugin.service import DevicePluginService
from deviceplugin.settings import DevicePluginSettings
from deviceplugin.upkeep import Upkeep, restore
from kube import paths
from kube.cache import Cache
from kube.client import Client, connect
from kube.errors import ApiError
from kube.events import Recorder
from kube.objects import Node as KubernetesNode
from kube.objects import Pod
from nvml.trials import Trier
from observe import collecting
from observe.operations import Operations
from observe.pages import Pages
from observe.signals import on_stop_signal
from vgpu.api.inventory import Inventory, Orphan
from vgpu.api.node_labels import labels_of
from vgpu.api.readiness import Missing
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict
from vgpu.health.owners import Owners

SYNC_WAIT_S: Final = 10.0
"""How long the first list of pods may take before we register all the same: running containers have to be able to restart."""
INSTALL_RETRY_S: Final = 5.0
GRANTS_S: Final = 2.0
"""Between checks whether each grant is there. A check costs some microseconds a directory."""

EARLIER_S: Final = 5.0
"""How long the start waits for the node's annotations. Guessed: GPUs are offered all the same when the API server is away."""
COMPONENT: Final = "tangram-deviceplugin"
log = structlog.get_logger("deviceplugin")


async def run(settings: DevicePluginSettings) -> None:
    """Until SIGTERM or SIGINT. Raises NoClusterError, OSError when the metrics port is taken."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    async with connect(settings.kubeconfig) as client:
        plugin = DevicePlugin(settings, client)
        work = asyncio.create_task(plugin.run())
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not work.done():
            log.info("stopping")
            await asyncio.to_thread(plugin.nvml_service.close)  # first: a thread may wait for an answer of NVML
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work


class DevicePlugin:
    """One node's plugin."""

    def __init__(self, settings: DevicePluginSettings, client: Client) -> None:
        names, unit_mib = settings.names, settings.unit_mib
        self.settings, self._client, self._names = settings, client, names
        self.calls = CallsInProgress()
        processes = PodProcesses(settings.proc_root, self.calls.yield_to_kubelet)
        context_mib = settings.copier_context_mib if settings.host_pool else 0
        self.offer = Offer(names, unit_mib, context_mib=context_mib, profiles=settings.mig_profiles)
        self.pods = NodePods(
            names, unit_mib, frozenset(settings.latency_critical_namespaces), settings.burst_max if settings.burst_enabled else None,
        )  # fmt: skip
        self.metrics = Metrics(settings.node_name, self.offer.inventory, self.pods.node_pods)
        self.cache: Cache[Pod] = Cache(
            client, paths.PODS, PreloadingPod, on_change=self.pods.on_change, shrink=without_variables,
            field_selector=f"spec.nodeName={settings.node_name}",
        )  # fmt: skip
        self.pods.attach(self.cache.changed, self.cache.has_synced.is_set)
        self.recorder = Recorder(client, COMPONENT, settings.node_name)
        self.conditions = PodConditions(client, self.pods.pods, names)
        self.reports = Reports(
            client, settings.node_name, self.pods, self.recorder, self.metrics, self.conditions, lambda uid: self.status_watch.is_stranded(uid),
            lambda uid: self.health_watch.must_leave(uid),
        )  # fmt: skip
        self.health_watch = HealthWatch(self.offer, self.pods, settings.unhealthy_gpu_policy, self.reports)
        self.grants = GrantDirectories(settings.state_root, settings.library, until_idle=self.calls.until_idle)
        self.usage_records = UsageRecords(settings.state_root, self.grants.boot)
        self.grants.durability.afterwards.append(self.usage_records.begin_next)
        self.orphans = OrphanFinder(
            self.usage_records, self.pods, processes, self._orphans_changed, until_idle=self.calls.until_idle
        )  # fmt: skip
        self.ledger = DeviceLedger(
            self.pods, self.offer.inventory, names, orphans=self.orphans, users=self.usage_records.users, waiting=self._call_waits,
            names_numa=lambda: self.offer.names_numa,
        )  # fmt: skip
        self.records = PodResources(settings.pod_resources)
        self.offer.in_use = DevicesInUse(self.ledger, self.records, self.pods)
        self.bursts = BurstUpdater(
            self.pods, self.grants, self.offer.inventory, self.reports, self.calls.until_idle, settings.burst_overcommit
        )
        self.prestart = PreStart(
            names, unit_mib, bursts=self.bursts, pods=self.pods, records=self.records, ledger=self.ledger, grants=self.grants,
            usage_records=self.usage_records, inventory=self.offer.inventory, fetch=partial(fetch_pod, client), over_limit_action=settings.guard_policy,
            clear=settings.clear_memory, gone_of=self.health_watch.gone_of, waiting=self._call_waits, names_numa=lambda: self.offer.names_numa,
        )  # fmt: skip
        self.status_watch = StatusWatch(settings.status, self.pods.pod, self.reports)
        self.class_updater = ServiceClassUpdater(self.pods, self.grants, self.reports, self.calls.until_idle)
        self.container_ids = ContainerIds(self.pods, self.grants, self.calls.until_idle)
        self.mount_check = MountCheck(self.pods, self.grants, processes, self.reports.misplaced)
        self.host_pool = HostPoolWatch(
            settings.host_pool_status, self.grants.boot, settings.host_pool_request, self._fetch_node, self.reports.host_pool_missing, self.metrics.host_pool,
        )  # fmt: skip
        annotation = BurstAnnotation(settings, self.offer, self.pods, self.bursts, self.host_pool)
        self.numa = NumaWatch(settings, self.offer, self.pods, self.records)
        self.publisher = Publisher(
            client, settings.node_name, self.offer, lambda: {**annotation(), **self.numa.annotation()}, self._node_labels,
            settings.selection.label_keys, self._node_seen,
            NodeTaint(client, settings.node_name, names.unhealthy_taint, settings.taint_effect, self.offer.inventory),
        )  # fmt: skip
        self.host_pool.changed = self.numa.changed = self.publisher.check
        self.registration = KubeletRegistration(settings.device_plugins, self.offer, self._service)
        self.nvml_service = NvmlService(settings, self.metrics)
        self.trier = Trier(
            settings.plugin_folder, settings.trial_program, settings.driver_root, report=_report_of_trial
        )
        self.slices = SliceWatch(client, settings.node_name)
        self.owner_watch = OwnerWatch(
            Owners(settings.selection), self.offer, self.records, self.slices, self.pods, labels=self.publisher.labels_seen,
            try_out=self.trier.try_out, until_idle=self.calls.until_idle,
        )  # fmt: skip
        self.metrics.owner_sources = lambda: self.owner_watch.failing
        self.mig = self._mig_on_demand()
        self.gpus = self._node_gpus()
        self.offer.slots, self.offer.unlisted = self.mig, self.reports.mig_profile_not_listed
        self.nvml_service.health = self.gpus.last_health
        self.cordons = CordonWatch(
            self.offer, self.pods, self.orphans.still_using, settings.nvml_withheld,
            OpenedGpus(self.nvml_service.supervisor, settings.proc_root).of, self.trier.self_test if settings.self_test else None, self.gpus.self_tested,
            before_offer=self.owner_watch.before_back, untested=UntestedGpus(settings.untested_gpus), failed=self.gpus.health.failed_test,
        )  # fmt: skip
        for uuid, owed in self.cordons.load().items():
            if owed.failed:
                self.gpus.health.remember_failed(uuid, owed.failed, owed.since_s)
        self.offer.hold_back = self.cordons.hold_back
        self.earlier = EarlierInventory(self._names.inventory, self.gpus.remember, self.cordons.remember)
        self.metrics.readings = lambda: self.gpus.health.readings
        self.upkeep = Upkeep(
            names, records=self.records, pods=self.pods, ledger=self.ledger, grants=self.grants, usage_records=self.usage_records,
            orphans=self.orphans, removers=(self.reports.remover, self.reports.evictor), metrics=self.metrics, until_idle=self.calls.until_idle,
        )  # fmt: skip
        self.shared_gpus = SharedGpusFile(
            settings.shared_gpus, settings.nvml_released, self.offer, self.pods, self.grants.boot
        )
        self._installing = Missing.LIBRARY.because("not yet tried")

    def _node_gpus(self) -> NodeGpus:
        settings = self.settings
        return NodeGpus(
            self.offer, self.metrics, self.nvml_service.supervisor, access=settings.access, unit_mib=settings.unit_mib,
            health_s=settings.health_s, probe_s=settings.probe_s, on_inventory=self._write_cdi, prepare=self.mig.prepare,
            try_out=self.owner_watch.before_offer,
        )  # fmt: skip

    def _mig_on_demand(self) -> MigOnDemand:
        settings = self.settings
        record = MigRecord(settings.mig_folder, self.grants.boot)
        record.load()
        if record.damaged:
            log.error("no MIG instance is made or removed on this node", error=record.damaged)
        instances = MigInstances(
            self.nvml_service.supervisor.nvml, record, enabled=settings.mig_on_demand,
            count=lambda change: self.metrics.mig_changes.labels(change).inc(),
        )  # fmt: skip
        return MigOnDemand(
            instances, self.offer, self.pods, given=lambda: self.ledger.done, usage=self.usage_records,
            holdings=lambda: self.records.holdings(self._names.domain), write_cdi=self._write_cdi, report=self.reports.mig_not_on_demand,
            idle_s=settings.mig_idle_s,
        )  # fmt: skip

    async def run(self) -> None:
        """Until cancelled."""
        pages = Pages(self.metrics.registry, self.not_ready)
        review = reviewer(self._client) if self.settings.metrics_access == "review" else None
        operations = Operations(
            pages, self.settings.metrics_host, self.settings.metrics_port, review=review, refused=self.metrics.listeners.of("metrics"),
        )  # fmt: skip
        make_folder(self.settings.plugin_folder)
        self.nvml_service.start()
        try:
            async with asyncio.TaskGroup() as group:
                for part in (
                    operations.run,
                    self.cache.run,
                    self.recorder.run,
                    self.publisher.run,
                    self.nvml_service.run,
                    self.slices.run,
                    self._follow_gpus,
                    self.owner_watch.run,
                    self.health_watch.run,
                    self.cordons.run,
                    self.upkeep.run,
                    self.status_watch.run,
                    self.class_updater.run,
                    self.bursts.run,
                    self.container_ids.run,
                    self.mount_check.run,
                    self._to_kubelet,
                    self.numa.run,
                    self._keep_grants,
                    self._keep_tidy,
                    *([self.shared_gpus.run, self.host_pool.run] if self.settings.host_pool else []),
                    *([self.conditions.run] if self.settings.pod_conditions else []),
                    *([arbiters_reviews(self.settings, review)] if review else []),
                ):
                    group.create_task(part())
        finally:
            await asyncio.to_thread(self.nvml_service.close)
            await self.reports.close()
            await self.records.close()

    @contextmanager
    def _call_waits(self) -> Iterator[None]:
        """A call of the kubelet waits for news. If it is a pod, the kubelet has it from the API server, which answers again after an outage."""
        self.cache.catch_up()
        with self.calls.waiting():
            yield

    def not_ready(self) -> str:
        """Why this node cannot serve pods; empty when it can."""
        if self._installing:
            return self._installing
        if self.gpus.failing:
            return Missing.NVML.because(self.gpus.failing)
        if self.nvml_service.failing:
            return Missing.NVML_SOCKET.because(self.nvml_service.failing)
        if not self.offer.probed:
            return Missing.PROBE.because()
        if not self.cache.has_synced.is_set():
            return Missing.PODS.because()
        if self.owner_watch.unknown:
            return Missing.OWNERS.because(self.owner_watch.unknown)
        if self.publisher.failing:
            return Missing.INVENTORY.because(self.publisher.failing)
        return "" if self.registration.known else Missing.KUBELET.because()

    def _node_seen(self, node: KubernetesNode) -> None:
        self.cordons.node_seen(node.metadata.annotation(self._names.cordoned_gpus))
        self.earlier.seen(node)

    async def _follow_gpus(self) -> None:
        """What the plugin before this one published is read first, if the API server answers in time; else the publisher has it before it writes over it."""
        try:
            async with asyncio.timeout(EARLIER_S):
                self._node_seen(await self._fetch_node())
        except (ApiError, msgspec.MsgspecError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("what was published of this node before is not known yet", error=why)
        await self.gpus.run()

    async def _fetch_node(self) -> KubernetesNode:
        return msgspec.json.decode(await self._client.get(paths.node(self.settings.node_name)), type=KubernetesNode)

    def _node_labels(self) -> Mapping[str, str | None]:
        if self.settings.node_labels:
            return labels_of(self.offer.reported, self._names)
        return dict.fromkeys(self._names.gpu_labels)

    def _orphans_changed(self, orphans: tuple[Orphan, ...]) -> None:
        self.metrics.set_orphans(orphans)
        self.offer.set_orphans(orphans)

    async def _to_kubelet(self) -> None:
        await self._install()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.grants.sockets.run())
            group.create_task(self._serve_kubelet())

    async def _serve_kubelet(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SYNC_WAIT_S):
                await self.cache.has_synced.wait()
        self.publisher.check()  # the sums of limits are known now
        try:
            await restore(self.records, self.pods, self.ledger, self.grants, self.usage_records, self._names)
        except KubeletUnreachable as error:
            log.warning("what was allocated before this start is known from our own records only", error=str(error))
        self.offer.refresh()  # before the kubelet sees a device: what is in use is known now
        collecting.set_aside()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.orphans.run())
            group.create_task(self.mig.run())
            group.create_task(self.registration.run())

    async def _install(self) -> None:
        while True:
            try:
                path = self.grants.install()
                self.usage_records.load()
            except OSError as error:
                self._installing = Missing.LIBRARY.because(error)
                log.error("no share can be given without the library", error=self._installing, retry_s=INSTALL_RETRY_S)
                await asyncio.sleep(INSTALL_RETRY_S)
                continue
            self._installing = ""
            log.info("library installed", path=str(path))
            return

    def _service(self, resource: str) -> DevicePluginService:
        return DevicePluginService(
            resource, offer=self.offer, ledger=self.ledger, grants=self.grants, prestart=self._before_start,
            state_root=self.settings.state_root, observer=self.reports, answering=self.calls.answering, make_instances=self.mig.allocate,
        )  # fmt: skip

    async def _keep_tidy(self) -> None:
        await collecting.keep_tidy(self.calls.until_idle)

    async def _keep_grants(self) -> None:
        while True:
            await asyncio.sleep(GRANTS_S)
            await self.calls.until_idle()
            try:
                if back := await asyncio.to_thread(self.grants.put_back):
                    log.warning("what a container was granted was missing and is put back", paths=back)
                self.bursts.once()  # a file of it may be missing too, or a GPU have changed
            except OSError as error:
                log.error("what a container was granted cannot be put back", error=str(error), retry_s=GRANTS_S)

    async def _before_start(self, resource: str, ids: Sequence[str]) -> None:
        """A container that starts while the CDI specification is lost would not find its devices. Raises as `PreStart`, OSError."""
        inventory = self.offer.inventory()
        if inventory.access == "cdi" and not (self.settings.cdi_dir / cdi.SPEC_FILE).exists():
            await asyncio.to_thread(self._write_cdi, inventory)
        self.mount_check.starting(await self.prestart(resource, ids))
        try:
            await self.mig.before_start(ids)
        except InstanceReplaced as error:
            uid = next((uid for uid, _ in self.ledger.holders(resource, ids)), "")
            raise DevicesSwapped(str(error), self.pods.pod(uid)) from None

    def _write_cdi(self, inventory: Inventory) -> None:
        if inventory.access != "cdi" or not inventory.gpus:
            return
        root = cdi.DriverRoot(self.settings.driver_root, self.settings.host_root)
        described, aliases = self.mig.described(inventory)
        if cdi.write(self.settings.cdi_dir, described, root, aliases):
            log.info("CDI specification written", path=str(self.settings.cdi_dir / cdi.SPEC_FILE))


def _report_of_trial(verdict: TrialVerdict, model: str, driver: str) -> None:
    write = log.info if verdict.outcome is TrialOutcome.WORKS else log.warning
    write(
        "tried whether the driver suspends", outcome=verdict.outcome, why=verdict.why, model=model, driver=driver,
        suspend_us=round(verdict.suspend_us), resume_us=round(verdict.resume_us),
    )  # fmt: skip
