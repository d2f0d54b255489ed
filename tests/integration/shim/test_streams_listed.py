"""Every function of cuda.h that takes a stream, and every copy and fill, is reported as work or puts none on the GPU."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from tests.integration.shim.test_symbols import HEADERS, ROOT, preprocessed

NO_WORK = {
    "cuStreamGet*": "queries",
    "cuStreamIsCapturing*": "queries",
    "cuStreamQuery*": "queries",
    "cuStreamSynchronize*": "waits",
    "cuStreamDestroy*": "ends the stream",
    "cuStreamSetAttribute*": "sets",
    "cuStreamCopyAttributes*": "sets",
    "cuStreamBeginCapture*": "what is captured runs with a graph's launch",
    "cuStreamBeginRecaptureToGraph*": "what is captured runs with a graph's launch",
    "cuStreamEndCapture*": "what is captured runs with a graph's launch",
    "cuStreamUpdateCaptureDependencies*": "what is captured runs with a graph's launch",
    "cuStreamWaitEvent*": "an order between streams: the work that is waited for was reported",
    "cuEventRecord*": "a mark after work that was reported",
    "cuStreamAttachMemAsync*": "sets which work may use managed memory, and moves none of it",
    "cuGraphicsMapResources*": "an order between CUDA and a graphics API",
    "cuGraphicsUnmapResources*": "an order between CUDA and a graphics API",
    "cuGLMapBufferObject*": "an order between CUDA and a graphics API",
    "cuGLUnmapBufferObject*": "an order between CUDA and a graphics API",
    "cuMemAllocAsync*": "gives out addresses; the library counts the memory",
    "cuMemAllocFromPoolAsync*": "gives out addresses; the library counts the memory",
    "cuMemFreeAsync*": "takes addresses back; the library counts the memory",
    "cuMemMapArrayAsync*": "maps pages; the library counts the memory",
}
"""Of functions that take a stream: the reason for which they are not reported as work. By shell pattern."""
IN_THE_DEFAULT_STREAM = re.compile(r"cuMem(cpy|set)[A-Z0-9]?\w*|cuLaunch(Grid)?")


@cache
def parameters(header: Path) -> dict[str, str]:
    """Of each function of the header, the older forms and the per-thread twins with it."""
    found = re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(([^;]*?)\)\s*;", preprocessed(header), re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def puts_work(functions: dict[str, str]) -> set[str]:
    """As far as a prototype shows: it takes a stream, or its name is a copy's, a fill's or a launch's."""
    takes = {name for name, text in functions.items() if re.search(r"\bCUstream (?!\*)|\bCUstream(?=,|$)", text)}
    return takes | {name for name in functions if IN_THE_DEFAULT_STREAM.fullmatch(name)}


@cache
def reported() -> set[str]:
    """What has a line in copies.def, and what the C code calls `activity_launch` for."""
    source = ROOT / "shim/src"
    listed = set(
        re.findall(
            r"^(?:INTO|AT_ONCE|ACROSS)(?:_BOX)?\((\w+),", (source / "gputime/copies.def").read_text(), re.MULTILINE
        )
    )
    for file, macros in {
        "gputime/launch.c": "INTO_STREAM|BOTH|COPIES_BOTH|LAUNCHES|LAUNCHES_BOTH",
        "memory/graph.c": "RUN",
    }.items():
        for macro, name in re.findall(rf"^({macros})\((\w+)[,)]", (source / file).read_text(), re.MULTILINE):
            listed |= {name, f"{name}_ptsz"} if macro.endswith("BOTH") else {name}
    return listed | {"cuLaunchCooperativeKernelMultiDevice"}


def unaccounted(functions: dict[str, str]) -> list[str]:
    known = reported()
    return sorted(
        name for name in puts_work(functions) - known if not any(fnmatchcase(name, pattern) for pattern in NO_WORK)
    )


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.parts[-3])
def test_every_function_that_takes_a_stream_is_reported_or_listed(header: Path) -> None:
    functions = parameters(header)
    assert len(puts_work(functions)) > 150
    assert unaccounted(functions) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cuMemTeleportAsync", "CUdeviceptr to, CUstream hStream"),
        ("cuMemcpy4D", "void *how"),
        ("cuMemcpy2D_v3", "void *how"),
    ],
)
def test_a_function_of_a_newer_header_is_noticed(name: str, text: str) -> None:
    assert unaccounted({name: text}) == [name]


@pytest.mark.parametrize("pattern", NO_WORK)
def test_a_reason_is_for_a_function_that_exists_and_is_not_reported(pattern: str) -> None:
    named = {name for header in HEADERS for name in parameters(header) if fnmatchcase(name, pattern)}
    assert named
    assert not named & reported()


def test_what_is_reported_is_hooked_under_the_name_that_the_header_has() -> None:
    hooked = set(re.findall(r"^HOOK\((\w+),", (ROOT / "shim/src/hooks/hooks.def").read_text(), re.MULTILINE))
    copies = set(
        re.findall(
            r"^(?:INTO|AT_ONCE|ACROSS)(?:_BOX)?\((\w+),",
            (ROOT / "shim/src/gputime/copies.def").read_text(),
            re.MULTILINE,
        )
    )
    assert len(copies) > 120
    assert not hooked & copies
    assert reported() - copies <= hooked
    assert copies <= set(parameters(HEADERS[-1]))
