"""Every function of cuda.h and of the headers for graphics beside it is listed in docs/reference/memory-symbols.md, and the page is right."""

from __future__ import annotations

import re
import subprocess
import tempfile
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/memory-symbols.md"
HEADERS = sorted((ROOT / ".venv/lib").glob("python3*/site-packages/nvidia/*/include/cuda.h"))

TAKES_MEMORY = re.compile(r"Alloc|Create|Import|Open|Map|Instantiate|Pool|Load|Restore|Graphics\w+Register|Connect")
ONLY_REQUESTS = re.compile(r"Get|IsLoaded|TensorMap")


INTEROP = ("cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
OF_GRAPHICS = ("GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h")


def preprocessed(header: Path, more: str = "", others: tuple[str, ...] = INTEROP) -> str:
    """A cuda.h and the headers beside it, with the older forms and the per-thread twins.

    What those include of graphics APIs may not be installed: only its types would be missing, and nothing is compiled.
    """
    source = "".join(f"#include <{name}>\n" for name in ("cuda.h", *others))
    with tempfile.TemporaryDirectory() as empty:
        for name in OF_GRAPHICS:
            (Path(empty) / name).parent.mkdir(exist_ok=True)
            (Path(empty) / name).touch()
        command = [
            "gcc",
            "-E",
            "-P",
            "-D__CUDA_API_VERSION_INTERNAL",
            "-isystem",
            str(header.parent),
            "-idirafter",
            empty,
            "-",
        ]
        return subprocess.run(command, input=source + more, capture_output=True, text=True, check=True).stdout


def declared(header: Path, more: str = "", others: tuple[str, ...] = INTEROP) -> set[str]:
    """The functions of a cuda.h and of the headers beside it."""
    text = preprocessed(header, more, others)
    return set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", text))


@cache
def rows() -> dict[str, list[tuple[list[str], str, str]]]:
    """Of the page's two tables: names and families, the description, the test."""
    found: dict[str, list[tuple[list[str], str, str]]] = {}
    for title, body in re.findall(
        r"^## (Hooked|Not hooked)\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        for line in body.splitlines():
            if line.startswith("| `"):
                names, description, shown = (cell.strip() for cell in line.strip("|").split("|"))
                found.setdefault(title, []).append((re.findall(r"`([\w*]+)`", names), description, shown))
    return found


def names_of(title: str) -> list[str]:
    return [name for names, _, _ in rows()[title] for name in names]


def hooks() -> set[str]:
    """Those for memory's sake; what launch.c hooks takes time, not memory."""
    text = (ROOT / "shim/src/hooks/hooks.def").read_text()
    others = re.sub(r"/\* launch\.c \*/.*?(?=/\*)", "", text, flags=re.DOTALL)
    return set(re.findall(r"^HOOK(?:_NEEDED)?\((\w+),", others, re.MULTILINE))


def missing_from_page(functions: set[str]) -> list[str]:
    every = [*names_of("Hooked"), *names_of("Not hooked")]
    families = [name for name in every if "*" in name]

    def spoken_of(function: str) -> bool:
        if function in every:
            return True
        by_name = TAKES_MEMORY.search(function) and not ONLY_REQUESTS.search(function)
        return not by_name and any(fnmatchcase(function, family) for family in families)

    return sorted(function for function in functions if not spoken_of(function))


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.parts[-3])
def test_every_function_of_the_header_is_on_the_page(header: Path) -> None:
    functions = declared(header)
    assert len(functions) > 600
    assert missing_from_page(functions) == []


def test_there_is_a_header_to_compare_with() -> None:
    assert HEADERS


def test_the_headers_of_graphics_interop_are_read_too() -> None:
    of_graphics = declared(HEADERS[-1]) - declared(HEADERS[-1], others=())
    assert {"cuGraphicsGLRegisterBuffer", "cuEGLStreamConsumerConnect", "cuVDPAUCtxCreate_v2"} <= of_graphics
    assert len(of_graphics) > 30


@pytest.mark.parametrize(
    "name",
    [
        "cuMemAllocSomewhereNew",
        "cuMemAlloc_v3",
        "cuMemcpyCreate",
        "cuEntirelyNew",
        "cuGraphLaunch_v2",
        "cuGraphicsVulkanRegisterImage",
    ],
)
def test_a_function_of_a_newer_header_is_noticed(name: str) -> None:
    functions = declared(HEADERS[-1], f"CUresult {name}(void);\n")
    assert missing_from_page(functions) == [name]


def test_the_page_and_the_list_of_hooks_name_the_same_functions() -> None:
    assert set(names_of("Hooked")) == hooks()


def test_no_function_is_named_twice() -> None:
    every = [*names_of("Hooked"), *names_of("Not hooked")]
    assert sorted(every) == sorted(set(every))


def test_every_name_on_the_page_is_a_function_of_the_newest_header() -> None:
    functions = declared(HEADERS[-1])
    for name in (*names_of("Hooked"), *names_of("Not hooked")):
        assert any(fnmatchcase(function, name) for function in functions), name


def test_every_hook_is_in_the_file_that_the_page_names() -> None:
    for names, description, _ in rows()["Hooked"]:
        files = re.findall(r"\b(\w+\.c)\b", description)
        source = "".join(path.read_text() for file in files for path in (ROOT / "shim/src").rglob(file))
        assert files, names
        for name in names:
            assert re.search(rf"\b{name}\b", source), f"{name} is not in {files}"


def test_every_hook_is_shown_by_a_test_and_every_named_test_is_there() -> None:
    for title in ("Hooked", "Not hooked"):
        for names, _, shown in rows()[title]:
            if title == "Hooked":
                assert shown, names
            if shown:
                file, _, test = shown.partition(" ")
                assert f"def {test}(" in (Path(__file__).parent / file).read_text(), shown


def test_every_way_in_which_others_leaked_is_shown_by_a_test_that_is_there() -> None:
    (body,) = re.findall(r"^## Ways in which .*?\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    leaks = [line.strip("|").split("|")[-1].split() for line in body.splitlines() if ".py test_" in line]
    assert len(leaks) == 13, "as many as the design names"
    for file, test in leaks:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), test
