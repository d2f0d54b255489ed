"""Who has a GPU or a MIG instance: each record counts, and what cannot be read may be anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.device_users import DeviceUsers, Users, UsersUnknown
from deviceplugin.pod_resources import ContainerDevices
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.usage_records import UsageRecord
from kube.objects import Pod
from tests.builders import gpu, mig_gpu, pod, share
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory, Orphan
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

ONE = gpu(0)
CUT = mig_gpu(1, "1g.10gb", "2g.20gb")
SMALL, LARGE = (one.uuid for one in CUT.instances)


@dataclass
class Known:
    """What the records of a node say."""

    synced: bool = True
    listed: list[ContainerDevices] = field(default_factory=list)
    gone: list[UsageRecord] = field(default_factory=list)
    done: dict[str, dict[tuple[str, str], frozenset[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pods, self.offer = NodePods(DEFAULT, 1024), Offer(DEFAULT, 1024)
        self.pods.attach(self._no_change, lambda: self.synced)
        self.offer.set_inventory(Inventory((ONE, CUT)))

    async def _no_change(self) -> None:
        return

    async def holdings(self, domain: str) -> Sequence[ContainerDevices]:  # noqa: ARG002
        return self.listed

    def have(self, made: Pod) -> None:
        self.pods.on_change(None, made)

    async def users(self) -> Users:
        return await DeviceUsers(self.pods, self.offer, DEFAULT, self, self, lambda: self.gone).read()


def instance(uuid: str) -> AssignedGpu:
    return AssignedGpu(uuid, 1, 9_728, kind="mig", profile="1g.10gb")


async def test_a_pod_that_waits_has_what_it_was_assigned() -> None:
    known = Known()
    known.have(pod("a").asking(mig="1g.10gb").on("n1").assigned(instance(SMALL)).build())
    known.have(pod("b").asking(mib=1024).on("n1").assigned(share(ONE, 1024)).build())
    users = await known.users()
    assert users.of_instance(SMALL) == "pod default/a"
    assert users.of_gpu(ONE.uuid) == "pod default/b"
    assert (users.of_instance(LARGE), users.of_gpu(CUT.uuid)) == ("", "")


async def test_what_the_kubelet_lists_counts_until_the_pod_is_known_to_have_ended() -> None:
    known = Known(listed=[ContainerDevices("default", "a", "main", "r", frozenset({LARGE}))])
    assert (await known.users()).of_instance(LARGE) == "pod default/a"
    known.have(pod("a").asking(mig="2g.20gb").on("n1").assigned(instance(LARGE)).with_phase("Succeeded").build())
    assert (await known.users()).of_instance(LARGE) == ""


@pytest.mark.parametrize("tail", ["", "-000f", "::1"])
async def test_parts_and_replicas_of_a_gpu_are_use_of_it_and_slots_of_mig_on_demand_are_not(tail: str) -> None:
    known = Known(listed=[ContainerDevices("default", "a", "main", "r", frozenset({ONE.uuid + tail}))])
    assert (await known.users()).of_gpu(ONE.uuid) == "pod default/a"
    slot = slot_device(ONE.uuid, MigSlot(6, "1g.10gb"))
    known.listed = [ContainerDevices("default", "a", "main", "r", frozenset({slot}))]
    assert (await known.users()).of_gpu(ONE.uuid) == ""


async def test_pods_that_left_the_api_while_their_processes_run_count() -> None:
    known = Known(gone=[UsageRecord("uid", "default", "g", (instance(SMALL),))])
    known.offer.set_orphans((Orphan("uid-2", "default", "o", (instance(LARGE),)),))
    users = await known.users()
    assert users.of_instance(SMALL) == "pod default/g, deleted by force"
    assert users.of_instance(LARGE) == "pod default/o, deleted by force"


async def test_what_the_plugin_allocated_counts_before_the_kubelet_lists_it() -> None:
    known = Known()
    made = pod("a").asking(mig="1g.10gb").on("n1").assigned(instance(SMALL)).build()
    known.have(made)
    known.done = {made.uid: {("main", "r"): frozenset({LARGE})}}
    assert (await known.users()).of_instance(LARGE) == "pod default/a"


async def test_an_assignment_that_cannot_be_read_and_pods_that_are_not_known_leave_nothing_free() -> None:
    known = Known()
    known.have(pod("a").asking(mig="1g.10gb").on("n1").assigned(text="{").build())
    with pytest.raises(UsersUnknown, match="default/a"):
        await known.users()
    with pytest.raises(UsersUnknown, match="not known"):
        await Known(synced=False).users()
