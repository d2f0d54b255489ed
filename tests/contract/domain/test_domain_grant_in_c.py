"""The library's reader of grants, in C, and ours understand the same documents alike.

The edge cases of a grant are in grant-cases.yaml, and both readers must agree on each; random texts cover the rest.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.domain.pairs import DOCUMENTS, FOLDER, kind
from tests.examples import examples
from vgpu.api.codec import grant_from_text
from vgpu.api.errors import BadDocument

ROOT: Final = Path(__file__).parents[3]
GRANTS: Final = [document for document in DOCUMENTS if kind(document) == ".grant"]
CASES: Final = yaml.safe_load((FOLDER / "grant-cases.yaml").read_text())
TEXT: Final[str] = CASES["text"]
ANSWER_BYTES: Final = 16384

Reader: TypeAlias = Callable[[bytes], list[str]]


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """shim/tests/read_grant.c with shim/src/grant.c and shim/src/lines.c."""
    library = tmp_path_factory.mktemp("reader") / "read_grant.so"
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-shared", "-fPIC"]
    command += [f"-I{ROOT}/shim/include", f"-I{ROOT}/shim/src"]
    sources = [ROOT / "shim/tests/read_grant.c", ROOT / "shim/src/grant.c", ROOT / "shim/src/lines.c"]
    subprocess.run([*command, "-o", library, *sources], check=True)
    function = ctypes.CDLL(str(library)).read_grant
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    function.restype = None

    def read(text: bytes) -> list[str]:
        answer = ctypes.create_string_buffer(ANSWER_BYTES)
        function(text, len(text), answer, ANSWER_BYTES)
        return answer.value.decode(errors="replace").split("\n")

    return read


def in_python(text: bytes) -> list[str]:
    """What the C reader should answer; the reason of a refusal is left out."""
    try:
        grant = grant_from_text(text.decode())
    except (BadDocument, UnicodeDecodeError):
        return ["refused"]
    gpus = [f"{gpu.uuid[4:].replace('-', '')} {gpu.mib}" for gpu in grant.gpus]
    return [f"clear {'yes' if grant.clear else 'no'}", *gpus]


def understood(in_c: Reader, text: bytes) -> list[str]:
    """What the C reader answers, without the reason of a refusal."""
    answer = in_c(text)
    return ["refused"] if answer[0].startswith("refused: line ") else answer


def piece(text: str) -> str:
    """What stands in a case: {a*3} is aaa, and {gpus*3} are three GPUs."""
    gpu = "card GPU-00000000-0000-0000-0000-{:012x} mib=1 core_percent=0\n"
    text = re.sub(r"\{gpus\*(\d+)\}", lambda found: "".join(map(gpu.format, range(int(found[1])))), text)
    return re.sub(r"\{(.)\*(\d+)\}", lambda found: found[1] * int(found[2]), text)


@pytest.mark.parametrize(("was", "becomes", "verdict"), [pytest.param(*c[1:], id=c[0]) for c in CASES["cases"]])
def test_both_readers_agree_with_the_table(in_c: Reader, was: str, becomes: str, verdict: str) -> None:
    assert was in TEXT
    text = TEXT.replace(was, piece(becomes), -1 if was == "\n" else 1).encode()
    assert (in_python(text) != ["refused"]) == (verdict == "read")
    assert understood(in_c, text) == in_python(text)


@pytest.mark.parametrize("document", GRANTS, ids=lambda path: path.name)
def test_the_library_reads_a_grant_as_we_do(in_c: Reader, document: Path) -> None:
    assert understood(in_c, document.read_bytes()) == in_python(document.read_bytes())


def test_a_grant_that_is_cut_anywhere_is_refused_by_both(in_c: Reader) -> None:
    for length in range(len(TEXT)):
        assert in_python(TEXT[:length].encode()) == understood(in_c, TEXT[:length].encode()) == ["refused"]


LINES: Final = TEXT.splitlines(keepends=True)
SCRAPS: Final = [
    b"0",
    b"1",
    b"9",
    b" ",
    b"\n",
    b"\r",
    b"\t",
    b"\0",
    b"+",
    b"-",
    b"/",
    b"=",
    b"a",
    b"G",
    b"MIG-",
    b"GPU-",
    b"\xff",
    b"\xc3\xa9",
    b"end\n",
]
SCRAPS += [line.encode() for line in LINES] + [b"16777215", b"16777216", b"4294967296", b"18446744073709551617"]


@settings(max_examples=examples(1500), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 80) | st.just(0), st.sampled_from(SCRAPS) | st.binary(max_size=3)), max_size=4))  # fmt: skip
def test_whatever_becomes_of_a_grant_both_readers_agree(in_c: Reader, changes: list[tuple[int, int, bytes]]) -> None:
    text = TEXT.encode()
    for at, gone, put in changes:
        text = text[:at] + put + text[at + gone :]
    assert understood(in_c, text) == in_python(text)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=14))
def test_lines_in_any_order_mean_the_same_to_both(in_c: Reader, lines: list[str]) -> None:
    text = "".join(lines).encode()
    assert understood(in_c, text) == in_python(text)


@settings(max_examples=examples(500), deadline=None)
@given(st.integers(0, 2**65), st.integers(0, 1000), st.sampled_from(["", "0", "+", "-", " "]))
def test_every_number_means_the_same_to_both(in_c: Reader, mib: int, percent: int, before: str) -> None:
    text = TEXT.replace("mib=1024", f"mib={before}{mib}").replace("core_percent=50", f"core_percent={percent}").encode()
    assert understood(in_c, text) == in_python(text)
