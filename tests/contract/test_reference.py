"""docs/reference/{metrics,settings}.md say what the programs have: no more, no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, Field

from hack.reference.__main__ import PAGES, ROOT, complaints, difference
from hack.reference.alerts import ALERTS
from hack.reference.metrics import breaches, rows
from hack.reference.page import with_tables
from hack.reference.programs import PROGRAMS
from hack.reference.settings import allowed, default
from vgpu.api.inventory import CORDON_STATES, TESTING, Withdrawal


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_what_the_programs_say(page: Path) -> None:
    assert difference(page) == [], "run hack/verify-reference --write"


def test_names_follow_prometheus_and_everything_is_described() -> None:
    assert complaints() == []


def test_every_program_of_the_project_has_a_section() -> None:
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert {f'tangram-{program.package} = "{program.package}.__main__:main"' in scripts for program in PROGRAMS} == {
        True
    }
    for page in (ROOT / f"docs/reference/{name}.md" for name in ("metrics", "settings")):
        assert [program.package for program in PROGRAMS if f"\n## {program.package}\n" not in page.read_text()] == []


def test_the_rules_of_the_chart_are_about_the_metrics_that_the_page_has_an_alert_for() -> None:
    rule = (ROOT / "deploy/helm/tangram/templates/monitoring/prometheusrule.yaml").read_text()
    named = {name.removesuffix("_bucket") for name in re.findall(r"\btangram_\w+", rule)}
    beside = {"tangram_container_gpu_memory_limit_bytes", "tangram_gpu_condition_since_timestamp_seconds"}
    assert named - beside == set(ALERTS)


def test_the_rule_about_a_gpu_out_of_use_leaves_out_what_operators_took_out_and_did_not_select() -> None:
    rule = (ROOT / "deploy/helm/tangram/templates/monitoring/prometheusrule.yaml").read_text()
    (expression,) = re.findall(r"alert: TangramGpuUnhealthy\n.*?expr: (.*?)\n", rule, re.DOTALL)
    first, *left_out = expression.split(" unless on (gpu_uuid) ")
    assert first == "tangram_deviceplugin_gpu_healthy == 0"
    cordoned, unselected = left_out
    assert set(cordoned.split('"')[1].split("|")) == {*CORDON_STATES} - {TESTING}
    assert unselected == f'tangram_gpu_condition_since_timestamp_seconds{{reason="{Withdrawal.NOT_SELECTED}"}}'


def test_a_metric_is_found_with_its_labels_before_it_has_a_value() -> None:
    registry = CollectorRegistry()
    Counter("tangram_x_calls", "Calls.", ["verb"], registry=registry)
    Histogram("tangram_x_call_seconds", "Time of a call.", registry=registry)
    found = [(row.name, row.kind, row.labels, row.unit) for row in rows(registry)]
    assert found == [
        ("tangram_x_call_seconds", "histogram", (), "s"),
        ("tangram_x_calls_total", "counter", ("verb",), ""),
    ]


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        ("tangram_y_things", [], "is not tangram_x_"),
        ("tangram_x_wait_ms", [], "ms is no base unit"),
        ("tangram_x_free_mib", [], "mib is no base unit"),
        ("tangram_x_things_total", [], "_total is for counters"),
        ("tangram_x_things", ["gpuUuid"], "label gpuUuid"),
        ("tangram_x_things", ["instance"], "label instance"),
    ],
)
def test_a_gauge_with_a_bad_name_is_reported(name: str, labels: list[str], said: str) -> None:
    registry = CollectorRegistry()
    Gauge(name, "Things that are there.", labels, registry=registry)
    (row,) = rows(registry)
    (found,) = breaches("x", row)
    assert said in found


def test_a_histogram_without_a_unit_is_reported() -> None:
    registry = CollectorRegistry()
    Histogram("tangram_x_calls", "Calls that were made.", registry=registry)
    (row,) = rows(registry)
    assert "ends with its unit" in next(iter(breaches("x", row)))


def test_ranges_and_defaults_are_read_from_the_model() -> None:
    class Example(BaseModel):
        name: str = Field(min_length=1)
        port: int = Field(80, ge=0, le=65535)
        wait_s: float = Field(1.0, gt=0)
        folder: Path | None = Field(None)
        quiet: bool = Field(False)
        empty: str = Field("")

    seen = {name: (default(field), allowed(field)) for name, field in Example.model_fields.items()}
    assert seen == {
        "name": ("required", "text, not empty"),
        "port": ("`80`", "0 to 65535"),
        "wait_s": ("`1.0`", "> 0"),
        "folder": ("", "path"),
        "quiet": ("`false`", "true or false"),
        "empty": ('`""`', "text"),
    }


def test_what_stands_outside_the_marks_stays() -> None:
    page = "# By hand\n<!-- made by hack/verify-reference --write -->\nold\n<!-- end -->\nBy hand too.\n"
    made = with_tables(page, "new\n")
    assert made == page.replace("old", "new")
    with pytest.raises(ValueError, match="no part between"):
        with_tables("# Only by hand\n", "new\n")
