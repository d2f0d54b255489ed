"""A program that finds a newer form of a hooked function by dlsym gets it, and is reported: memory allocated through it would not be counted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.shim.conftest import Stage, wait_for

FUNCTIONS = ("cuMemAlloc_v3", "cuMemAllocAsync_v2_ptsz", "cuMemOf_v2")
"""What a driver of tomorrow may have; of the last the library hooks no form."""
VISIBLE_S = 5.0
"""Specified."""


def library(folder: Path, name: str) -> Path:
    """A library of that name with these functions."""
    source = folder / "newer.c"
    source.write_text("".join(f"int {function}(void) {{ return 0; }}\n" for function in FUNCTIONS))
    made = folder / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made


def look_up(stage: Stage, path: Path, function: str) -> tuple[set[str], str]:
    """Reasons of the container within 5 s, and what the program wrote to standard error."""
    gpu = stage.worker()
    gpu.must("alloc(1)")
    before = {one.reason for one in stage.status().unenforced}
    gpu.must(f"[0, __import__('ctypes').CDLL({str(path)!r})[{function!r}]()]")
    if function != FUNCTIONS[-1] and path.name.startswith("libcuda"):
        wait_for(lambda: {one.reason for one in stage.status().unenforced} > before, VISIBLE_S)
    gpu.must("alloc(1)")
    found = {one.reason for one in stage.status().unenforced} - before
    return found, gpu.end()


@pytest.mark.parametrize("function", FUNCTIONS[:-1])
def test_a_newer_form_that_dlsym_finds_in_the_driver_is_reported(stage: Stage, tmp_path: Path, function: str) -> None:
    found, errors = look_up(stage, library(tmp_path, "libcuda.so.999"), function)
    assert found == {"unknown-function"}
    assert f"this driver has a newer {function} than this version knows" in errors


@pytest.mark.parametrize(
    ("name", "function"),
    [("libcuda.so.999", FUNCTIONS[-1]), ("libother.so", FUNCTIONS[0])],
    ids=["no form is hooked", "another library"],
)
def test_nothing_else_is_reported(stage: Stage, tmp_path: Path, name: str, function: str) -> None:
    assert look_up(stage, library(tmp_path, name), function) == (set(), "")
