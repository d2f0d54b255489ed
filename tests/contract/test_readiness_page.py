"""docs/reference/readiness.md has what /readyz can say, and no component says anything else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.built import REPOSITORY
from vgpu.api.readiness import TABLE, Missing, page

PROGRAMS = {
    "deviceplugin/app.py": {"not_ready", "_install"},
    "extender/app.py": {"not_ready", "not_synced"},
    "webhook/app.py": {"not_ready"},
}


def test_the_page_has_the_table_as_the_programs_have_it() -> None:
    assert page() in (REPOSITORY / "docs/reference/readiness.md").read_text()
    assert TABLE.keys() == set(Missing)
    assert all(row.components and row.do for row in TABLE.values())


def sentences(path: Path, functions: set[str]) -> Iterator[str]:
    """Text that these functions return, or keep for one that does, without the list."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name not in functions:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Return) or (
                isinstance(node, ast.Assign) and "_installing" in ast.dump(node.targets[0])
            ):
                values = [node.value] if not isinstance(node.value, ast.IfExp) else [node.value.body, node.value.orelse]
                yield from (
                    ast.unparse(one)
                    for one in values
                    if isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and one.value)
                )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_reports_only_the_reasons_of_the_list(program: str) -> None:
    assert list(sentences(REPOSITORY / program, PROGRAMS[program])) == []
