"""Put the parts of a declared MIG configuration together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from deviceplugin.gpus.cordon_watch import CordonWatch
from deviceplugin.gpus.node_gpus import NodeGpus
from deviceplugin.gpus.offer import Offer
from deviceplugin.gpus.publish import Publisher
from deviceplugin.mig.declared import DeclaredMig
from deviceplugin.mig.device_users import DeviceUsers
from deviceplugin.mig.mode_switch import ModeSwitch, switch_by_nvml
from deviceplugin.mig.on_demand import MigOnDemand
from deviceplugin.reports import Reports
from deviceplugin.settings import DevicePluginSettings
from vgpu.api.inventory import Gpu
from vgpu.health.cordons import Opened


def declared_mig(
    settings: DevicePluginSettings, gpus: NodeGpus, offer: Offer, users: DeviceUsers, on_demand: MigOnDemand, opened: Callable[[Collection[Gpu]], Opened],
    cordons: CordonWatch, publisher: Publisher, reports: Reports,
) -> DeclaredMig | None:  # fmt: skip
    """None where no file of layouts is set."""
    if settings.mig_config_file is None:
        return None
    record, root = on_demand.record, settings.driver_root
    switch = ModeSwitch(
        settings.mig_mode_idle_s, opened=opened, switch=partial(switch_by_nvml, root), changed=cordons.check
    )
    cordons.withheld_by_others = lambda: switch.withheld
    return DeclaredMig(
        settings.mig_config_file, gpus.nvml, offer, users, labels=publisher.labels_seen, slots=lambda uuid: record.of_gpu(uuid).keys(),
        on_demand=settings.mig_on_demand, switch=switch, probe=gpus.probe_soon, published=publisher.check, report=reports.mig_config,
    )  # fmt: skip
