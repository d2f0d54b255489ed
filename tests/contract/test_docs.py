"""The docs are part of the product: what they point to exists, and what they show works."""

from __future__ import annotations

import csv
import functools
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpu.api.burst import amount_mib
from vgpu.api.driver import OLDEST_BRANCH
from vgpu.api.quantity import parse
from vgpu.api.request import pod_request
from vgpu.scheduling.policies.registry import POLICIES

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FENCED_YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
SHOWN = re.compile(r"^ {4}.*$|`[^`\n]+`", re.MULTILINE)
"""A line of a block by indentation, or a code span."""
IN_BYTES = re.compile(r"`[^`\n]*?([0-9]+Gi)` is ([0-9,]+) units")
"""A ResourceQuota that was written in bytes, and what it counts."""
CODE = re.compile(r"`([^`\n]+)`")
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/helm/tangram/values.yaml").read_text())


def tracked(pattern: str) -> list[Path]:
    """Files of a pattern that git knows."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


def anchors(page: Path) -> set[str]:
    """What a link may name on a page: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Where the page's relative links lead: a file, and a heading of it or nothing."""
    for path, anchor in LINK.findall(page.read_text()):
        if "://" not in path:
            yield (page.parent / path).resolve() if path else page, anchor


def values_named(text: str) -> set[str]:
    """Chart values in code spans: words with dots between them, of which the first is a section of the chart."""
    words = {re.split(r"[:= ]", span)[0] for span in CODE.findall(text)}
    dotted = {word for word in words if re.fullmatch(r"\w+(\.\w+)+", word) and word.partition(".")[0] in VALUES}
    return {word for word in dotted if word.rpartition(".")[2] not in ("sock", "log", "conf", "py", "c", "h")}


PAGES = tracked("*.md")
FOLDERS = {path.relative_to(ROOT).parts[0] for path in tracked("*/*")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}#{anchor}"
        for file, anchor in links(page)
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert wrong == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, ahead = set(), {ROOT / "README.md"}
    while ahead:
        seen |= ahead
        ahead = {file for page in ahead if page.suffix == ".md" for file, _ in links(page)} - seen
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - seen == set()


def test_the_readme_leads_to_the_examples_and_to_each_client() -> None:
    wanted = {ROOT / "examples/README.md", *tracked("clients/*/README.md")}
    assert len(wanted) > 1
    assert wanted - {file for file, _ in links(ROOT / "README.md")} == set()


