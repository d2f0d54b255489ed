"""The annotation about alignment, and the kubelet's configuration that it is made from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.numa import (
    DeviceCount,
    KubeletTopology,
    NumaFacts,
    NumaNode,
    facts_from_json,
    facts_to_json,
    kubelet_topology,
)

FACTS = NumaFacts(1, "restricted", "pod", (NumaNode(0, 8, 2, (10, 20)), NumaNode(1, 8, 8)), True, True, {"nic": (DeviceCount(1, 2, 1),)}, ("u",), "why")  # fmt: skip


def test_what_is_written_is_read() -> None:
    assert facts_from_json(facts_to_json(FACTS)) == FACTS
    few = NumaFacts(1, "single-numa-node", "container", (NumaNode(0),))
    assert facts_from_json(facts_to_json(few)) == few


def test_a_later_version_is_not_guessed() -> None:
    with pytest.raises(NewerVersion, match="version 2"):
        facts_from_json(facts_to_json(FACTS).replace('"v":1', '"v":2'))


@pytest.mark.parametrize(
    ("was", "written", "why"),
    [
        (
            '"restricted"',
            '"best-effort"',
            "the policy is 'best-effort': it must be one of restricted, single-numa-node",
        ),
        ('"pod"', '"node"', "the scope is 'node'"),
        ('"id":1', '"id":0', "2 NUMA nodes: there must be 1 to 64, each once"),
        ('"id":1', '"id":64', "each must be 0 to 63"),
        ('"free":2', '"free":9', "fewer CPUs than are free"),
        ('"free":1', '"free":3', "fewer devices than are free"),
        ('"nodes":[', '"nodes":[7,', "cannot be read"),
        ('"numa":1', '"numa":-1', r"devices on NUMA node -1, and the machine has NUMA nodes \[0, 1\]"),
        ('"numa":1', '"numa":2', r"devices on NUMA node 2, and the machine has"),
        ('"nic"', '"tangram.sh/gpu-mem"', "a resource under tangram.sh"),
        ('"v":1', '"more":' + "[" * 100_000 + "]" * 100_000 + ',"v":1', "cannot be read: "),
    ],
)
def test_what_cannot_be_is_refused(was: str, written: str, why: str) -> None:
    text = facts_to_json(FACTS)
    assert was in text
    with pytest.raises(BadDocument, match=why):
        facts_from_json(text.replace(was, written))


@given(st.text() | st.binary().map(lambda some: some.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(BadDocument):
        facts_from_json(text)


def test_fields_that_are_not_set_are_the_kubelets_defaults() -> None:
    assert kubelet_topology({}) == KubeletTopology("none", "container", False, False, "")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"memoryManagerPolicy": "Static"}, "the memory manager's policy is Static"),
        ({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"align-by-socket": "true"}}, "align-by-socket"),
        ({"featureGates": {"PodLevelResourceManagers": True}}, "PodLevelResourceManagers"),
        ({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"full-pcpus-only": "true"}}, ""),
    ],
)
def test_what_is_not_predicted_is_said(fields: dict[str, Any], why: str) -> None:
    found = kubelet_topology({"topologyManagerPolicy": "restricted", **fields}).unpredictable
    assert why in found
    assert bool(found) is bool(why)


def test_options_of_topology_manager() -> None:
    found = kubelet_topology(
        {
            "topologyManagerPolicy": "restricted", "topologyManagerScope": "pod", "cpuManagerPolicy": "static",
            "topologyManagerPolicyOptions": {"prefer-closest-numa-nodes": "true", "max-allowable-numa-nodes": "16"},
        }
    )  # fmt: skip
    assert found == KubeletTopology("restricted", "pod", True, True, "")


@pytest.mark.parametrize(
    "fields", [{"topologyManagerPolicy": "strict"}, {"featureGates": ["a"]}, {"cpuManagerPolicy": 3}]
)
def test_a_configuration_that_no_kubelet_would_take(fields: dict[str, Any]) -> None:
    with pytest.raises(BadDocument, match="kubelet configuration: "):
        kubelet_topology(fields)
