"""Every library that the programs import is declared in pyproject.toml, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
MODULES = {
    "google": "protobuf", "grpc": "grpcio", "pynvml": "nvidia-ml-py", "yaml": "pyyaml",
    "prometheus_client": "prometheus-client", "pydantic_settings": "pydantic-settings",
}  # fmt: skip
"""Module -> distribution, where the names differ."""
ONLY_IN = {"kubernetes": {"kube/auth.py"}}
"""Of the extra `kubeconfig`: images do not have it, so no other file may import it."""


def imported() -> Iterator[tuple[str, str]]:
    """(distribution, file) of each import of a library, at any depth of the file."""
    own = {*PACKAGES, *sys.stdlib_module_names}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: Iterable[str] = ()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names} - own:
                yield MODULES.get(name, name), str(path.relative_to(ROOT))


def names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ]", requirement)[0] for requirement in requirements}


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    declared = names(PROJECT["project"]["dependencies"])
    extra = names(PROJECT["project"]["optional-dependencies"]["kubeconfig"])
    assert {name for name, _ in imported()} == declared | extra
    assert declared.isdisjoint(extra)
    assert extra == set(ONLY_IN)


def test_what_images_leave_out_is_imported_by_the_reader_of_kubeconfigs_alone() -> None:
    found: dict[str, set[str]] = {}
    for name, path in imported():
        found.setdefault(name, set()).add(path)
    assert {name: found[name] for name in ONLY_IN} == ONLY_IN