@pytest.mark.parametrize("name", ["scope", "troubleshooting"])
def test_a_quota_in_bytes_is_said_to_be_so_many_units(name: str) -> None:
    ((quantity, units),) = IN_BYTES.findall((ROOT / f"docs/operations/{name}.md").read_text())
    assert parse(quantity) == int(units.replace(",", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_chart_value_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for value in values_named(page.read_text()):
        found: Any = VALUES
        for part in value.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            missing.append(value)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_tree_that_a_page_names_exists(page: Path) -> None:
    spans = [span for span in CODE.findall(page.read_text()) if "kubectl" not in span]
    words = {word.rstrip(".,;:") for span in spans for word in span.split()}
    named = {word for word in words if re.fullmatch(r"\w[\w.-]*/[\w./-]+", word) and word.split("/")[0] in FOLDERS}
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_target_of_make_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = [text for page in PAGES for text in FENCED.findall(page.read_text()) + SHOWN.findall(page.read_text())]
    named = {name for text in shown for name in re.findall(r"^\W*make ([a-z][a-z0-9-]*)", text, re.MULTILINE)}
    assert {"demo", "test"} <= named
    assert named <= targets


def test_every_alert_of_the_chart_links_to_its_runbook_and_every_runbook_has_an_alert() -> None:
    rules = (ROOT / "deploy/helm/tangram/templates/monitoring/prometheusrule.yaml").read_text()
    (page,) = re.findall(r'\$runbooks := printf "%s/blob/main/(\S+)"', rules)
    alerts = re.findall(r"- alert: (\w+)(?:(?!- alert:).)*?runbook_url: \{\{ \$runbooks \}\}#(\w+)\n", rules, re.DOTALL)
    assert [name for name, _ in alerts] == re.findall(r"alert: (\w+)", rules)
    assert [anchor for _, anchor in alerts] == [name.lower() for name, _ in alerts]
    assert re.findall(r"^### (\w+)$", (ROOT / page).read_text(), re.MULTILINE) == [name for name, _ in alerts]


def test_every_runbook_says_what_happened_and_what_to_do() -> None:
    page = (ROOT / "docs/operations/runbooks.md").read_text()
    sections = re.findall(r"^### (\w+)\n\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
    assert len(sections) > 30
    assert [name for name, text in sections if not re.match(r"[A-Z].*?\.\n\n1\. ", text, re.DOTALL)] == []


TEMPLATES = {"Deployment", "Job", "StatefulSet"}
WITHOUT_PODS = {
    "ClusterQueue", "LimitRange", "LocalQueue", "Namespace", "PersistentVolumeClaim", "PodGroup", "ResourceFlavor", "ResourceQuota", "Service",
}  # fmt: skip


def pod_of(thing: dict[str, Any]) -> dict[str, Any] | None:
    """A pod itself, or one as a controller makes it from its template."""
    if thing["kind"] not in TEMPLATES:
        return thing if thing["kind"] == "Pod" else None
    template = thing["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": template.get("metadata", {}) | {"name": thing["metadata"]["name"]},
    }


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("[0-9]*")), ids=lambda folder: folder.name)
def test_every_example_has_a_readme_and_requests_what_can_be_requested(example: Path) -> None:
    assert (example / "README.md").read_text().startswith("# ")
    things = [thing for file in example.glob("*.yaml") for thing in yaml.safe_load_all(file.read_text())]
    assert {thing["kind"] for thing in things} <= {"Pod", *TEMPLATES, *WITHOUT_PODS}
    pods = [pod for thing in things if (pod := pod_of(thing)) is not None]
    assert pods
    assert all(pod_request(pod, policies=POLICIES) for pod in pods)


def test_the_overlay_for_a_cluster_without_a_gpu_changes_what_each_server_has() -> None:
    """kubectl refuses an overlay below its base, and a `replace` of what is not there. `tests/e2e/test_many_models.py` applies this one."""
    folder = ROOT / "examples/fake-gpu/08-many-models"
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert all((folder / resource).exists() for resource in overlay["resources"])
    base = (folder / overlay["resources"][0]).resolve()
    assert not folder.is_relative_to(base)
    (ballast,) = yaml.safe_load_all((folder / "ballast.yaml").read_text())
    assert pod_request(ballast, policies=POLICIES)
    for pod in yaml.safe_load_all((base / "pods.yaml").read_text()):
        for change in yaml.safe_load(overlay["patches"][0]["patch"]):
            *path, last = [part.replace("~1", "/") for part in change["path"].split("/")[1:]]
            parent = functools.reduce(lambda at, key: at[int(key)] if key.isdigit() else at[key], path, pod)
            assert change["op"] == "add" or last in parent
            if last == "-":
                parent.append(change["value"])
            else:
                parent[last] = change["value"]
        burst_mib = amount_mib(pod["metadata"]["annotations"]["tangram.sh/gpu-mem-burst"], unit_mib=1024, what="burst")
        assert burst_mib is not None
        assert burst_mib > pod_request(pod).containers[0].mib


def test_the_examples_page_has_a_line_for_each_example() -> None:
    rows = re.findall(r"^\| \[([^\]]+)\]", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert rows == sorted(folder.name for folder in (ROOT / "examples").glob("[0-9]*"))


def test_the_readme_shows_a_pod_that_requests_8_gib_and_30_percent() -> None:
    shown = [yaml.safe_load(block) for block in FENCED_YAML.findall((ROOT / "README.md").read_text())]
    (request,) = pod_request(shown[0]).containers
    assert (request.mib, request.core_percent) == (8192, 30)


def test_the_makefile_lists_each_of_its_targets_with_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    helped = re.findall(r"^([a-z0-9-]+):.*## ", text, re.MULTILINE)
    assert sorted(phony[1].split()) == sorted(helped)


def test_the_readmes_figures_of_a_request_are_those_of_the_table() -> None:
    page = (ROOT / "bench/gpu_time/README.md").read_text().partition("<!-- figures -->")[2]
    found: dict[str, tuple[str, str]] = {}
    for case, p50, p99 in re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE):
        found.setdefault(case, (p50, p99))  # the first table is of requests
    section = (ROOT / "README.md").read_text().partition("\n## Why not something else\n")[2].partition("\n## ")[0]
    cases = ("alone", "time slicing", "MPS", "MPS, neighbour capped to 50 %", "found by the library")
    assert re.findall(r"([\d,]+) / ([\d,]+) us", section) == [
        found[case] for case in (*cases, "announced 1.5 ms ahead")
    ]
    task = (ROOT / "docs/tasks/latency-critical.md").read_text()
    medians = ("time slicing", "found by the library", "announced 1.5 ms ahead", "alone")
    assert re.findall(r"([\d,]+) us", task.partition("\n## ")[0]) == [found[case][0] for case in medians]


def test_the_readmes_cost_of_an_allocation_is_that_of_the_csv() -> None:
    with (ROOT / "bench/shim/results-gpu-calls.csv").open(newline="") as file:
        rows = {row["figure"]: row for row in csv.DictReader(file)}
    calls = [rows[name] for name in ("cuMemAlloc_10_live", "cuMemFree_10_live")]
    without, added = (
        ", ".join(f"{float(row[of]):{mark}.0f}" for row in calls)
        for of, mark in (("without_median", ""), ("added_median", "+"))
    )
    assert f"| {without} ns | {added} ns |" in (ROOT / "README.md").read_text()


def test_the_readmes_duration_of_the_demo_is_that_of_the_csv() -> None:
    with (ROOT / "bench/cluster/cold.csv").open(newline="") as file:
        took = {row["run"]: float(row["wall_s"]) for row in csv.DictReader(file) if row["step"] == "make demo"}
    assert (round(took["cold"] / 60), round(took["again"] / 30)) == (8, 1)
    assert "The first run takes about 8 minutes and the next ones half a minute" in (ROOT / "README.md").read_text()


def test_the_pods_a_second_of_the_limits_are_the_means_of_the_csvs() -> None:
    page = (ROOT / "docs/operations/limits.md").read_text()
    shown = re.findall(r"^ *\| ([\d,]+) \|" + r" (\d+) \|" * 6 + "$", page, re.MULTILINE)
    measured = defaultdict(list)
    for name in ("throughput", "throughput-16-cores"):
        with (ROOT / f"bench/scheduler/{name}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                measured[int(row["nodes"]), name, row["mode"]].append(float(row["pods_a_second"]))
    means = {key: f"{statistics.mean(values):.0f}" for key, values in measured.items()}
    sizes = sorted({nodes for nodes, _, _ in means})
    columns = list(product(("throughput", "throughput-16-cores"), ("alone", "extender", "ahead")))
    assert shown == [(f"{nodes:,}", *(means[nodes, *column] for column in columns)) for nodes in sizes]


def test_the_page_of_installing_names_the_oldest_supported_driver() -> None:
    assert f"an NVIDIA driver of branch {OLDEST_BRANCH} or newer" in (ROOT / "docs/tasks/install.md").read_text()
