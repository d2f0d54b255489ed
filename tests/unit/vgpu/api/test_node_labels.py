"""What the labels of a node say of its GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import DEFAULT
from vgpu.api.node_labels import label_value, labels_of

ONE, OTHER = (f"GPU-{UUID(int=number)}" for number in (1, 2))
H200 = Gpu(ONE, 0, "NVIDIA H200", 143771, arch="hopper", mig_capable=True)
T4 = Gpu(OTHER, 1, "Tesla T4", 15360, arch="turing")
NODE = Inventory((H200,), driver="580.65.06", cuda="13.0")


def facts(inventory: Inventory) -> dict[str, str | None]:
    return {key.removeprefix("tangram.sh/gpu."): value for key, value in labels_of(inventory, DEFAULT).items()}


def test_a_node_says_what_its_gpus_are() -> None:
    assert facts(NODE) == {
        "model": "NVIDIA-H200", "count": "1", "memory": "143771", "driver": "580.65.06", "cuda": "13.0",
        "mig.capable": "true", "arch": "hopper",
    }  # fmt: skip


def test_gpus_that_differ_are_mixed_and_the_smallest_counts() -> None:
    mixed = facts(replace(NODE, gpus=(H200, T4)))
    assert (mixed["model"], mixed["arch"], mixed["memory"], mixed["count"]) == ("mixed", "mixed", "15360", "2")
    assert mixed["mig.capable"] == "true"
    assert facts(replace(NODE, gpus=(T4,)))["mig.capable"] == "false"


def test_an_unhealthy_gpu_counts() -> None:
    assert facts(replace(NODE, gpus=(replace(H200, healthy=False),)))["count"] == "1"


def test_a_node_without_gpus_has_none_of_the_labels() -> None:
    assert labels_of(replace(NODE, gpus=()), DEFAULT) == dict.fromkeys(DEFAULT.gpu_labels)


def test_what_is_not_reported_has_no_label() -> None:
    without = facts(Inventory((replace(H200, arch=""),)))
    assert (without["arch"], without["driver"], without["cuda"]) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [("NVIDIA RTX PRO 6000 (Server)", "NVIDIA-RTX-PRO-6000-Server"), ("x" * 62 + " y", "x" * 62), (" _", "")],
)
def test_a_text_is_cleaned_for_a_label(text: str, value: str) -> None:
    assert label_value(text) == value


@given(st.text())
def test_every_text_becomes_a_valid_value(text: str) -> None:
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", label_value(text))
