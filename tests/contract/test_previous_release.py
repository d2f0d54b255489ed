"""Components of this release and of the one before it understand each other: documents and metrics."""

from __future__ import annotations

import json
import re

from hack.previous import metrics_page
from hack.reference.__main__ import ROOT
from tests.contract.domain.pairs import DOCUMENTS, READ, WRITE, kind, meaning, text_of
from tests.previous_release import previous_python, previous_sources

READS = """
import json, sys
from vgpu.api.burst import burst_from_text, burst_to_text
from vgpu.api.codec import assignment_from_json, assignment_to_json, grant_from_text, grant_to_text, inventory_from_json, inventory_to_json
from vgpu.api.errors import BadDocument
of = {
    ".inventory.json": (inventory_from_json, inventory_to_json), ".assignment.json": (assignment_from_json, assignment_to_json),
    ".grant": (grant_from_text, grant_to_text), ".burst": (burst_from_text, burst_to_text),
}
answers = {}
for name, (kind, text) in json.load(sys.stdin).items():
    read, write = of[kind]
    try:
        answers[name] = write(read(text))
    except BadDocument as error:
        answers[name] = f"refused: {error}"
print(json.dumps(answers))
"""
NOT_KEPT: dict[str, str] = {}
"""Metrics of the previous release that this one lacks, and why: each is in the CHANGELOG."""


def test_what_is_written_today_is_read_by_the_previous_release_and_means_the_same() -> None:
    """What came later is lost on the way: it has its default then."""
    sound = [document for document in DOCUMENTS if "refused" not in meaning(document)]
    written = {one.name: (kind(one), WRITE[kind(one)](READ[kind(one)](text_of(one)))) for one in sound}
    answers = json.loads(previous_python(READS, json.dumps(written)))
    refused = {name: answer for name, answer in answers.items() if answer.startswith("refused: ")}
    assert refused == {}
    changed = [name for name, (suffix, text) in written.items() if READ[suffix](answers[name]) != READ[suffix](text)]
    assert changed == []
    assert {suffix for suffix, _ in written.values()} == set(READ)


def test_every_metric_of_the_previous_release_is_there() -> None:
    """Dashboards and alerts of users name them."""
    before, now = (
        set(re.findall(r"^\| `(tangram_\w+)`", page.read_text(), re.MULTILINE))
        for page in (metrics_page(previous_sources()), metrics_page(ROOT))
    )
    assert len(before) > 100
    assert before - now == set(NOT_KEPT)
