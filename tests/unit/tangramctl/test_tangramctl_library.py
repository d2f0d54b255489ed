"""Which library and which fake driver are taken, and the error where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tangramctl import library
from tangramctl.errors import Broken

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree where nothing is built."""
    monkeypatch.setattr(library, "TREE", tmp_path)
    monkeypatch.setattr(library, "HERE", tmp_path / "tangramctl")
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "opt")
    monkeypatch.setattr(library, "FAKE_INSTALLED", tmp_path / "opt/fake")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def made(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def test_in_a_source_tree_what_was_built_comes_before_what_was_packaged(tree: Path) -> None:
    packaged = made(tree / "tangramctl/lib/libtangram.so")
    made(tree / "tangramctl/lib/fake/nvidia-fake-driverd")
    assert library.library(None) == packaged
    built = made(tree / "build/shim/libtangram.so")
    fake = made(tree / "build/shim/fake/nvidia-fake-driverd")
    assert library.library(None) == built
    assert library.fake_driver(packaged.parent / "elsewhere/libtangram.so") == fake.parent


def test_the_tree_of_these_tests_is_one() -> None:
    assert library.TREE == ROOT


def test_folders_without_a_fake_driver_are_named_once_each(tree: Path) -> None:
    with pytest.raises(Broken) as caught:
        library.fake_driver(made(tree / "build/shim/libtangram.so"))
    assert str(caught.value) == (
        f"no fake driver (nvidia-fake-driverd) in {tree}/build/shim/fake, {tree}/tangramctl/lib/fake, {tree}/opt/fake: "
        "build it with `make library`"
    )


def test_an_installed_wheel_is_not_reported_to_build(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "TREE", None)
    with pytest.raises(Broken) as caught:
        library.fake_driver(None)
    assert str(caught.value).endswith("no wheel has it: --fake works in a source tree, after `make library`")
    with pytest.raises(Broken) as caught:
        library.library(None)
    assert str(caught.value) == (
        f"no libtangram.so in {tree}/tangramctl/lib, {tree}/opt: "
        "this wheel was built without it: build one with it, or name it with --library"
    )


def test_make_clean_removes_what_was_put_into_the_tree_for_a_wheel() -> None:
    done = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tangramctl/lib" in done.stdout.split()
