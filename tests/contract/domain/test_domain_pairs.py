"""What version 1 wrote is read for ever, and means what it meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.domain.pairs import DOCUMENTS, FOLDER, READ, WRITE, kind, meaning, meaning_of, text_of

ANOTHER_WROTE = {
    "no-gpu.inventory.json": "leaves out what has a default",
    "facts-of-later.inventory.json": "has facts that this version does not know",
    "defaults-spelled-out.grant": "has lines that this version leaves out",
}
"""Documents that are understood, and that the present writers would write in other bytes."""

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def lost(meant: Any, read: Any, at: str = "") -> list[str]:
    """Where `read` differs from what was meant. It may know more: a field that came later has its default."""
    if isinstance(meant, dict) and isinstance(read, dict):
        return [found for key, value in meant.items() for found in lost(value, read.get(key, "nothing"), f"{at}.{key}")]
    if isinstance(meant, list) and isinstance(read, list) and len(meant) == len(read):
        return [found for number, value in enumerate(meant) for found in lost(value, read[number], f"{at}[{number}]")]
    return [] if meant == read else [f"{at} meant {meant!r} and is read as {read!r}"]


@documents
def test_a_document_means_what_it_meant(document: Path) -> None:
    meant = yaml.safe_load(meaning_of(document).read_text())
    assert lost(meant, meaning(document)) == []
    assert ("refused" in meaning(document)) == ("refused" in meant)


@documents
def test_what_is_written_today_has_the_bytes_of_version_1(document: Path) -> None:
    if "refused" in meaning(document):
        return
    text = text_of(document)
    same = WRITE[kind(document)](READ[kind(document)](text)) == text
    assert same == (document.name not in ANOTHER_WROTE)


@documents
def test_a_refusal_names_the_kind_of_the_document(document: Path) -> None:
    reason = meaning(document).get("refused", "")
    assert reason == "" or reason.startswith(kind(document).split(".")[1])


def test_every_kind_has_sound_and_refused_documents_and_no_meaning_stands_alone() -> None:
    for suffix in READ:
        refused = ["refused" in meaning(document) for document in DOCUMENTS if kind(document) == suffix]
        assert len(refused) >= 3, suffix
        assert set(refused) == {True, False}, suffix
    assert set(FOLDER.glob("*.means.yaml")) == {meaning_of(document) for document in DOCUMENTS}
    assert {document.name for document in DOCUMENTS} >= set(ANOTHER_WROTE)


def test_a_field_that_is_lost_or_changed_is_reported() -> None:
    assert lost({"a": 1, "b": [{"c": 2}]}, {"a": 1, "b": [{"c": 2, "later": 3}]}) == []
    assert lost({"a": 1, "b": [{"c": 2}]}, {"b": [{"c": 3}]}) == [
        ".a meant 1 and is read as 'nothing'",
        ".b[0].c meant 2 and is read as 3",
    ]
