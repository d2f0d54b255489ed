"""The examples run anywhere: public images, one command, the program from a ConfigMap; and tests/e2e/test_examples.py applies each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.images.catalogue import PYTHON, STAND_IN
from hack.kubectl import ROOT
from tests.contract.test_docs import TEMPLATES

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*"))
NOT_APPLIED = {
    "07-gang": "needs an alpha API",
    "07-kueue": "needs Kueue",
    "08-many-models": "tests/e2e/test_many_models.py",
}
"""By tests/e2e/test_examples.py, and why not."""
OWN_PROGRAMS = {"07-kueue", "08-many-models"}
"""Their images have PyTorch and nothing else is run."""
MONITORING = "examples/15-dcgm/monitoring/rules.yaml"
METRIC = re.compile(r"\b(tangram_\w+)")
ROW = re.compile(r"^\| `(tangram_\w+)` \| \w+ \| ([^|]*) \|", re.MULTILINE)


def documents(folder: Path) -> list[dict[str, Any]]:
    return [thing for file in sorted(folder.glob("*.yaml")) for thing in yaml.safe_load_all(file.read_text())]


def pod_specs(folder: Path) -> list[dict[str, Any]]:
    """Of the pods of an example and of its templates."""
    specs = []
    for thing in documents(folder):
        if thing["kind"] == "Pod":
            specs.append(thing["spec"])
        elif thing["kind"] in TEMPLATES:
            specs.append(thing["spec"]["template"]["spec"])
    return specs


def images(folder: Path) -> set[str]:
    return {
        one["image"] for spec in pod_specs(folder) for one in [*spec.get("initContainers", ()), *spec["containers"]]
    }


def full(image: str) -> str:
    """`python:3.13-slim` -> the name by which a cluster knows it."""
    first, slash, _ = image.partition("/")
    if slash and "." in first:
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


@pytest.mark.parametrize(
    "folder", [one for one in EXAMPLES if one.name not in OWN_PROGRAMS], ids=lambda folder: folder.name
)
def test_an_example_needs_one_command_and_its_main_container_has_gpuview(folder: Path) -> None:
    kustomization = yaml.safe_load((folder / "Kustomization").read_text())
    assert kustomization["components"] == ["../workload"]
    assert [name for name in kustomization["resources"] if not (folder / name).exists()] == []
    assert all("main" in [one["name"] for one in spec["containers"]] for spec in pod_specs(folder))
    page = (folder / "README.md").read_text()
    assert re.search(rf"kubectl apply -k examples/{folder.name}(?=[\s`])", page)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_images_of_an_example_are_public_and_there_is_one_for_the_local_cluster(folder: Path) -> None:
    used = {full(image) for image in images(folder)}
    assert used
    assert not [image for image in used if image.startswith("localhost")]
    if folder.name not in NOT_APPLIED:
        assert used <= {*PYTHON.names, *STAND_IN.names}


def test_no_image_is_stood_in_for_that_no_example_uses() -> None:
    used = {full(image) for folder in EXAMPLES for image in images(folder)}
    assert {*PYTHON.names, *STAND_IN.names} <= used


def test_the_end_to_end_tests_apply_each_example() -> None:
    text = (ROOT / "tests/e2e/test_examples.py").read_text()
    missing = {folder.name for folder in EXAMPLES if f'{folder.name}"' not in text}
    assert missing == set(NOT_APPLIED)


def test_the_component_mounts_the_program_by_its_own_name_in_every_kind_of_pod() -> None:
    component = yaml.safe_load((ROOT / "examples/workload/kustomization.yaml").read_text())
    assert component["configMapGenerator"][0]["files"] == ["gpuview=gpuview.py"]
    kinds = set()
    for patch in component["patches"]:
        kinds |= set(patch["target"]["kind"].split("|"))
        changed = yaml.safe_load(patch["patch"])["spec"]
        spec = changed.get("template", {}).get("spec", changed)
        assert [one["name"] for one in spec["containers"]] == ["main"]
        (mount,), (volume,) = spec["containers"][0]["volumeMounts"], spec["volumes"]
        assert (mount["subPath"], mount["mountPath"]) == ("gpuview", "/usr/local/bin/gpuview")
        assert volume["configMap"]["defaultMode"] == 0o555
    assert kinds == {"Pod", *TEMPLATES}


def test_the_chart_has_the_same_program() -> None:
    """`helm test` needs it in the chart, and helm reads no file outside of it."""
    copy = ROOT / "deploy/helm/tangram/files/gpuview.py"
    assert copy.read_bytes() == (ROOT / "examples/workload/gpuview.py").read_bytes()


def test_the_rules_beside_dcgm_name_metrics_and_labels_that_there_are() -> None:
    labels = {
        name: set(re.findall(r"\w+", text))
        for name, text in ROW.findall((ROOT / "docs/reference/metrics.md").read_text())
    }
    (thing,) = yaml.safe_load_all((ROOT / MONITORING).read_text())
    rules = [rule for group in thing["spec"]["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules}
    used = {name for rule in rules for name in METRIC.findall(rule["expr"])}
    assert {"tangram_container_gpu_memory_limit_bytes", "tangram_container_gpu_time_running_seconds_total"} <= used
    assert used <= labels.keys()
    for name in used:
        joined_by = {"namespace", "pod", "container"} if "gpu_time" in name else {"gpu_uuid"}
        assert joined_by <= labels[name], name
    page = (ROOT / "examples/15-dcgm/README.md").read_text()
    assert set(re.findall(r"\b((?:dcgm|tangram):\w+:\w+)", page)) <= recorded
    assert set(METRIC.findall(page)) <= labels.keys()
