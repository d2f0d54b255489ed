"""The library's account of the driver's pages, replayed against what an H200 lost at each of 12,000 random steps."""

from __future__ import annotations

import csv
import ctypes
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRACES = ROOT / "bench/granularity/traces-h200.csv"
PAGE = 2 * 2**20
PAGE_EMPTY = 2
ROOM = 1 << 16
"""More than a struct pages takes. Zeros are an empty one."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("pages") / "pages.so"
    source = ROOT / "shim/src/memory/pages.c"
    subprocess.run(
        ["gcc", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-pthread", f"-I{ROOT}/shim/src", "-o", built, source],
        check=True,
    )
    library = ctypes.CDLL(str(built))
    library.pages_rounded.restype = ctypes.c_uint64
    library.pages_rounded.argtypes = [ctypes.c_uint64]
    library.pages_put.restype = ctypes.c_bool
    library.pages_put.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    library.pages_end.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.pages_fit.restype = ctypes.c_bool
    library.pages_fit.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    return library


@pytest.mark.parametrize("trace", ["small", "log", "middle", "around"])
def test_the_account_follows_what_the_gpu_lost_step_by_step(pages: ctypes.CDLL, trace: str) -> None:
    with TRACES.open(newline="") as file:
        steps = [row for row in csv.DictReader(file) if row["trace"] == trace]
    assert len(steps) == 3000
    account, group = ctypes.create_string_buffer(ROOM), ctypes.c_void_p(1)
    large: dict[int, int] = {}
    charged, seen = 0, Counter[str]()
    for step in steps:
        at, size = int(step["address"], 16), int(step["bytes"])
        if size < 0 and at in large:
            charged -= large.pop(at)
        elif size < 0:
            charged -= PAGE if pages.pages_end(account, at) == PAGE_EMPTY else 0
        elif (rounded := pages.pages_rounded(size)) >= PAGE:
            large[at] = rounded
            charged += rounded
        else:
            fits = pages.pages_fit(account, group, rounded)
            fresh = pages.pages_put(account, group, at, rounded)
            assert fresh is not fits, "what is reserved before the call is what the call then takes"
            charged += PAGE if fresh else 0
            seen["a page"] += fresh
            seen["shared"] += not fresh
        assert charged == int(step["lost_bytes"]), step
    assert seen["a page"] > 0, "the trace has small requests"
    assert seen["shared"] > 0
