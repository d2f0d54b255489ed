"""docs/concepts: the pages say what the chart's defaults are, and the picture is the one that its program draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from docs.concepts import draw, draw_elastic
from vgpu.api.names import CLASSES
from vgpu.memory.swap.settings import SwapSettings
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.reservations import KINDS

ROOT: Final = Path(__file__).resolve().parents[2]
CONCEPTS: Final = ROOT / "docs/concepts"
VALUES: Final[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/helm/tangram/values.yaml").read_text())


def first_cells(page: str) -> list[str]:
    """The first cell of each row of the page's tables."""
    lines = (CONCEPTS / page).read_text().splitlines()
    return [line.split("|")[1].strip() for line in lines if line.startswith("|")]


def test_the_picture_of_gpu_time_is_the_one_that_is_drawn() -> None:
    assert draw.PICTURE.read_text() == draw.picture(), "run python -m docs.concepts.draw"


def test_the_picture_of_elastic_memory_is_the_one_that_is_drawn() -> None:
    assert draw_elastic.PICTURE.read_text() == draw_elastic.picture(), "run python -m docs.concepts.draw_elastic"


def test_the_times_of_elastic_memory_are_those_of_the_policy() -> None:
    page, swap = " ".join((CONCEPTS / "elastic-memory.md").read_text().split()), SwapSettings()
    change_s = 16e9 / swap.bytes_per_s + swap.overhead_s
    quantum_s = max(swap.quantum_least_s, change_s / swap.swap_part)
    assert f"divided by {swap.bytes_per_s / 1e9:g} GB/s, and {swap.overhead_s:g} s: {change_s:.2f} s for 16 GB" in page
    assert f"{1 / swap.swap_part:g} times a change, and at least {swap.quantum_least_s:g} s: {quantum_s:.1f} s" in page
    assert f"After {swap.starve_after_s:g} s it gets the next quantum" in page
    assert f"does not give way within {swap.reclaim_timeout_s:g} s" in page
    assert f"memory that is away, for {swap.stranded_after_s:g} s" in page


def test_with_default_values_no_pod_gets_a_priority_and_the_page_says_so() -> None:
    page = (CONCEPTS / "preemption.md").read_text()
    priorities = VALUES["priorityClasses"]
    assert (priorities["enabled"], priorities["assign"]) == (True, False)
    assert "**With default values a latency-critical pod evicts nobody.**" in page
    named = zip(CLASSES, (priorities[one] for one in ("latencyCritical", "standard", "bestEffort")), strict=True)
    assert all(f"`tangram-{service_class}` ({priority})" in page for service_class, priority in named)


def test_the_bounds_of_preemption_are_the_charts() -> None:
    page = " ".join((CONCEPTS / "preemption.md").read_text().split())
    preemption = VALUES["scheduler"]["preemption"]
    assert preemption["periodSeconds"] == 3600
    assert f"preempted at most {preemption['timesPerPod']} times an hour" in page
    assert f"for at most {preemption['reservationSeconds']} s (`scheduler.preemption.reservationSeconds`)" in page


def test_the_times_of_gpu_time_are_the_charts() -> None:
    page = " ".join((CONCEPTS / "gpu-time.md").read_text().split())
    time = VALUES["arbiter"]["time"]
    assert f"it earns {time['frameMs'] * 30 // 100} ms in each frame of {time['frameMs']} ms" in page
    assert f"a grace period of {time['idleGraceUs'] / 1000:g} ms" in page
    assert time["starveAfterMs"] == 1000
    assert f"has waited for one second with work gets a slice of {time['starveSliceMs']} ms" in page


def test_every_policy_and_every_kind_of_reservation_has_a_row() -> None:
    cells = first_cells("placement.md")
    assert [cell.split("`")[1] for cell in cells if cell.startswith("`")] == list(POLICIES)
    assert sorted(cell for cell in cells if cell in KINDS) == sorted(KINDS)


def test_the_glossary_is_in_alphabetical_order() -> None:
    words = [cell.lower() for cell in first_cells("glossary.md")[2:]]
    assert words == sorted(words)
    assert {*CLASSES} - {"standard"} <= {*words}
