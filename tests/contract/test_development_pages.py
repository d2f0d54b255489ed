"""docs/development: what the pages show of the code is in the code, and the page of invariants has those that are checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.matrix.invariants import INVARIANTS

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = ROOT / "docs/development"
SHOWN: Final = {
    ("add-a-policy.md", "binpack: the function"): "vgpu/scheduling/policies/binpack.py",
    ("add-a-policy.md", "binpack: the row"): "vgpu/scheduling/policies/registry.py",
    ("add-a-hook.md", "the line of a hook"): "shim/src/hooks/hooks.def",
    ("add-a-setting.md", "the field of a setting"): "arbiter/settings.py",
}
"""Page and code block, in the order of the page, and the file that the block is from."""


def blocks(page: str) -> list[str]:
    """The code blocks of Python and C, without the blanks: a page indents them."""
    text = (PAGES / page).read_text()
    return ["".join(block.split()) for block in re.findall(r"```(?:python|c)\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize(("page", "block"), SHOWN, ids=lambda part: part)
def test_the_code_on_the_page_is_in_the_file(page: str, block: str) -> None:
    of_page = [name for of, name in SHOWN if of == page]
    shown = blocks(page)
    assert len(shown) == len(of_page)
    code = "".join((ROOT / SHOWN[page, block]).read_text().split())
    part = shown[of_page.index(block)]
    assert part[part.find("defbinpack") if "defbinpack" in part else 0 :] in code


def test_each_invariant_that_is_checked_is_on_the_page() -> None:
    text = (PAGES / "invariants.md").read_text()
    rows = re.findall(r"^\| \*\*(I\d)\*\* \|", text, re.MULTILINE)
    assert rows == [f"I{number}" for number in range(1, 10)]
    assert [name for name in INVARIANTS if name.startswith("I")] == rows[:8]
    assert "has a function for each of I1 to I8" in text
