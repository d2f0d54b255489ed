"""The version is in pyproject.toml, and its copies agree."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hack.images.catalogue import ROOT
from hack.release import version
from hack.release.version import BadVersion


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", *version.COPIES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_copies_agree() -> None:
    assert list(version.differences()) == []


def test_the_library_is_built_with_it() -> None:
    asked = f"include {ROOT}/shim/Makefile\nasked:\n\t@echo $(VERSION)\n"
    answer = subprocess.run(
        ["make", "-s", "-f", "-", "asked"], input=asked, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == version.version()


def test_a_new_version_reaches_every_copy(tree: Path) -> None:
    assert set(version.write("1.2.3-rc.4", tree)) == {"pyproject.toml", *version.COPIES}
    assert version.version(tree) == "1.2.3-rc.4"
    assert list(version.differences(tree)) == []


def test_a_copy_that_was_forgotten_is_named(tree: Path) -> None:
    chart = tree / "deploy/helm/tangram/Chart.yaml"
    chart.write_text(chart.read_text().replace("appVersion: 0.1.0", "appVersion: 0.0.9"))
    (sentence,) = version.differences(tree)
    assert "Chart.yaml" in sentence
    assert "0.0.9" in sentence


@pytest.mark.parametrize("wrong", ["1.2", "v1.2.3", "1.2.3.4", "1.2.3-dev", ""])
def test_what_is_no_version_is_refused(tree: Path, wrong: str) -> None:
    with pytest.raises(BadVersion, match="MAJOR"):
        version.write(wrong, tree)
