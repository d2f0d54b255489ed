"""The library's reader of grants, in C, and ours understand the same documents alike."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.contract.domain.pairs import DOCUMENTS, kind
from vgpu.codec import grant_from_text
from vgpu.errors import BadDocument

ROOT = Path(__file__).parents[3]
GRANTS = [document for document in DOCUMENTS if kind(document) == ".grant"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """shim/tests/read_grant.c with shim/src/grant.c."""
    program = tmp_path_factory.mktemp("reader") / "read_grant"
    command = [
        "gcc",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-D_GNU_SOURCE",
        "-pthread",
        f"-I{ROOT}/shim/include",
        f"-I{ROOT}/shim/src",
    ]
    sources = [ROOT / "shim/tests/read_grant.c", ROOT / "shim/src/grant.c"]
    subprocess.run([*command, "-o", program, *sources], check=True)
    return program


def understood(reader: Path, document: Path) -> list[str]:
    """What the C reader prints."""
    return subprocess.run([reader, document], capture_output=True, text=True, check=True).stdout.splitlines()


def expected(text: str) -> list[str]:
    """What it should print."""
    try:
        grant = grant_from_text(text)
    except BadDocument:
        return ["refused"]
    cards = [f"{card.uuid[4:].replace('-', '')} {card.mib}" for card in grant.cards]
    return [f"clear {'yes' if grant.clear else 'no'}", *cards]


@pytest.mark.parametrize("document", GRANTS, ids=lambda path: path.name)
def test_the_library_reads_a_grant_as_we_do(reader: Path, document: Path) -> None:
    said = understood(reader, document)
    assert [line.partition(":")[0] for line in said] == expected(document.read_text())


def test_a_grant_that_is_cut_anywhere_is_refused_by_both(reader: Path, tmp_path: Path) -> None:
    text = (ROOT / "tests/contract/domain/guarded.grant").read_text()
    for length in range(0, len(text), 7):
        cut = tmp_path / "grant"
        cut.write_text(text[:length])
        assert expected(text[:length]) == ["refused"]
        assert understood(reader, cut)[0].startswith("refused: line ")
