"""docs/reference/enforcement.md and docs/operations/troubleshooting.md have a row for each reason: no more, no less, and as the program says it."""

from __future__ import annotations

import re
from pathlib import Path

from vgpu.api.enforcement import REPORTED, TABLE, LimitState, Reason

DOCS = Path(__file__).parents[2] / "docs"
NUMBERS = {reason: number for number, reason in REPORTED.items()}


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its header."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_the_table_as_the_program_has_it() -> None:
    page = (DOCS / "reference/enforcement.md").read_text()
    assert rows(page, "Reasons") == [
        [
            f"`{reason}`",
            " and ".join(sorted(TABLE[reason].limits)),
            f"library ({NUMBERS[reason]})" if reason in NUMBERS else "arbiter",
            TABLE[reason].means,
            TABLE[reason].do,
        ]
        for reason in Reason
    ]
    states = re.findall(r"^\| `([a-z]+)` \|", page.partition("## Reasons")[0], re.MULTILINE)
    assert states == [str(state) for state in LimitState]


def test_troubleshooting_has_an_entry_for_each_reason() -> None:
    found = rows((DOCS / "operations/troubleshooting.md").read_text(), "A limit is not enforced")
    assert [row[0] for row in found] == [f"`{reason}`" for reason in Reason]
    assert all(len(row) == 3 and all(row) for row in found)
