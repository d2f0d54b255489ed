"""What the kubelet receives: counts, names and their limits."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.contract import devices, grant_for, grant_key, uuid_of
from vgpu.api.errors import BadDocument
from vgpu.api.grant import AssignedGpu, Assignment, GrantGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.mig_device import DEVICE_ID_LIMIT
from vgpu.api.names import DEFAULT

A, B = (f"GPU-{UUID(int=number)}" for number in (1, 2))
M = f"MIG-{UUID(int=3)}"


@given(st.lists(st.integers(0, 5000), max_size=4), st.sampled_from([256, 512, 1024]))
def test_every_gpu_offers_its_whole_units_once_and_ids_lead_back_to_it(sizes: list[int], unit_mib: int) -> None:
    gpus = tuple(Gpu(f"GPU-{UUID(int=row)}", row, "t4", mib) for row, mib in enumerate(sizes))
    offered = devices(Inventory(gpus, unit_mib=unit_mib), DEFAULT)
    assert len(offered[DEFAULT.gpu_mem]) == sum(mib // unit_mib for mib in sizes)
    assert len(offered[DEFAULT.gpu_core]) == 100 * len(sizes)
    assert len(offered[DEFAULT.gpu]) == len(sizes)
    for ids in offered.values():
        assert len({device.id for device in ids}) == len(ids)
        assert all(len(device.id) <= DEVICE_ID_LIMIT and uuid_of(device.id) == device.uuid for device in ids)


def test_a_gpu_in_mig_mode_offers_its_instances_only() -> None:
    mig = Gpu(A, 0, "h100", 81559, mig=True, healthy=False, numa=1, instances=(MigInstance(M, "1g.10gb", 9856, 7, 0),))
    offered = devices(Inventory((mig,)), DEFAULT)
    assert [(d.id, d.healthy, d.numa) for d in offered[DEFAULT.mig("1g.10gb")]] == [(M, False, 1)]
    assert not offered[DEFAULT.gpu_mem] + offered[DEFAULT.gpu_core] + offered[DEFAULT.gpu]


def test_a_gpu_that_is_given_whole_only_offers_no_units_and_no_percent() -> None:
    gpus = (Gpu(A, 0, "NVIDIA GH200 480GB", 97871, coherent="numa"), Gpu(B, 1, "NVIDIA L4", 23034))
    offered = devices(Inventory(gpus), DEFAULT)
    assert [device.id for device in offered[DEFAULT.gpu]] == [A, B]
    assert {device.uuid for device in offered[DEFAULT.gpu_mem] + offered[DEFAULT.gpu_core]} == {B}


def test_what_exists_on_a_gpu_with_instances_on_demand_is_not_offered_as_declared() -> None:
    instance = MigInstance(M, "1g.10gb", 9856, 7, 0, start=3)
    offered = devices(Inventory((Gpu(A, 0, "h100", 81559, mig=True, on_demand=True, instances=(instance,)),)), DEFAULT)
    assert not any(offered.values())


def test_a_slot_on_demand_is_its_own_uuid() -> None:
    assert uuid_of(f"{A}-1g.10gb.me-3") == f"{A}-1g.10gb.me-3"


@pytest.mark.parametrize(
    "text", ["", "GPU", f"{A}-", f"{A}-x", f"{A}-01", f"{A}-1-2", f"{M}-1", A.replace("0", "z"), f"{A}-{'1' * 30}"]
)
def test_a_device_id_that_is_none_of_ours_is_refused(text: str) -> None:
    with pytest.raises(BadDocument, match="is none of Tangram's"):
        uuid_of(text)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1), unique=True))
def test_a_grant_folder_depends_on_the_set_of_ids_and_not_on_their_order(ids: list[str]) -> None:
    assert grant_key(ids) == grant_key(reversed(ids))
    assert len(grant_key(ids)) == 32
    assert grant_key([*ids, "another\n"]) != grant_key(ids)


def test_a_container_without_a_share_gets_no_grant() -> None:
    assignment = Assignment({"main": (AssignedGpu(A, 0, 8, 30),), "whole": (AssignedGpu(B, 1, 8, 100, "whole"),)})
    assert grant_for(assignment, "main", namespace="n", pod="p", uid="u").gpus == (GrantGpu(A, 8, 30),)
    for name in ("whole", "ghost"):
        with pytest.raises(BadDocument, match=f"gives container {name} no share: it must be one of main"):
            grant_for(assignment, name, namespace="n", pod="p", uid="u")


@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True))
def test_an_annotation_name_stays_within_63_characters(container: str) -> None:
    name = DEFAULT.gpus_of(container).partition("/")[2]
    assert len(name) <= 63
    assert len(container) > 58 or name == f"gpus.{container}"


@given(st.text("abcdef0123456789", min_size=59, max_size=63))
def test_no_container_has_the_annotation_of_another_with_a_long_name(long: str) -> None:
    digest = DEFAULT.gpus_of(long).partition("/gpus.")[2]
    assert not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", digest), "a container may have this for its name"
    assert re.fullmatch(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?", f"gpus.{digest}"), "Kubernetes refuses this key"
