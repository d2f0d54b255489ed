"""The docs are part of the product: what they point to exists, and what they show works."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from vgpu.policy import POLICIES
from vgpu.request import pod_ask

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCED_YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def tracked(pattern: str) -> list[Path]:
    """Files of a pattern that git knows."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("[0-9]*")), ids=lambda folder: folder.name)
def test_every_example_has_a_readme_and_asks_for_what_can_be_asked(example: Path) -> None:
    assert (example / "README.md").read_text().startswith("# ")
    pods = [thing for file in example.glob("*.yaml") for thing in yaml.safe_load_all(file.read_text())]
    assert pods
    assert all(pod_ask(pod, policies=POLICIES) for pod in pods)


def test_the_readme_shows_a_pod_that_asks_for_8_gib_and_30_percent() -> None:
    shown = [yaml.safe_load(block) for block in FENCED_YAML.findall((ROOT / "README.md").read_text())]
    (ask,) = pod_ask(shown[0]).containers
    assert (ask.mib, ask.core_percent) == (8192, 30)


def test_the_makefile_lists_each_of_its_targets_with_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    helped = re.findall(r"^([a-z0-9-]+):.*## ", text, re.MULTILINE)
    assert sorted(phony[1].split()) == sorted(helped)
