"""Documents as earlier versions of Tangram wrote them, and what they mean.

    NAME.inventory.json, NAME.assignment.json, NAME.grant, NAME.burst      a document, byte for byte
    NAME.<kind>.means.yaml                                     what it means, every field spelled out, or `refused: why`

A document that is here was written on some cluster, and pods that it speaks of may still run: it is never changed, and it is read for
ever. `python -m tests.contract.domain.pairs` writes the meaning of documents that have none yet, and touches no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml

from vgpu.api.burst import burst_from_text, burst_to_text
from vgpu.api.codec import (
    assignment_from_json,
    assignment_to_json,
    grant_from_text,
    grant_to_text,
    inventory_from_json,
    inventory_to_json,
)
from vgpu.api.errors import BadDocument

FOLDER: Final = Path(__file__).parent
READ: Final[dict[str, Callable[[str], Any]]] = {
    ".inventory.json": inventory_from_json,
    ".assignment.json": assignment_from_json,
    ".grant": grant_from_text,
    ".burst": burst_from_text,
}
WRITE: Final[dict[str, Callable[[Any], str]]] = {
    ".inventory.json": inventory_to_json,
    ".assignment.json": assignment_to_json,
    ".grant": grant_to_text,
    ".burst": burst_to_text,
}
DOCUMENTS: Final = sorted(path for suffix in READ for path in FOLDER.glob(f"*{suffix}"))


def kind(document: Path) -> str:
    """`.grant` and the like."""
    return next(suffix for suffix in READ if document.name.endswith(suffix))


def meaning_of(document: Path) -> Path:
    """Where its meaning stands."""
    return document.with_name(f"{document.name.removesuffix('.json')}.means.yaml")


def text_of(document: Path) -> str:
    """The document. JSON files end with a line break that the annotation has not."""
    text = document.read_text()
    return text.removesuffix("\n") if document.suffix == ".json" else text


def meaning(document: Path) -> Any:
    """What the present code reads in it, in plain values."""
    try:
        return _plain(asdict(READ[kind(document)](text_of(document))))
    except BadDocument as error:
        return {"refused": str(error)}


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case frozenset():
            return sorted(value)
        case _:
            return value


def main() -> None:
    for document in DOCUMENTS:
        if not meaning_of(document).exists():
            meaning_of(document).write_text(yaml.safe_dump(meaning(document), sort_keys=False, width=1000))


if __name__ == "__main__":
    main()
