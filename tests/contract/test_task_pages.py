"""Pages of docs: the commands and manifests of tasks and operations are valid, and the sentences of all pages are short."""

from __future__ import annotations

import re
import statistics
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpu.mig.config import read as read_mig
from webhook.admission_rules import AdmissionRules
from webhook.mutate import mutate

ROOT = Path(__file__).resolve().parents[2]
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/helm/tangram/values.yaml").read_text())
FREE = {"scheduler.kubeScheduler.featureGates", "node.nodeSelector"}
"""Chart values whose keys a user chooses."""
TASKS = sorted((ROOT / "docs/tasks").glob("*.md"))
OPERATIONS = sorted((ROOT / "docs/operations").glob("*.md"))
PAGES = [*TASKS, *OPERATIONS]
USER_WORDS, REFERENCE_WORDS = (15, 25, 40), (17, 30, 45)
"""Of a sentence: on average, in nine of ten, at most. Specified; the task pages of Kueue have 13 on average."""
WORDS = {
    "concepts": USER_WORDS,
    "tasks": USER_WORDS,
    "operations": USER_WORDS,
    "reference": REFERENCE_WORDS,
    "development": REFERENCE_WORDS,
}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Code blocks of a language, without their indentation."""
    for text in re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield textwrap.dedent(text)


def manifests(page: Path) -> Iterator[Mapping[str, Any]]:
    """Kubernetes objects that a page's commands create."""
    for block in blocks(page, "sh"):
        for text in re.findall(r"<<'YAML'\n(.*?)^YAML$", block, re.MULTILINE | re.DOTALL):
            yield from yaml.safe_load_all(text)


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Dotted paths of chart values."""
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and here not in FREE:
            yield from leaves(value, here)
        else:
            yield here


def known(path: str) -> bool:
    """Is there such a chart value?"""
    found: Any = VALUES
    for part in path.split("."):
        if found == {}:  # an object with keys of its own
            return True
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


def sentence_words(text: str) -> list[int]:
    """Words in each sentence. Code blocks, tables and headings do not count, and a code span or link target is one word."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    prose = [
        re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", line) for line in text.split("\n") if not re.match(r"\s*(\||#|<)", line)
    ]
    flat = re.sub(r"`[^`]*`|\]\([^)]*\)", " code ", "\n".join(prose)).replace("**", "")
    counts = (len(re.findall(r"[A-Za-z][\w'-]*", part)) for part in re.split(r"[.!?](?:\s|$)|\n\s*\n", flat))
    return [count for count in counts if count > 2]


@each_page
def test_a_page_starts_with_what_its_reader_can_do_afterwards(page: Path) -> None:
    title, _, text = page.read_text().partition("\n\n")
    assert title.startswith("# ")
    assert text.startswith("After ")


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.name)
def test_a_task_has_requirements_numbered_steps_and_commands(page: Path) -> None:
    text = page.read_text()
    assert "\n## Before you begin\n" in text
    assert re.search(r"^1\. ", text, re.MULTILINE)
    assert list(blocks(page, "sh"))


@each_page
def test_the_shell_can_parse_every_command(page: Path) -> None:
    for block in blocks(page, "sh"):
        parsed = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert (parsed.returncode, parsed.stderr) == (0, ""), block


@each_page
def test_the_webhook_admits_every_pod_of_a_page(page: Path) -> None:
    for thing in manifests(page):
        assert {"apiVersion", "kind", "metadata"} <= thing.keys()
        if thing["kind"] in ("Pod", "Job"):
            pod = thing if thing["kind"] == "Pod" else {"kind": "Pod", "metadata": {}, **thing["spec"]["template"]}
            assert mutate(pod, AdmissionRules()).ops


def handed_over(spec: Mapping[str, Any]) -> Any:
    """The chart's values in an Application of Argo CD or a HelmRelease of Flux."""
    return spec.get("values") or spec.get("source", {}).get("helm", {}).get("valuesObject")


@each_page
def test_every_chart_value_in_a_block_exists(page: Path) -> None:
    shown = [one for block in blocks(page, "yaml") for one in yaml.safe_load_all(block)]
    objects = [one for one in shown if one.keys() <= {"apiVersion", "kind", "metadata", "spec"}]
    values = [one for one in shown if one not in objects and "mig-configs" not in one]
    values += [found for one in objects if (found := handed_over(one.get("spec", {})))]
    assert [path for value in values for path in leaves(value) if not known(path)] == []


def test_every_mig_layout_of_a_page_is_read() -> None:
    layouts = [block for page in PAGES for block in blocks(page, "yaml") if "mig-configs:" in block]
    assert layouts
    for layout in layouts:
        assert read_mig(layout, "page").configs


def test_the_pages_have_manifests_and_values_to_check() -> None:
    assert sum(1 for page in TASKS for _ in manifests(page)) >= 5
    assert sum(1 for page in PAGES for _ in blocks(page, "yaml")) >= 5


def pages_of(folder: str) -> list[Path]:
    """The pages of a folder of docs."""
    return sorted((ROOT / "docs" / folder).glob("*.md"))


@pytest.mark.parametrize("folder", WORDS)
def test_sentences_are_short_on_average(folder: str) -> None:
    words = sorted(count for page in pages_of(folder) for count in sentence_words(page.read_text()))
    mean, nine_of_ten, _ = WORDS[folder]
    assert statistics.mean(words) <= mean
    assert words[int(0.9 * len(words))] <= nine_of_ten


@pytest.mark.parametrize("folder", WORDS)
def test_no_sentence_is_very_long(folder: str) -> None:
    most = WORDS[folder][2]
    long = [
        (page.name, count) for page in pages_of(folder) for count in sentence_words(page.read_text()) if count > most
    ]
    assert long == []
