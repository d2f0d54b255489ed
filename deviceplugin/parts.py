"""The parts of the plugin, and how they know each other. `deviceplugin.app` runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import structlog

from deviceplugin.admission import DevicesSwapped, PreStart
from deviceplugin.calls_in_progress import CallsInProgress
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.devices_in_use import DevicesInUse
from deviceplugin.gpus.burst_annotation import BurstAnnotation
from deviceplugin.gpus.cdi_check import DEVICE, CdiCheck
from deviceplugin.gpus.cdi_file import CdiFile
from deviceplugin.gpus.cdi_source import CdiSource
from deviceplugin.gpus.cordon_watch import CordonWatch, OpenedGpus
from deviceplugin.gpus.driver_paths import DriverRoot
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
from deviceplugin.grants.container_ids import ContainerIds
from deviceplugin.grants.earlier_mounts import PreloadingPod, without_variables
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.grants.mount_check import MountCheck
from deviceplugin.metrics import Metrics
from deviceplugin.mig.declared_parts import declared_mig
from deviceplugin.mig.device_users import DeviceUsers
from deviceplugin.mig.instances import InstanceReplaced, MigInstances
from deviceplugin.mig.on_demand import MigOnDemand
from deviceplugin.mig.record import MigRecord
from deviceplugin.pod_resources import PodResources
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
from deviceplugin.upkeep import Upkeep
from kube import paths
from kube.cache import Cache
from kube.client import Client
from kube.events import Recorder
from kube.objects import Node as KubernetesNode
from kube.objects import Pod
from nvml.trials import Trier
from vgpu.api.inventory import Inventory, Orphan
from vgpu.api.node_labels import labels_of
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict
from vgpu.health.owners import Owners

COMPONENT: Final = "tangram-deviceplugin"

log = structlog.get_logger("deviceplugin")


class Parts:
    """Of one node's plugin. Each method makes those that need nothing but what is made before it, or is called later."""

    def __init__(self, settings: DevicePluginSettings, client: Client) -> None:
        self.settings, self._client, self._names = settings, client, settings.names
        self.calls = CallsInProgress()
        self._processes = PodProcesses(settings.proc_root, self.calls.yield_to_kubelet)
        self._make_pods_and_reports()
        self._make_records()
        self._make_starts()
        self._make_published()
        self._make_gpus()
        self._make_upkeep()

    def _make_pods_and_reports(self) -> None:
        """What is offered, the node's pods, and who is told what happens."""
        settings, names = self.settings, self._names
        client = self._client
        context_mib = settings.copier_context_mib if settings.host_pool else 0
        self.offer = Offer(names, settings.unit_mib, context_mib=context_mib, profiles=settings.mig_profiles)
        self.pods = NodePods(
            names, settings.unit_mib, frozenset(settings.latency_critical_namespaces), settings.burst_max if settings.burst_enabled else None,
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

    def _make_records(self) -> None:
        """Who has which devices, and what outlives this program."""
        settings, names = self.settings, self._names
        self.grants = GrantDirectories(settings.state_root, settings.library, until_idle=self.calls.until_idle)
        self.usage_records = UsageRecords(settings.state_root, self.grants.boot)
        self.grants.durability.afterwards.append(self.usage_records.begin_next)
        self.orphans = OrphanFinder(
            self.usage_records, self.pods, self._processes, self._orphans_changed, until_idle=self.calls.until_idle
        )  # fmt: skip
        self.ledger = DeviceLedger(
            self.pods, self.offer.inventory, names, orphans=self.orphans, users=self.usage_records.users, waiting=self._call_waits,
            names_numa=lambda: self.offer.names_numa,
        )  # fmt: skip
        self.records = PodResources(settings.pod_resources)
        self.offer.in_use = DevicesInUse(self.ledger, self.records, self.pods)

    def _make_starts(self) -> None:
        """What containers are given at their start, and is followed while they run."""
        settings, names = self.settings, self._names
        client = self._client
        self.bursts = BurstUpdater(
            self.pods, self.grants, self.offer.inventory, self.reports, self.calls.until_idle, settings.burst_overcommit
        )
        self.prestart = PreStart(
            names, settings.unit_mib, bursts=self.bursts, pods=self.pods, records=self.records, ledger=self.ledger, grants=self.grants,
            usage_records=self.usage_records, inventory=self.offer.inventory, fetch=partial(fetch_pod, client), over_limit_action=settings.guard_policy,
            clear=settings.clear_memory, gone_of=self.health_watch.gone_of, waiting=self._call_waits, names_numa=lambda: self.offer.names_numa,
        )  # fmt: skip
        self.status_watch = StatusWatch(settings.status, self.pods.pod, self.reports)
        self.class_updater = ServiceClassUpdater(self.pods, self.grants, self.reports, self.calls.until_idle)
        self.container_ids = ContainerIds(self.pods, self.grants, self.calls.until_idle)
        self.cdi_check = CdiCheck(self.reports, self._cdi_used, self.offer.changed_since)
        self.mount_check = MountCheck(
            self.pods, self.grants, self._processes, self.reports.misplaced, device=DEVICE, device_seen=self.cdi_check.started,
        )  # fmt: skip

    def _make_published(self) -> None:
        """What the API server and the kubelet see of the node."""
        settings, names = self.settings, self._names
        client = self._client
        self.host_pool = HostPoolWatch(
            settings.host_pool_status, self.grants.boot, settings.host_pool_request, self._fetch_node, self.reports.host_pool_missing, self.metrics.host_pool,
            settings.host_pool_report_s,
        )  # fmt: skip
        annotation = BurstAnnotation(settings, self.offer, self.pods, self.bursts, self.host_pool)
        self.numa = NumaWatch(settings, self.offer, self.pods, self.records)
        self.publisher = Publisher(
            client, settings.node_name, self.offer, lambda: {**annotation(), **self.numa.annotation()}, self._node_labels,
            settings.node_label_keys, self._node_seen,
            NodeTaint(client, settings.node_name, names, settings.taint_effect, self.offer.inventory, startup=settings.startup_taint),
        )  # fmt: skip
        self.host_pool.changed = self.numa.changed = self.publisher.check
        self.registration = KubeletRegistration(settings.device_plugins, self.offer, self._service)

    def _make_gpus(self) -> None:
        """NVML, and all that decides which GPUs pods get."""
        settings, client = self.settings, self._client
        self.nvml_service = NvmlService(settings, self.metrics)
        self.trier = Trier(
            settings.plugin_folder, settings.trial_program, settings.driver_root, report=_report_of_trial
        )
        self.slices = SliceWatch(client, settings.node_name)
        self.owner_watch = OwnerWatch(
            Owners(settings.selection, settings.clash_return_s), self.offer, self.records, self.slices, self.pods, labels=self.publisher.labels_seen,
            try_out=self.trier.try_out, until_idle=self.calls.until_idle,
        )  # fmt: skip
        self.metrics.owner_sources = lambda: self.owner_watch.failing
        self.cdi_source = CdiSource(
            settings.cdi_dir, self._driver_root, vendors=settings.cdi_specs == "auto", may_open=self._gpus_may_be_opened
        )
        self.cdi = CdiFile(
            settings.cdi_dir,
            lambda inventory: self.mig.described(inventory),
            self.cdi_source.document,
            self.cdi_source.stale,
        )
        self.mig = self._mig_on_demand()
        self.gpus = self._node_gpus()
        self.offer.slots, self.offer.unlisted = self.mig, self.reports.mig_profile_not_listed
        self.nvml_service.health = self.gpus.last_health
        opened = OpenedGpus(self.nvml_service.supervisor, settings.proc_root).of
        self.cordons = CordonWatch(
            self.offer, self.pods, self.orphans.still_using, settings.nvml_withheld, opened, self.trier.self_test if settings.self_test else None,
            self.gpus.self_tested, before_offer=self.owner_watch.before_back, untested=UntestedGpus(settings.untested_gpus), failed=self.gpus.health.failed_test,
        )  # fmt: skip
        for uuid, owed in self.cordons.load().items():
            if owed.failed:
                self.gpus.health.remember_failed(uuid, owed.failed, owed.since_s)
        self.offer.hold_back = self.cordons.hold_back
        self.publisher.before_write, self.publisher.shown = self.cordons.before_published, self.cordons.published
        users = DeviceUsers(self.pods, self.offer, self._names, self.records, self.ledger, self.orphans.still_using)
        self.declared = declared_mig(
            settings, self.gpus, self.offer, users, self.mig, opened, self.cordons, self.publisher, self.reports
        )
        self.earlier = EarlierInventory(self._names.inventory, self.gpus.remember, self.cordons.remember)
        self.metrics.readings = lambda: self.gpus.health.readings

    def _make_upkeep(self) -> None:
        """What is checked now and then."""
        settings, names = self.settings, self._names
        self.upkeep = Upkeep(
            names, records=self.records, pods=self.pods, ledger=self.ledger, grants=self.grants, usage_records=self.usage_records,
            orphans=self.orphans, removers=(self.reports.remover, self.reports.evictor), metrics=self.metrics, until_idle=self.calls.until_idle,
        )  # fmt: skip
        self.shared_gpus = SharedGpusFile(
            settings.shared_gpus, settings.nvml_released, self.offer, self.pods, self.grants.boot
        )

    def _node_gpus(self) -> NodeGpus:
        settings = self.settings
        return NodeGpus(
            self.offer, self.metrics, self.nvml_service.supervisor, access=settings.access, unit_mib=settings.unit_mib,
            health_s=settings.health_s, probe_s=settings.probe_s, on_inventory=self.cdi.write, prepare=self.mig.prepare,
            try_out=self.owner_watch.before_offer, placed=self._placed,
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
            holdings=lambda: self.records.holdings(self._names.domain), write_cdi=self.cdi.again, report=self.reports.mig_not_on_demand,
            idle_s=settings.mig_idle_s,
        )  # fmt: skip

    @contextmanager
    def _call_waits(self) -> Iterator[None]:
        """A call of the kubelet waits for news. If it is a pod, the kubelet has it from the API server, which answers again after an outage."""
        self.cache.catch_up()
        with self.calls.waiting():
            yield

    def _node_seen(self, node: KubernetesNode) -> None:
        self.cordons.node_seen(node.metadata.annotation(self._names.cordoned_gpus))
        self.earlier.seen(node)
        self.cdi_check.runtime(node.status.node_info.container_runtime_version)

    async def _fetch_node(self) -> KubernetesNode:
        return msgspec.json.decode(await self._client.get(paths.node(self.settings.node_name)), type=KubernetesNode)

    def _node_labels(self) -> Mapping[str, str | None]:
        facts = labels_of(self.offer.reported, self._names) if self.settings.node_labels else {}
        return dict.fromkeys(self._names.node_labels) | facts | (self.declared.label if self.declared else {})

    def _orphans_changed(self, orphans: tuple[Orphan, ...]) -> None:
        self.metrics.set_orphans(orphans)
        self.offer.set_orphans(orphans)

    def _service(self, resource: str) -> DevicePluginService:
        return DevicePluginService(
            resource, offer=self.offer, ledger=self.ledger, grants=self.grants, prestart=self._before_start,
            state_root=self.settings.state_root, observer=self.reports, answering=self.calls.answering, make_instances=self.mig.allocate,
        )  # fmt: skip

    async def _before_start(self, resource: str, ids: Sequence[str]) -> None:
        """A container that starts while the CDI specification is lost would not find its devices. Raises as `PreStart`, OSError."""
        await self.cdi.restore()
        self.mount_check.starting(await self.prestart(resource, ids))
        try:
            await self.mig.before_start(ids)
        except InstanceReplaced as error:
            raise DevicesSwapped(str(error), self._user_of(resource, ids)) from None

    def _user_of(self, resource: str, ids: Collection[str]) -> Pod | None:
        """The pod that these devices were entered for, before its container starts: the ledger of a plugin that started again lacks init containers."""
        uids = {uid for one, uid in self.usage_records.users(resource).items() if one in ids}
        return self.pods.pod(uids.pop()) if len(uids) == 1 else None

    def _cdi_used(self) -> bool:
        """Do containers of this node get GPUs as CDI devices, as far as is known by now?"""
        inventory = self.offer.inventory()
        return self.offer.probed and inventory.access == "cdi" and bool(inventory.gpus)

    def _driver_root(self) -> DriverRoot:
        return DriverRoot.below(self.settings.driver_root, self.settings.host_root)

    def _gpus_may_be_opened(self) -> bool:
        """By a program that is no process of NVML's: not while one is to be reset."""
        return not self.settings.nvml_released.exists() and not self.nvml_service.supervisor.withheld

    def _placed(self, inventory: Inventory) -> Inventory:
        """With where the driver is. NVIDIA's container runtime has a choice of its own. May wait for NVIDIA's tool."""
        if inventory.access != "cdi":
            return inventory
        self.cdi_source.refresh(inventory)
        root = self._driver_root()
        if root.place is None:
            return inventory
        before = self.offer.reported
        if (before.driver_root, before.driver_place) != (str(root.host), root.place.text):
            log.info("the driver was found", root=str(root.host), version=root.place.version, why=root.place.text)
        return replace(inventory, driver_root=str(root.host), driver_place=root.place.text)


def _report_of_trial(verdict: TrialVerdict, model: str, driver: str) -> None:
    write = log.info if verdict.outcome is TrialOutcome.WORKS else log.warning
    write(
        "tried whether the driver suspends", outcome=verdict.outcome, why=verdict.why, model=model, driver=driver,
        suspend_us=round(verdict.suspend_us), resume_us=round(verdict.resume_us),
    )  # fmt: skip
