"""values.yaml, values.schema.json and docs/reference/chart.md say the same, and what is misspelt is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.contract.chart import reference
from tests.contract.chart.rendering import CHART, ROOT, Helm, Refused

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def schema_keys(schema: dict[str, Any], prefix: str = "") -> set[str]:
    """Paths of all values that the schema lists by name."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    found: set[str] = set()
    for key, inner in schema.get("properties", {}).items():
        found |= {f"{prefix}{key}"} | schema_keys(inner, f"{prefix}{key}.")
    return found


def default_keys(values: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, inner in values.items():
        found |= {f"{prefix}{key}"} | (default_keys(inner, f"{prefix}{key}.") if isinstance(inner, dict) else set())
    return found


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    free = {"global"}  # helm's own
    documented = {row.key for row in reference.value_rows()}
    listed = schema_keys(SCHEMA) - free
    inside = {key for key in listed | default_keys(DEFAULTS) if any(key.startswith(f"{row}.") for row in documented)}
    sections = {key.rpartition(".")[0] for key in documented} | {"scheduler", "scheduler.kubeScheduler", "queues"} - {
        ""
    }
    assert listed - inside - sections == documented
    assert default_keys(DEFAULTS) - inside - sections == documented


def test_every_value_has_a_comment() -> None:
    assert [row.key for row in reference.value_rows() if not row.text] == []


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.name)
def test_the_reference_is_what_the_chart_says(page: reference.Page) -> None:
    assert page.in_step(), f"{page.path.relative_to(ROOT)} is behind: run hack/verify-chart --write"


@pytest.mark.parametrize("key", sorted(row.key for row in reference.value_rows()))
def test_a_misspelt_neighbour_of_a_value_is_refused(helm: Helm, key: str) -> None:
    """One helm run a section is enough: values that share a parent share its schema."""
    parent = key.rpartition(".")[0]
    if key != min(row.key for row in reference.value_rows() if row.key.rpartition(".")[0] == parent):
        return
    wrong: dict[str, Any] = {"misspelt": 1}
    for part in reversed(parent.split(".")) if parent else ():
        wrong = {part: wrong}
    with pytest.raises(Refused, match="misspelt"):
        helm.objects(wrong)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"accessMode": "direct"}, "accessMode"),
        ({"memoryUnit": "1Mi"}, "memoryUnit"),
        ({"domain": "nodots"}, "domain"),
        ({"domain": "it's.example"}, "domain"),
        ({"migProfiles": ["mig-1g.5gb"]}, "migProfiles"),
        ({"driver": {"root": "usr"}}, "root"),
        ({"stateRoot": "/var/lib/tangram/"}, "stateRoot"),
        ({"node": {"privileged": "maybe"}}, "privileged"),
        ({"webhook": {"failurePolicy": "fail"}}, "failurePolicy"),
        ({"webhook": {"classesByPriorityClass": {"high": "urgent"}}}, "classesByPriorityClass"),
        ({"webhook": {"timeoutSeconds": 31}}, "timeoutSeconds"),
        ({"webhook": {"replicas": -1}}, "replicas"),
        ({"webhook": {"port": 70000}}, "port"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"policy": {"trustedUsers": ["o'hara"]}}, "trustedUsers"),
        ({"scheduler": {"extender": {"httpTimeoutSeconds": 1}}}, "httpTimeoutSeconds"),
        ({"scheduler": {"preemption": {"deadlineSeconds": 56}}}, "deadlineSeconds"),
        ({"queues": {"kueue": {"evict": "some"}}}, "evict"),
        ({"queues": {"kueue": {"templates": "ignore"}}}, "templates"),
        ({"queues": {"kueue": {"controllers": ["jobs.batch,pods"]}}}, "controllers"),
        ({"queues": {"kueue": {"controllers": ["a" * 121]}}}, r"/queues/kueue/controllers/0.*120"),
        (
            {"queues": {"kueue": {"controllers": [f"k{at}.batch" for at in range(129)]}}},
            r"/queues/kueue/controllers.*128",
        ),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(helm: Helm, values: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        helm.objects(values)
