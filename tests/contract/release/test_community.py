"""The files that GitHub, Artifact Hub, Renovate and pre-commit read: each names what there is."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from hack.cluster.programs import ALL
from hack.images.catalogue import ROOT
from hack.release.version import version

CHART: dict[str, Any] = yaml.safe_load((ROOT / "deploy/helm/tangram/Chart.yaml").read_text())
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir() if path.name != "config.yml")
OURS = re.compile(
    r"https://(?:github\.com/tangram-sh/tangram/blob|raw\.githubusercontent\.com/tangram-sh/tangram)/main/([^#\s)\"]+)"
)


def test_the_chart_names_its_image_as_it_will_be_released() -> None:
    (image,) = yaml.safe_load(CHART["annotations"]["artifacthub.io/images"])
    values = yaml.safe_load((ROOT / "deploy/helm/tangram/values.yaml").read_text())["image"]
    assert image["image"] == f"{values['registry']}/{values['repository']}:{version()}"
    workflow = (ROOT / ".github/workflows/release.yaml").read_text()
    platforms = re.findall(r"^            architecture: (\w+)$", workflow, re.MULTILINE)
    assert image["platforms"] == [f"linux/{architecture}" for architecture in platforms]


def test_annotations_are_text_and_lists_in_them_are_yaml() -> None:
    assert all(isinstance(value, str) for value in CHART["annotations"].values())
    links = yaml.safe_load(CHART["annotations"]["artifacthub.io/links"])
    assert all(link.keys() == {"name", "url"} for link in links)


@pytest.mark.parametrize(
    "name", ["deploy/helm/tangram/Chart.yaml", "deploy/helm/tangram/README.md", ".github/ISSUE_TEMPLATE/config.yml"]
)
def test_a_link_into_this_repository_leads_to_a_file(name: str) -> None:
    paths = OURS.findall((ROOT / name).read_text())
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_icons_seven_pieces_fill_the_square() -> None:
    """A tangram: areas of 4, 4, 2, 2, 2, 1 and 1 sixteenths, all corners on a grid."""
    image = ElementTree.parse(ROOT / "docs/icon.svg")
    areas = []
    for piece in image.iter("{http://www.w3.org/2000/svg}polygon"):
        corners = [tuple(int(number) for number in pair.split(",")) for pair in piece.attrib["points"].split()]
        assert all(0 <= number <= 128 and number % 32 == 0 for corner in corners for number in corner)
        double = sum(x * w - z * y for (x, y), (z, w) in itertools.pairwise([*corners, corners[0]]))
        areas.append(abs(double) / 2 / (128 * 128 / 16))
    assert sorted(areas) == [1, 1, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_issue_form_has_what_github_wants(form: Path) -> None:
    document = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= document.keys() <= {"name", "description", "body", "labels", "title"}
    names = [part["id"] for part in document["body"]]
    assert len(set(names)) == len(names)
    for part in document["body"]:
        assert part["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert part["attributes"]["label"]
    assert any(part.get("validations", {}).get("required") for part in document["body"])


def test_each_hook_before_a_commit_is_part_of_lint() -> None:
    """Local programs alone: nothing is fetched by a tag."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text()
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")
        program = hook["entry"].removeprefix(".venv/bin/").split()[0]
        assert program == "python" or f"$(RUN) {program}" in makefile


def test_renovates_rules_name_modules_that_are_there() -> None:
    rules = json.loads((ROOT / "renovate.json").read_text())["packageRules"]
    globs = [glob for rule in rules for glob in rule.get("matchFileNames", [])]
    named = {name for glob in globs for name in re.search(r"\{([\w,]+)\}", glob)[1].split(",")}  # type: ignore[index]
    assert named
    assert named <= {module.name for module in ALL}


def test_renovates_pattern_finds_the_version_that_the_dockerfile_pins() -> None:
    (manager,) = json.loads((ROOT / "renovate.json").read_text())["customManagers"]
    (pattern,) = manager["matchStrings"]
    found = re.search(pattern.replace("(?<", "(?P<"), (ROOT / "deploy/images/Dockerfile").read_text())
    assert found is not None
    assert found["depName"] == "uv"
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["currentValue"])
