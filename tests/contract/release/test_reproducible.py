"""What makes two builds give the same bytes. The builds themselves are `make reproducible`, which a release runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hack.images.buildah import CREATED_S
from hack.images.catalogue import DOCKERFILE, ROOT
from hack.release import reproducible
from tests.contract.release.oci import archive


def compiled(folder: Path, source: str) -> bytes:
    shutil.copytree(ROOT / "shim", folder / "shim", ignore=shutil.ignore_patterns("tests", "build"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    target = folder / f"out/obj/{source}.o"
    subprocess.run(
        ["make", "-s", "-C", str(folder / "shim"), "CC=gcc", f"BUILD={folder / 'out'}", str(target)], check=True
    )
    return target.read_bytes()


def test_an_object_does_not_say_in_which_folder_it_was_compiled(tmp_path: Path) -> None:
    """With debug information, and with a path of another length."""
    first, second = (compiled(tmp_path / name, "lines") for name in ("a", "a-longer-name"))
    assert b".debug_info" in first
    assert first == second


def test_two_builds_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    built = iter([{"one.so": "aa", "two.so": "bb"}, {"one.so": "aa", "two.so": "cc"}])
    monkeypatch.setattr(reproducible, "PARTS", {"library": lambda _: next(built)})
    assert reproducible.compare("library") == ["library: two.so is bb at first and cc the second time"]


def test_a_build_of_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducible, "PARTS", {"library": lambda _: {}})
    assert reproducible.compare("library") == ["library: nothing was built"]


def test_an_image_is_compared_by_manifest_config_and_layers(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a.tar", "b.tar")]
    digest = archive(names[0], [{"a": "b"}, {"c": "d"}])
    archive(names[1], [{"a": "b"}, {"c": "e"}])
    first, second = map(reproducible.digests, names)
    assert first["manifest"] == digest
    different = [sentence.split()[1:3] for sentence in reproducible.differences("image", first, second)]
    assert different == [["layer", "1"], ["manifest", "is"]]


def test_python_in_the_image_is_compiled_in_one_order_and_by_content() -> None:
    """A .pyc with a time stamp, or one of a process that compiled other files before it, differs at each build."""
    text = (ROOT / DOCKERFILE).read_text()
    assert "COMPILE_BYTECODE" not in text
    assert "--compile-bytecode" not in text
    calls = [line for line in text.splitlines() if "compileall" in line]
    assert len(calls) == 2
    assert all("PYTHONHASHSEED=0" in line and "--invalidation-mode unchecked-hash" in line for line in calls)
    assert CREATED_S == 0
