"""CUDA beside a graphics API: contexts are charged, what is shared is passed on, and a process that draws is reported.

The fake driver draws nothing. A second libcuda.so.1, in front of it, has the functions of cudaGL.h, cudaEGL.h and cudaVDPAU.h.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shim.conftest import OUT_OF_MEMORY, ROOT, Stage

CONTEXTS = ("cuGLCtxCreate", "cuGLCtxCreate_v2", "cuVDPAUCtxCreate", "cuVDPAUCtxCreate_v2")
WORDS = "this process uses a graphics API on a shared GPU"


def shared() -> list[str]:
    """The hooks of graphics.c."""
    text = (ROOT / "shim/src/hooks/hooks.def").read_text()
    (body,) = re.findall(r"/\* graphics\.c:.*?\*/(.*?)(?=/\*|#include)", text, re.DOTALL)
    names = re.findall(r"^HOOK\((\w+),", body, re.MULTILINE)
    assert len(names) > 5
    return names


@pytest.fixture(scope="module")
def front(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that libcuda.so.1. The fake driver is what it needs, by its path: the loader has only one of a name."""
    folder = tmp_path_factory.mktemp("front")
    (driver,) = (build / "fake").glob("libcuda.so.[0-9][0-9]*")
    behind = folder / driver.name
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{behind}", "-o", behind], check=True)
    makes = "int {0}(void **context) {{ calls++; *context = (void *)&calls; return 0; }}\n"
    source = "int calls;\nint front_calls(void) { int now = calls; calls = 0; return now; }\n"
    source += "".join(makes.format(name) for name in CONTEXTS)
    source += "".join(f"int {name}(void) {{ calls++; return 0; }}\n" for name in shared())
    (folder / "front.c").write_text(source)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-Wl,--no-as-needed",
        "-o",
        folder / "libcuda.so.1",
    ]
    subprocess.run([*command, folder / "front.c", behind], check=True)
    behind.unlink()
    behind.symlink_to(driver.resolve())
    return folder


PROGRAM = """
import ctypes, json, sys
c = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert c.cuInit(0) == 0
answers = {name: [getattr(c, name)(ctypes.byref(context), 0, 0, 0, None), c.front_calls()] for name in sys.argv[1:]}
print(json.dumps(answers))
"""


def request(stage: Stage, front: Path, *names: str, **env: str) -> tuple[dict[str, Any], str]:
    """What each function answers, and how often it was the driver's; and what the program wrote on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env=stage.env(LD_LIBRARY_PATH=f"{front}:{stage.build / 'fake'}", **env),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_for_a_graphics_api_is_refused_where_no_other_would_fit(
    measured: Stage, front: Path, name: str
) -> None:
    assert request(measured, front, name)[0] == {name: [0, 1]}
    measured.worker().must("alloc(650)")  # and 300 of its context: another context does not fit into 1000
    assert request(measured, front, name)[0] == {name: [OUT_OF_MEMORY, 0]}


@pytest.mark.parametrize("name", shared())
def test_a_program_that_shares_with_a_graphics_api_is_reported(stage: Stage, front: Path, name: str) -> None:
    answer, warning = request(stage, front, name)
    assert answer == {name: [0, 1]}
    assert warning.count(WORDS) == 1


def test_a_program_without_a_grant_is_not_reported(stage: Stage, front: Path) -> None:
    answers, warning = request(stage, front, *shared(), TANGRAM_GRANT="")
    assert set(map(tuple, answers.values())) == {(0, 1)}
    assert warning == ""


def test_a_driver_without_graphics_answers_that_it_has_none(stage: Stage) -> None:
    program = """
import ctypes, json, os
ours = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[-1])
print(json.dumps([getattr(ours, name)(None, None, 0, 0, None) for name in {names!r}]))
"""
    names = [*shared(), *CONTEXTS]
    assert set(json.loads(stage.python(program.format(names=names)))) == {801}
