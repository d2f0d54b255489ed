"""Every library that the programs import is declared in pyproject.toml, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
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
    always, (cluster, kubeconfig) = (
        names(PROJECT["project"]["dependencies"]),
        (names(EXTRAS[name]) for name in ("cluster", "kubeconfig")),
    )
    assert {name for name, _ in imported()} == always | cluster | kubeconfig
    assert len(always | cluster | kubeconfig) == len(always) + len(cluster) + len(kubeconfig)
    assert kubeconfig == set(ONLY_IN)


def test_what_images_leave_out_is_imported_by_the_reader_of_kubeconfigs_alone() -> None:
    found: dict[str, set[str]] = {}
    for name, path in imported():
        found.setdefault(name, set()).add(path)
    assert {name: found[name] for name in ONLY_IN} == ONLY_IN


WITHOUT = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"{{name}} is of an extra", name=name)

sys.meta_path.insert(0, Missing())
for package in ("tangramctl", "nvml", "arbiter", "vgpu"):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, f"{{package}}."):
        importlib.import_module(found.name)
"""


def test_the_command_line_and_the_arbiter_that_it_starts_need_no_extra() -> None:
    """In a process in which what the extras bring cannot be imported: also not by way of observe/, of which they use a part."""
    modules = {distribution: module for module, distribution in MODULES.items()}
    missing = sorted(modules.get(name, name) for name in names(EXTRAS["cluster"]) | names(EXTRAS["kubeconfig"]))
    assert {"grpc", "fastapi", "kubernetes"} <= set(missing)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT.format(missing=missing)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
