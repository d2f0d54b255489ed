"""The fake driver stays small: code that is not a table only gets less."""

from __future__ import annotations

import re

from tests.built import REPOSITORY

FAKE = REPOSITORY / "shim" / "fake"
TABLES = {"fake_cuda.h", "fake_cuda_values.h", "fake_nvml.h", "nvos.h"}
"""Headers that only declare NVIDIA's ABI; so do the .def files."""
MOST = 6_464
"""Of these, some 750 are kernels that compute, queued copies, and their suspends, and 50 are what an IPC handle's own process and a second opening get, and 31 are
pools of the program, which shrink at a synchronisation, count what is requested to the byte, and are exported only by handle types that they have. 110 are locks that a
stopped process does not keep from others. 135 are what a GPU may use of another one's memory, and 147 are GPUs that are plugged in and out and what their sensors show.
193 are GPU instances that NVML creates, places and removes. 25 are errors of links, and the time that a call of NVML takes. 3 are coherent memory, and 5 programs of another architecture that are emulated. Lower it with the code."""


def code_lines(text: str) -> int:
    """Lines with more than comments and blanks."""
    return sum(1 for line in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines() if line.strip())


def test_code_that_is_no_table_does_not_grow():
    sources = [path for path in FAKE.rglob("*") if path.suffix in {".c", ".h"} and path.name not in TABLES]
    assert sum(code_lines(path.read_text()) for path in sources) <= MOST


def test_no_file_is_longer_than_four_hundred_lines():
    sources = [path for path in FAKE.rglob("*") if path.suffix in {".c", ".h"}]
    assert [path.name for path in sources if len(path.read_text().splitlines()) > 400] == []
