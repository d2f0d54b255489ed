"""Documents: what is written is read back, and what is damaged is refused as BadDocument or read as another sound document."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.codec import (
    assignment_from_json,
    assignment_to_json,
    grant_from_text,
    grant_to_text,
    inventory_from_json,
    inventory_to_json,
)
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.grant import AssignedGpu, Assignment, Grant, GrantGpu
from vgpu.api.inventory import Gpu, GpuCondition, Inventory, MigInstance, Orphan, withdraw
from vgpu.api.names import CLASSES, OVER_LIMIT_ACTIONS, OverLimitAction

A, B = (f"GPU-{UUID(int=number)}" for number in (1, 2))
M = f"MIG-{UUID(int=3)}"

NODE = Inventory(
    (
        Gpu(A, 0, "h100", 81559, numa=1, pci="0000:01:00.0", nvlinks={B: 18}),
        Gpu(B, 3, "h100", 81559, mig=True, healthy=False, instances=(MigInstance(M, "1g.10gb", 9856, 7, 0),)),
    ),
    unit_mib=512,
    access="nvidia",
    driver="580.65.06",
)
POD = Assignment(
    {
        "init": (AssignedGpu(A, 0, 512, 30),),
        "main": (AssignedGpu(A, 0, 1024), AssignedGpu(M, 3, 9856, 100, "mig", "1g.10gb")),
    },
    frozenset({"init"}),
    "best-effort",
    4,
)
GRANT = Grant("default", "pod", "uid-1", "main", (GrantGpu(A, 1024, 30), GrantGpu(B, 2048)), "latency-critical", 0)

READERS: list[tuple[Callable[[str], object], str]] = [
    (inventory_from_json, inventory_to_json(NODE)),
    (assignment_from_json, assignment_to_json(POD)),
    (grant_from_text, grant_to_text(GRANT)),
]
each_document = pytest.mark.parametrize(("read", "text"), READERS, ids=["inventory", "assignment", "grant"])

uuids = st.integers(0, 2**128 - 1).map(lambda number: f"GPU-{UUID(int=number)}")
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
assigned_gpus = st.builds(AssignedGpu, uuids, st.integers(0, 255), st.integers(0, 2**24 - 1), st.integers(0, 100))
gpus = st.lists(assigned_gpus, max_size=4, unique_by=lambda gpu: gpu.uuid).map(tuple)


def test_the_three_documents_come_back_as_they_went() -> None:
    assert inventory_from_json(inventory_to_json(NODE)) == NODE


def test_where_the_driver_is_comes_along_and_is_left_out_where_nobody_looked() -> None:
    placed = replace(
        NODE, driver_root="/run/nvidia/driver", driver_place="GPU Operator: it is the only place with a driver"
    )
    assert inventory_from_json(inventory_to_json(placed)) == placed
    assert "driver_" not in inventory_to_json(NODE)
    assert assignment_from_json(assignment_to_json(POD)) == POD
    assert list(assignment_from_json(assignment_to_json(POD)).containers) == ["init", "main"]
    assert grant_from_text(grant_to_text(GRANT)) == GRANT


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("mig", [True, False])
def test_an_extender_that_knows_no_withdrawals_gives_a_withdrawn_gpu_to_no_pod(healthy: bool, mig: bool) -> None:
    gpu = Gpu(A, 0, "h100", 81559, healthy=healthy, mig=mig)
    there = Gpu(B, 1, "h100", 81559, healthy=healthy, mig=mig)
    inventory = Inventory((withdraw(gpu, GpuCondition("Cordoned", "withdrawn", 7, "ECC errors")), there))
    text = inventory_to_json(inventory)
    assert [one["healthy"] for one in json.loads(text)["inventory"]["cards"]] == [False, healthy]
    assert inventory_from_json(text) == inventory


@given(st.dictionaries(names, gpus, max_size=4), st.sampled_from(CLASSES), st.integers(0, 4), st.data())
def test_any_assignment_comes_back_as_it_went(
    containers: dict[str, tuple[AssignedGpu, ...]], service_class: str, level: int, data: st.DataObject
) -> None:
    init = frozenset(name for name in containers if data.draw(st.booleans()))
    assignment = Assignment(containers, init, service_class, level)
    assert assignment_from_json(assignment_to_json(assignment)) == assignment


@given(
    names,
    names,
    names,
    st.dictionaries(uuids, st.tuples(st.integers(1, 2**24 - 1), st.integers(0, 100)), min_size=1, max_size=64),
    st.sampled_from(OVER_LIMIT_ACTIONS),
    st.booleans(),
)
def test_any_grant_comes_back_as_it_went(
    pod: str,
    uid: str,
    name: str,
    gpus: dict[str, tuple[int, int]],
    action: OverLimitAction,
    clear: bool,
) -> None:
    limits = tuple(GrantGpu(uuid, *each) for uuid, each in gpus.items())
    grant = Grant("ns", pod, uid, name, limits, over_limit_action=action, clear=clear)
    assert grant_from_text(grant_to_text(grant)) == grant


def test_a_grant_names_the_action_over_the_limit_only_where_it_is_not_the_default() -> None:
    assert "guard" not in grant_to_text(GRANT)
    assert "clear" not in grant_to_text(GRANT)
    text = grant_to_text(replace(GRANT, over_limit_action="kill", clear=True))
    assert text.splitlines()[5:8] == ["level 0", "guard kill", "clear yes"]
    spelled_out = grant_to_text(GRANT).replace("level 0\n", "level 0\nguard report\nclear no\n")
    assert grant_from_text(spelled_out) == GRANT


def test_a_long_name_in_a_damaged_document_is_quoted_by_its_ends() -> None:
    text = '{"v":1,"containers":{},"class":"standard","level":2,"init":["%s"]}' % ("9" * 5000)
    with pytest.raises(BadDocument) as found:
        assignment_from_json(text)
    message = str(found.value)
    assert len(message) < 1100
    assert message.startswith("assignment: init names")
    assert message.endswith("it must be one of its containers")


@each_document
def test_every_truncation_is_a_bad_document(read: Callable[[str], object], text: str) -> None:
    for length in range(len(text)):
        with pytest.raises(BadDocument):
            read(text[:length])


@each_document
@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_a_damaged_document_raises_nothing_but_bad_document(
    read: Callable[[str], object], text: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(text)))
    upto = data.draw(st.integers(at, min(len(text), at + 12)))
    put = data.draw(
        st.one_of(st.text(max_size=6), st.sampled_from(["9" * 5000, "-1", "null", "[" * 5000, "\ud800", "1e999"]))
    )
    message = ""
    try:
        read(text[:at] + put + text[upto:])
    except BadDocument as error:
        message = str(error)
    assert len(message) < 1500


@each_document
@given(st.text())
def test_garbage_is_a_bad_document(read: Callable[[str], object], text: str, garbage: str) -> None:
    with pytest.raises(BadDocument):
        read(garbage)


@each_document
def test_a_newer_version_is_named_as_such(read: Callable[[str], object], text: str) -> None:
    newer = text.replace('"v":1', '"v":7', 1).replace("tangram-grant 1", "tangram-grant 7")
    with pytest.raises(NewerVersion, match=r"of version '?7'?: this Tangram reads"):
        read(newer)


@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        ('"unit_mib":512', '"unit_mib":0', "unit_mib is 0: it must be one of 1024, 512, 256"),
        ('"index":3', '"index":0', "names index 0 twice"),
        ('"index":3', '"index":-1', "index is -1: it must be 0 to 255"),
        (f'"{M}"', f'"{A}"', "is no MIG UUID"),
        ('"mib":9856', '"mib":16777216', "mib is 16777216: it must be 0 to 16777215"),
        ('"mig":true', '"mig":false', "has 1 MIG instances: it must have 0 while its MIG mode is off"),
        ('"1g.10gb"', '"big"', "profile is 'big': it must be a MIG profile such as 1g.10gb"),
    ],
)
def test_an_unsound_inventory_is_refused_with_a_sentence(was: str, becomes: str, sentence: str) -> None:
    text = inventory_to_json(NODE)
    assert was in text
    with pytest.raises(BadDocument) as caught:
        inventory_from_json(text.replace(was, becomes))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        ('"init":["init"]', '"init":["other"]', "init names 'other': it must be one of its containers"),
        ('"core":30', '"core":101', "core is 101: it must be 0 to 100"),
        ('"core":30', '"cure":30', "unknown field `cure`"),
        ('"level":4', '"level":5', "level is 5: it must be 0 to 4"),
        ("best-effort", "royal", "class is 'royal': it must be one of latency-critical, standard, best-effort"),
        ('"kind":"mig"', '"kind":"half"', "'half'"),
        (f'"{M}"', f'"{A}"', "a GPU stands twice"),
    ],
)
def test_an_unsound_assignment_is_refused_with_a_sentence(was: str, becomes: str, sentence: str) -> None:
    text = assignment_to_json(POD)
    assert was in text
    with pytest.raises(BadDocument) as caught:
        assignment_from_json(text.replace(was, becomes))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        ("mib=1024", "mib=0", "grant line 7: mib is 0: it must be 1 to 16777215"),
        ("mib=1024", "mib=01024", "grant line 7: found"),
        ("core_percent=30", "core_percent=101", "core_percent is 101: it must be 0 to 100"),
        (f"card {B}", f"card {A}", "stands twice"),
        ("pod default/pod", "pod pod", "expected 'pod <namespace>/<name>'"),
        ("end\n", "end\n\n", "found text after 'end'"),
        ("level 0", "level 0\nguard shoot", "grant line 7: guard is 'shoot': it must be one of report, evict, kill"),
        ("level 0", "level 0\nguard ", "grant line 7: found 'guard ', expected 'guard <value>'"),
        ("level 0", "level 0\nguard kill\nguard report", "grant line 8: found 'guard report'"),
        ("level 0", "level 0\nclear maybe", "grant line 7: clear is 'maybe': it must be one of yes, no"),
        ("level 0", "level 0\nclear yes\nguard kill", "grant line 8: found 'guard kill'"),
        ("uid uid-1", "uid ", "grant line 3: found 'uid ', expected 'uid <value>'"),
    ],
)
def test_an_unsound_grant_is_refused_with_a_sentence(was: str, becomes: str, sentence: str) -> None:
    text = grant_to_text(GRANT)
    assert was in text
    with pytest.raises(BadDocument) as caught:
        grant_from_text(text.replace(was, becomes, 1))
    assert sentence in str(caught.value)


def test_a_name_that_would_forge_a_line_is_never_written() -> None:
    with pytest.raises(BadDocument):
        grant_to_text(Grant("a", "b", "c", "d\nlevel 0", GRANT.gpus))


ORPHAN = Orphan("uid-1", "default", "pod", (AssignedGpu(A, 0, 1024, 30),))


def test_a_reader_from_before_there_were_orphans_passes_over_them() -> None:
    """As inventory_from_json read the document then: the same fields, and whatever else there is."""
    then = msgspec.defstruct("Then", [("cards", list[Gpu]), ("unit_mib", int), ("access", str), ("driver", str)])
    document = msgspec.defstruct("Document", [("v", int), ("inventory", then)])
    read: Any = msgspec.json.decode(inventory_to_json(replace(NODE, orphans=(ORPHAN,))), type=document)
    assert (read.v, tuple(read.inventory.cards), read.inventory.driver) == (1, NODE.gpus, NODE.driver)
    assert "orphans" not in inventory_to_json(NODE)


@pytest.mark.parametrize(
    ("orphans", "why"),
    [
        ((replace(ORPHAN, uid=""),), "orphan default/pod: uid is ''"),
        ((replace(ORPHAN, pod="a b"),), "pod is 'a b': it must be 1 to 253 visible characters"),
        ((replace(ORPHAN, held=()),), "number of GPUs is 0: it must be 1 to 64"),
        ((replace(ORPHAN, held=(AssignedGpu(A, 0, -1),)),), "mib is -1: it must be 0 to"),
        ((replace(ORPHAN, held=(AssignedGpu("GPU-1", 0, 1),)),), "is no GPU UUID"),
        ((replace(ORPHAN, held=(AssignedGpu(M, 0, 1, 0, "mig", "x"),)),), "it must be a MIG profile"),
        ((replace(ORPHAN, held=(AssignedGpu(A, 0, 1, 0, "share", "1g.5gb"),)),), "it must be empty for kind share"),
        ((ORPHAN, ORPHAN), "inventory names orphan uid-1 twice"),
    ],
)
def test_an_orphan_that_cannot_be_is_refused_with_value_and_range(orphans: tuple[Orphan, ...], why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        inventory_from_json(inventory_to_json(replace(NODE, orphans=orphans)))


def test_more_orphans_than_a_reader_takes_are_not_written() -> None:
    many = tuple(replace(ORPHAN, uid=f"uid-{number}") for number in range(501))
    with pytest.raises(BadDocument, match="number of orphans is 501: it must be 0 to 500"):
        inventory_to_json(replace(NODE, orphans=many))
    assert inventory_from_json(inventory_to_json(replace(NODE, orphans=many[:500]))).orphans == many[:500]


SLOT = f"{B}-1g.10gb.me-3"
ON_DEMAND = Inventory(
    (
        Gpu(
            B,
            3,
            "h100",
            81559,
            mig=True,
            on_demand=True,
            instances=(MigInstance(M, "1g.10gb.me", 9856, 7, 0, start=3),),
        ),
    )
)


def test_a_gpu_with_instances_on_demand_comes_back_and_offers_none_of_them() -> None:
    read = inventory_from_json(inventory_to_json(ON_DEMAND))
    assert read == ON_DEMAND
    assert read.gpus[0].offered_instances == ()
    assert read.gpu(SLOT) is read.gpus[0]
    assert read.gpu(SLOT.replace(B, A)) is None


def test_without_instances_on_demand_the_text_is_as_earlier_versions_wrote_it() -> None:
    assert "on_demand" not in inventory_to_json(NODE)
    assert "start" not in inventory_to_json(NODE)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"mig":true', '"mig":false', "instances"),
        ('"start":3', '"start":100', "start is 100: it must be -1 to 99"),
        ('"start":3', '"start":-2', "start is -2: it must be -1 to 99"),
    ],
)
def test_an_inventory_with_impossible_instances_on_demand_is_refused(old: str, new: str, why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        inventory_from_json(inventory_to_json(ON_DEMAND).replace(old, new))


def test_instances_on_demand_need_mig_mode() -> None:
    text = inventory_to_json(Inventory((Gpu(B, 3, "h100", 81559, on_demand=True),)))
    with pytest.raises(BadDocument, match="MIG mode is off"):
        inventory_from_json(text)


def test_an_assignment_names_a_mig_slot_by_its_device_id() -> None:
    given = Assignment({"main": (AssignedGpu(SLOT, 3, 10194, kind="mig", profile="1g.10gb.me"),)})
    assert assignment_from_json(assignment_to_json(given)) == given
    assert [one.uuid for one in given.held()] == [SLOT]


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (AssignedGpu(SLOT, 3, 10194, kind="mig", profile="1g.10gb"), "it must be that of its slot"),
        (AssignedGpu(SLOT, 3, 10194), "is no GPU UUID"),
        (AssignedGpu(f"{B}-1g.10gb-x", 3, 10194, kind="mig", profile="1g.10gb"), "is no MIG UUID"),
    ],
)
def test_an_assigned_slot_that_contradicts_itself_is_refused(gpu: AssignedGpu, why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        assignment_from_json(assignment_to_json(Assignment({"main": (gpu,)})))
