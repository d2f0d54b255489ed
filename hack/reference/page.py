"""A page with a part that is made, between two marks, and a part that is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

BEGIN: Final = "<!-- made by hack/verify-reference --write -->"
END: Final = "<!-- end -->"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = " ".join(text.split())
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def with_tables(page: str, tables: str) -> str:
    """The page with its made part replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{tables}{END}{after}"
