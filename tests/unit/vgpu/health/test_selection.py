"""Selectors of GPUs: what they match, and what a mistake in one says."""

from __future__ import annotations

import pytest

from vgpu.api.inventory import Gpu
from vgpu.health.selection import selection_from_list

UUIDS = [f"GPU-{at:08x}-0000-4000-8000-000000000000" for at in range(4)]
GPUS = [
    Gpu(UUIDS[0], 0, "NVIDIA A100-SXM4-80GB", 81920),
    Gpu(UUIDS[1], 1, "NVIDIA A100-SXM4-80GB", 81920),
    Gpu(UUIDS[2], 2, "NVIDIA H100 80GB HBM3", 81559),
    Gpu(UUIDS[3], 10, "Tesla T4", 15360),
]


def selected(*selectors: str, labels: dict[str, str] | None = None) -> list[int]:
    selection = selection_from_list(selectors)
    return [gpu.index for gpu in GPUS if selection.has(gpu, labels or {})]


@pytest.mark.parametrize(
    ("selectors", "indexes"),
    [
        (["all"], [0, 1, 2, 10]),
        (["index=1"], [1]),
        (["index=1-9"], [1, 2]),
        (["index=0", "index=10"], [0, 10]),
        ([f"uuid={UUIDS[2]}"], [2]),
        (["model=tesla t4"], [10]),
        (["model=*A100*"], [0, 1]),
        (["model=NVIDIA *"], [0, 1, 2]),
        (["model=A100"], []),
        (["model=*A100* & index=1"], [1]),
        (["model=*A100*&index=2"], []),
        (["label=pool"], []),
    ],
)
def test_a_list_selects_the_gpus_that_any_selector_matches_in_all_its_terms(
    selectors: list[str], indexes: list[int]
) -> None:
    assert selected(*selectors) == indexes


def test_a_label_of_the_node_turns_a_selector_on() -> None:
    selectors = ["label=example.com/pool=small & index=0", "label=all-ours"]
    assert selected(*selectors) == []
    assert selected(*selectors, labels={"example.com/pool": "small"}) == [0]
    assert selected(*selectors, labels={"example.com/pool": "large"}) == []
    assert selected(*selectors, labels={"all-ours": ""}) == [0, 1, 2, 10]
    assert selected("label=pool=", labels={"pool": ""}) == [0, 1, 2, 10]
    assert selection_from_list(selectors).label_keys == {"example.com/pool", "all-ours"}


def test_a_dot_in_a_model_is_a_dot() -> None:
    assert not selection_from_list(["model=T.4"]).has(Gpu(UUIDS[0], 0, "TX4", 1), {})


@pytest.mark.parametrize(
    "selector",
    [
        "", "ALL", "all ", "all &", "index=", "index=-1", "index=2-1", "index=0,1", "index=0x1", "index=1234", "uuid=GPU-1", "uuid=", "model=", "label=",
        "label==x", "label=a b", "label=pool=a b", "MIG-00000000-0000-4000-8000-000000000000", f"uuid=MIG{UUIDS[0][3:]}", UUIDS[0], "0", "none",
    ],
)  # fmt: skip
def test_a_mistake_names_the_selector_and_what_is_allowed(selector: str) -> None:
    if selector == "all ":  # spaces around a term do not count
        assert selected(selector) == [0, 1, 2, 10]
        return
    with pytest.raises(ValueError, match="must be one of all, uuid=UUID, index=N, index=N-M, model=PATTERN") as refused:
        selection_from_list(["all", selector])
    assert repr(selector) in str(refused.value)


@pytest.mark.parametrize("count", [0, 65])
def test_the_list_has_1_to_64_selectors(count: int) -> None:
    with pytest.raises(ValueError, match=f"has {count} selectors: it must have 1 to 64"):
        selection_from_list(["all"] * count)
