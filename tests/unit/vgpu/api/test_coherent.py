"""Which GPUs' memory a process can use without the driver."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.codec import inventory_from_json, inventory_to_json
from vgpu.api.coherent import ATS, WITH_OWN_MEMORY, MemoryFacts, coherent_memory, why_whole_only
from vgpu.api.inventory import Gpu, Inventory

GH200 = MemoryFacts(addressing_mode=ATS, numa_node=None, numa_known=True, reports_memory=True, compute=(9, 0))
H200 = replace(GH200, addressing_mode=1)
GPU = Gpu("GPU-00000000-0000-0000-0000-000000000001", 0, "NVIDIA GH200 480GB", 97871)


@pytest.mark.parametrize(
    ("facts", "machine", "expected"),
    [
        pytest.param(H200, "x86_64", "", id="PCIe, HMM"),
        pytest.param(replace(H200, addressing_mode=None, numa_known=False), "x86_64", "", id="PCIe, R535"),
        pytest.param(replace(H200, addressing_mode=None), "aarch64", "", id="PCIe on arm64, R550"),
        pytest.param(replace(GH200, numa_node=2), "aarch64", "numa", id="GH200, NUMA mode"),
        pytest.param(replace(GH200, numa_node=0, addressing_mode=None), "aarch64", "numa", id="GH200, R550"),
        pytest.param(GH200, "aarch64", "driver", id="GH200, CDMM"),
        pytest.param(replace(GH200, compute=(10, 3)), "aarch64", "driver", id="GB300, CDMM"),
        pytest.param(replace(GH200, numa_known=False), "aarch64", "unknown", id="ATS, and no answer about the node"),
        pytest.param(replace(GH200, compute=(12, 1), reports_memory=False), "aarch64", "unified", id="GB10"),
        pytest.param(replace(GH200, compute=(12, 1)), "aarch64", "unknown", id="GB10 that reports the machine's memory"),
        pytest.param(replace(GH200, compute=(0, 0)), "aarch64", "unknown", id="ATS, and no compute capability"),
        pytest.param(replace(H200, addressing_mode=None, numa_known=False), "aarch64", "unknown", id="arm64, R535"),
    ],
)  # fmt: skip
def test_how_memory_is_part_of_the_machine(facts: MemoryFacts, machine: str, expected: str) -> None:
    assert coherent_memory(facts, machine) == expected


@given(
    st.builds(
        MemoryFacts, st.none() | st.integers(0, 3), st.none() | st.integers(0, 9), st.booleans(), st.booleans(),
        st.sampled_from(sorted(WITH_OWN_MEMORY)) | st.tuples(st.integers(0, 13), st.integers(0, 9)),
    ),
    st.sampled_from(["x86_64", "aarch64", "ppc64le"]),
)  # fmt: skip
def test_a_gpu_is_shared_only_if_nothing_speaks_against_it(facts: MemoryFacts, machine: str) -> None:
    shared = not replace(GPU, coherent=coherent_memory(facts, machine)).whole_only
    doubts = [
        facts.numa_node is not None,
        not facts.reports_memory,
        facts.addressing_mode == ATS and (not facts.numa_known or facts.compute not in WITH_OWN_MEMORY),
        facts.addressing_mode is None and not facts.numa_known and machine != "x86_64",
    ]
    assert shared == (not any(doubts))


def test_the_inventory_carries_it_and_is_else_as_earlier_versions_wrote_it() -> None:
    plain, coherent = Inventory((GPU,)), Inventory((replace(GPU, coherent="numa"),))
    assert "coherent" not in inventory_to_json(plain)
    assert inventory_from_json(inventory_to_json(coherent)) == coherent
    assert inventory_from_json(inventory_to_json(plain)) == plain


def test_a_way_that_a_later_plugin_names_is_not_shared() -> None:
    later = replace(GPU, coherent="cxl")
    assert later.whole_only
    assert later.shareable
    assert not later.offers_shares
    assert "cxl" in why_whole_only("cxl")
