"""docs/reference/requests.md and the code name the same things."""

from __future__ import annotations

import re
from pathlib import Path

from vgpu.api.names import (
    CLASSES,
    DEFAULT,
    DEFAULT_CLASS,
    DEFAULT_LEVEL,
    DEFAULT_OVER_LIMIT_ACTION,
    DEFAULT_POLICY,
    LEVELS,
    OVER_LIMIT_ACTIONS,
)
from vgpu.api.request import MOST_GPUS
from vgpu.scheduling.policies.registry import POLICIES
from webhook.admission_rules import AdmissionRules

PAGE = Path("docs/reference/requests.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """First cell -> cells, of the tables under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, flags=re.MULTILINE)
    return {key: [cell.strip() for cell in rest.split("|")] for key, rest in found}


def test_every_resource_has_a_row_and_every_row_a_resource() -> None:
    assert set(rows("Resources")) == {DEFAULT.gpu_mem, DEFAULT.gpu_core, DEFAULT.gpu, DEFAULT.mig("<profile>")}


def test_every_annotation_and_label_has_a_row_and_every_row_one_of_them() -> None:
    own = {DEFAULT.assignment, DEFAULT.inventory, DEFAULT.bursts, DEFAULT.gpus_of("<container>"), *DEFAULT.node_labels}
    own |= {
        DEFAULT.cordoned_gpus,
        DEFAULT.unhealthy_taint,
        DEFAULT.mig_config,
        DEFAULT.startup_taint,
        DEFAULT.placeholder_for,
    }
    assert set(rows("Annotations")) == DEFAULT.user_annotations | own


def test_every_row_has_a_meaning_a_range_a_default_and_an_example() -> None:
    for key, cells in (rows("Resources") | rows("Annotations")).items():
        if key in rows("Resources") or key in DEFAULT.user_annotations:
            assert len(cells) == 4, key
            assert all(cells), key


def test_ranges_and_defaults_are_those_of_the_code() -> None:
    table = rows("Annotations")
    assert table[DEFAULT.service_class][1] == ", ".join(f"`{name}`" for name in CLASSES)
    assert table[DEFAULT.service_class][2] == f"`{DEFAULT_CLASS}`"
    assert table[DEFAULT.level][1:3] == [f"{LEVELS[0]} to {LEVELS[-1]}", f"`{DEFAULT_LEVEL}`"]
    assert set(re.findall(r"`([^`]+)`", table[DEFAULT.placement][1])) == set(AdmissionRules().policies)
    assert set(AdmissionRules().policies) <= set(POLICIES)
    assert table[DEFAULT.placement][2] == f"`{DEFAULT_POLICY}`"
    assert table[DEFAULT.over_limit][1:3] == [
        ", ".join(f"`{name}`" for name in OVER_LIMIT_ACTIONS),
        f"`{DEFAULT_OVER_LIMIT_ACTION}`",
    ]
    assert table[DEFAULT.gpu_count][1].startswith(f"1 to {MOST_GPUS};")
    assert rows("Resources")[DEFAULT.gpu][1] == f"1 to {MOST_GPUS}"
