"""What the watch's pods mean: containers, unknown pods, pods that start, and drift between the records."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.allocation import DeviceRequest
from deviceplugin.drift import drift
from deviceplugin.gpus.offer import Offer
from deviceplugin.pod_resources import ContainerDevices, holders, naming
from deviceplugin.pods.node_pods import NodePods
from tests.builders import PodBuilder, pod
from tests.unit.deviceplugin.builders import inventory, node_pod, share, uuid
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import GpuCondition, Inventory
from vgpu.api.names import DEFAULT
from vgpu_pb import podresources_pb2 as pb

MEM, CORE = DEFAULT.gpu_mem, DEFAULT.gpu_core


def sharing(name: str, units: int = 4, gpu: int = 0) -> PodBuilder:
    return pod(name).asking(mib=units * 1024).on("n1").assigned(AssignedGpu(uuid(gpu), gpu, units * 1024))


def node_pods(*pods: PodBuilder) -> NodePods:
    made = NodePods(DEFAULT, 1024)
    for one in pods:
        made.on_change(None, one.build())
    return made


def test_pods_come_in_the_order_of_the_watch() -> None:
    made = node_pods(sharing("z"), sharing("a"), sharing("m"))
    assert [t.name for t in sorted(made.node_pods(), key=lambda t: t.order)] == ["z", "a", "m"]


def test_a_pod_that_is_finished_or_gone_is_no_pod() -> None:
    made = node_pods(sharing("a"), sharing("b"))
    made.on_change(sharing("a").build(), sharing("a").with_phase("Succeeded").build())
    made.on_change(sharing("b").build(), None)
    assert not made.node_pods()


def test_a_pod_made_again_under_its_name_is_another() -> None:
    from dataclasses import replace

    made = node_pods(sharing("a"))
    made.on_change(sharing("a").build(), replace(sharing("a", gpu=1), uid="uid-new").build())
    (only,) = made.node_pods()
    assert (only.uid, only.assignment.uuids("main")) == ("uid-new", (uuid(1),))


@pytest.mark.parametrize(
    ("built", "why"),
    [
        (pod("p").asking(mib=4096).on("n1"), "has no assignment: it was placed by tangram-scheduler"),
        (
            pod("p").asking(mib=4096).on("n1").assigned(text="{"),
            "annotation tangram.sh/assignment: assignment cannot be read",
        ),
        (pod("p").asking(mib=4096).on("n1").assigned(text='{"v":2}'), "version 2"),
        (pod("p").asking(mib=4096).on("n1").assigned(AssignedGpu(uuid(0), 0, 8192)), "is assigned 8192 MiB"),
        (pod("p").asking(mib=4096).on("n1").assigned(), "is assigned 0 GPUs and requests 1"),
    ],
)
def test_a_pod_that_cannot_be_served_has_a_reason_for_its_caller(built: PodBuilder, why: str) -> None:
    made = node_pods(built, sharing("good"))
    assert [t.name for t in made.node_pods()] == ["good"]
    reported = made.other_scheduler(DeviceRequest(MEM, 4)) or ""
    assert reported.startswith("pod default/p")
    assert why in reported
    assert made.other_scheduler(DeviceRequest(MEM, 5)) is None


def test_a_pod_whose_request_is_malformed_is_unreadable_and_no_crash() -> None:
    bad = pod("p").asking(core=30).on("n1")
    made = node_pods(bad)
    assert "without tangram.sh/gpu-mem" in (made.other_scheduler(DeviceRequest(CORE, 30)) or "")


def test_the_kubelets_records_name_the_pod_even_when_only_its_app_container_is_listed() -> None:
    held = [
        ContainerDevices("default", "a", "app", MEM, frozenset({"x-0", "x-1", "x-2"})),
        ContainerDevices("default", "b", "app", MEM, frozenset({"y-0"})),
        ContainerDevices("default", "b", "app", CORE, frozenset({"x-0"})),
    ]
    assert holders(held, MEM, ["x-2", "x-0", "x-1"]) == (("default", "a"), ("app",))
    assert holders(held, MEM, ["x-0", "x-1"]) == (("default", "a"), ())
    assert holders(held, MEM, ["z-0"]) == (None, ())


def test_drift_is_what_the_kubelet_counts_on_a_gpu_beyond_what_is_assigned_there() -> None:
    one = node_pod("a", 0, share("main", 4), on=[0])
    right = ContainerDevices("default", "a", "main", MEM, frozenset(f"{uuid(0)}-{slot}" for slot in range(4)))
    wrong = ContainerDevices("default", "a", "main", MEM, frozenset(f"{uuid(1)}-{slot}" for slot in range(4)))
    unknown = ContainerDevices("default", "nobody", "main", MEM, frozenset({f"{uuid(1)}-9"}))
    assert drift([right, unknown], [one], DEFAULT) == {}
    assert drift([wrong], [one], DEFAULT) == {(MEM, uuid(0)): -4, (MEM, uuid(1)): 4}


def test_a_started_pod_that_the_kubelet_does_not_list_is_drift() -> None:
    started = replace(node_pod("a", 0, share("main", 4), on=[0]), waiting=False)
    assert drift([], [started], DEFAULT) == {(MEM, uuid(0)): -4}
    assert drift([], [replace(started, leaving=True)], DEFAULT) == {}
    assert drift([], [replace(started, waiting=True)], DEFAULT) == {}


async def test_an_offer_reports_changes_only() -> None:
    offer = Offer(DEFAULT, 1024)
    offer.set_inventory(inventory(2))
    version = offer.version
    offer.set_inventory(inventory(2))
    offer.set_conditions({})
    assert offer.version == version
    waiting = asyncio.create_task(offer.changed_since(version))
    offer.set_conditions({uuid(1): (GpuCondition("OffTheBus", "unhealthy", 0),)})
    assert await waiting == offer.version == version + 1
    assert {d.uuid for d in offer.devices(MEM) if not d.healthy} == {uuid(1)}
    offer.set_conditions({})
    assert all(d.healthy for d in offer.devices(MEM))


async def test_a_profile_that_went_keeps_its_resource_without_devices() -> None:
    from vgpu.api.inventory import Gpu, MigInstance

    offer = Offer(DEFAULT, 1024)
    instance = MigInstance("MIG-00000000-0000-0000-0000-000000000001", "1g.10gb", 9728, 7, 0)
    offer.set_inventory(Inventory((Gpu(uuid(0), 0, "A100", 81920, mig=True, instances=(instance,)),)))
    assert [d.id for d in offer.devices(DEFAULT.mig("1g.10gb"))] == [instance.uuid]
    offer.set_inventory(Inventory((Gpu(uuid(0), 0, "A100", 81920),)))
    assert DEFAULT.mig("1g.10gb") in offer.resources()
    assert offer.devices(DEFAULT.mig("1g.10gb")) == ()


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=12), st.integers(0, 99))
def test_the_ledgers_view_is_what_a_fresh_list_would_show(steps: list[str], seed: int) -> None:
    rng, live, made = random.Random(seed), dict[str, PodBuilder](), NodePods(DEFAULT, 1024)
    for name in steps:
        old = live.pop(name, None)
        new = rng.choice(
            [None, sharing(name), sharing(name, gpu=1), pod(name).asking(mib=1024), sharing(name).with_phase("Failed")]
        )
        if new is not None:
            live[name] = new
        if old or new:
            made.on_change(old.build() if old else None, new.build() if new else None)
    fresh = node_pods(*live.values())
    assert {(t.name, t.assignment.uuids("main")) for t in made.node_pods()} == {
        (t.name, t.assignment.uuids("main")) for t in fresh.node_pods()
    }
    assert {u.pod.key for u in made.unreadable()} == {u.pod.key for u in fresh.unreadable()}


names = st.sampled_from([f"{uuid(gpu)}-{slot}" for gpu in range(2) for slot in (0, 1, 2, 12)])


@given(
    st.lists(st.dictionaries(st.sampled_from([MEM, CORE]), st.lists(names, max_size=5), max_size=2), max_size=4),
    st.lists(names, max_size=3),
    st.integers(0, 300),
)
def test_pods_that_name_a_device_are_found_in_the_encoded_answer_and_no_decoding_reports_more(
    pods: list[dict[str, list[str]]], ids: list[str], padding: int
) -> None:
    answer = pb.ListPodResourcesResponse()
    for number, held in enumerate(pods):
        one = answer.pod_resources.add(name=f"p{number}" + "x" * padding, namespace="default")
        container = one.containers.add(name="main")
        for resource, device_ids in held.items():
            container.devices.add(resource_name=resource, device_ids=device_ids)
    wanted = {i for i, held in enumerate(pods) if any(one in ids for part in held.values() for one in part)}
    found = naming(answer.SerializeToString(), ids)
    assert [pod for pod in answer.pod_resources if pod in found] == found
    assert wanted <= {i for i, pod in enumerate(answer.pod_resources) if pod in found}


def test_an_answer_with_an_unknown_field_is_decoded_as_a_whole() -> None:
    answer = pb.ListPodResourcesResponse()
    answer.pod_resources.add(name="p", namespace="default")
    of_tomorrow = b"\x10\x01" + answer.SerializeToString()
    assert [pod.name for pod in naming(of_tomorrow, ["x"])] == ["p"]
