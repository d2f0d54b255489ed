"""The node annotation that names cordoned GPUs: written and read back, and refused if it is not understood in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import cordoned, gpu, mig_gpu
from vgpu.api.codec import inventory_from_json, inventory_to_json
from vgpu.api.cordon import MOST_REASON, Cordon, cordons_from_json, cordons_to_json, with_cordons
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.inventory import MOST_GPUS_OF_A_NODE, Inventory

UUID = gpu(0).uuid
REASONS = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=MOST_REASON)


@given(st.dictionaries(st.uuids().map("GPU-{}".format), st.builds(Cordon, REASONS, st.integers(0, 2**53 - 1))))
def test_what_is_written_is_read_back(cordons: dict[str, Cordon]) -> None:
    text = cordons_to_json(cordons)
    assert cordons_from_json(text) == cordons
    assert (text is None) == (not cordons), "without a cordon there is no annotation"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated"),
        ("[]", "object"),
        ('{"v":1}', "gpus"),
        ('{"v":0,"gpus":{}}', "version 0"),
        ('{"v":1,"gpus":{},"more":1}', "more"),
        ('{"v":1,"gpus":{"0":{}}}', "'0': it must be the UUID of a GPU"),
        (f'{{"v":1,"gpus":{{"{UUID.replace("GPU-", "MIG-")}":{{}}}}}}', "it must be the UUID of a GPU"),
        (f'{{"v":1,"gpus":{{"{UUID}":{{"reason":"a\\nb"}}}}}}', "one line"),
        (f'{{"v":1,"gpus":{{"{UUID}":{{"reason":"{"x" * (MOST_REASON + 1)}"}}}}}}', "at most 200"),
        (f'{{"v":1,"gpus":{{"{UUID}":{{"since_s":-1}}}}}}', "since_s"),
        ("[" * 100_000, "list of cordoned GPUs"),
    ],
)
def test_what_is_not_understood_in_full_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadDocument, match=why):
        cordons_from_json(text)


def test_a_newer_document_says_so() -> None:
    with pytest.raises(NewerVersion, match="version 2: this program reads up to 1"):
        cordons_from_json('{"v":2,"cards":[]}')


def test_no_more_gpus_are_named_than_a_node_has() -> None:
    many = {gpu(at).uuid: Cordon() for at in range(MOST_GPUS_OF_A_NODE + 1)}
    with pytest.raises(BadDocument, match=f"it may name {MOST_GPUS_OF_A_NODE}"):
        cordons_to_json(many)


def test_a_named_gpu_is_cordoned_and_what_its_plugin_withdraws_stays_withdrawn() -> None:
    testing, cut = cordoned(gpu(1), "testing"), mig_gpu(2, "1g.10gb")
    inventory = Inventory((gpu(0), testing, cut))
    found = with_cordons(inventory, {one.uuid: Cordon() for one in (gpu(0), testing, cut)})
    assert [one.cordon for one in found.gpus] == ["cordoned", "testing", "cordoned"]
    assert not any(one.offered or one.shareable or one.offered_instances for one in found.gpus)
    assert with_cordons(inventory, {}) is inventory


def test_an_inventory_carries_cordons_and_is_as_before_without() -> None:
    inventory = Inventory((cordoned(gpu(0, healthy=False), "released"), gpu(1)))
    text = inventory_to_json(inventory)
    assert inventory_from_json(text) == inventory
    assert text.count('"Released"') == 1
