"""docs/reference/policies.md explains every policy there is, with a picture of what the code does."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from docs.reference.policies.draw import SCENES, chosen, picture
from vgpu.api.names import DEFAULT_POLICY
from vgpu.scheduling.policies.registry import POLICIES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/reference/policies"
PAGE = (ROOT / "docs/reference/policies.md").read_text()


def test_every_policy_has_a_section_with_its_picture_and_no_other_has() -> None:
    assert re.findall(r"^## `(\w+)`$", PAGE, re.MULTILINE) == list(POLICIES) == list(SCENES)
    for policy in POLICIES:
        section = PAGE.split(f"## `{policy}`\n")[1].split("\n## ")[0]
        assert f"![{policy}](policies/{policy}.svg)" in section


@pytest.mark.parametrize("policy", POLICIES)
def test_a_picture_shows_what_the_code_does(policy: str) -> None:
    drawn = picture(policy)
    assert (FOLDER / f"{policy}.svg").read_text() == drawn, "run python -m docs.reference.policies.draw"
    assert drawn.count('class="pod"') == sum(len(chosen(scene, policy)) for scene in SCENES[policy]) > 0


def test_the_page_names_the_default_and_the_figures_for_it() -> None:
    assert f"The default is `{DEFAULT_POLICY}`." in PAGE
    with (ROOT / "bench/placement/openb.csv").open(newline="") as file:
        rows = {row["policy"]: row["allocation_at_100"] for row in csv.DictReader(file) if row["list"] == "default"}
    with (ROOT / "bench/placement/policies.csv").open(newline="") as file:
        cpu = {
            (row["nodes"], row["policy"]): float(row["cpu_p50_ms"])
            for row in csv.DictReader(file)
            if row["what"] == "place"
        }
    pair = ("binpack", "fragmentation")
    reported = {
        "allocation at 100 %, default list": [f"{float(rows[policy]):.2f}" for policy in pair],
        "processor time, 1,000 nodes, p50": [f"{cpu['1000', policy]:.1f} ms" for policy in pair],
        "processor time, 10,000 nodes, p50": [f"{cpu['10000', policy]:.2g} ms" for policy in pair],
    }
    for what, figures in reported.items():
        assert f"| {what} | {' | '.join(figures)} |" in PAGE


def test_the_page_says_how_many_restricted_pods_find_room() -> None:
    with (ROOT / "bench/placement/pools.csv").open(newline="") as file:
        rows = {row["fleet"]: row for row in csv.DictReader(file)}
    for fleet, row in rows.items():
        percents = [float(row[one]) for one in ("restricted_placed_percent_without", "restricted_placed_percent")]
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {fleet}: "))
        assert line.endswith(f" | {percents[0]:.0f} | {percents[1]:.0f} |")
