"""A wheel with the library says for which machine it is: hatch_build.py, without hatchling, which only a build has."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hack.images.catalogue import ROOT

INTERFACE = "hatchling.builders.hooks.plugin.interface"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    double = ModuleType(INTERFACE)
    double.BuildHookInterface = type("BuildHookInterface", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, INTERFACE, double)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(machine: int, *needed: str) -> bytes:
    return (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HH", 3, machine)
        + b"".join(f"\0{name}\0".encode() for name in needed)
    )


@pytest.mark.parametrize(
    ("made", "tag"),
    [
        (library(62, "GLIBC_2.2.5", "GLIBC_2.17"), "manylinux_2_17_x86_64"),
        (library(62, "GLIBC_2.3"), "manylinux_2_17_x86_64"),
        (library(183, "GLIBC_2.34", "GLIBC_2.17", "GLIBC_PRIVATE"), "manylinux_2_34_aarch64"),
    ],
)
def test_the_tag_is_what_the_library_needs(hook: Any, made: bytes, tag: str) -> None:
    assert hook.platform_tag(made) == tag


@pytest.mark.parametrize("made", [b"", b"#!/bin/sh\n" * 9, library(40), b"\x7fELF\x01" + library(62)[5:]])
def test_what_no_wheel_can_have_is_refused(hook: Any, made: bytes) -> None:
    with pytest.raises(hook.WrongLibrary, match=r"libtangram\.so"):
        hook.platform_tag(made)


def test_only_a_wheel_with_the_library_is_for_one_platform(hook: Any, tmp_path: Path) -> None:
    building = hook.Hook()
    building.root = str(tmp_path)
    data: dict[str, Any] = {}
    building.initialize("standard", data)
    assert data == {}
    (tmp_path / "tangramctl/lib").mkdir(parents=True)
    (tmp_path / "tangramctl/lib/libtangram.so").write_bytes(library(62))
    building.initialize("editable", data)
    assert data == {}
    building.initialize("standard", data)
    assert data == {"pure_python": False, "tag": "py3-none-manylinux_2_17_x86_64"}
