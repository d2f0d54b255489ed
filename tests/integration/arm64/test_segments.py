"""What is built for arm64 loads on kernels with pages of 4 to 64 KiB, beside a C library as old as those that came with aarch64."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

PAGE = 65536
BUILT = ("libtangram.so", "tangram-trial", "tangram-copier")


def readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", option, "-W", path], capture_output=True, text=True, check=True).stdout


def segments(path: Path, kind: str) -> list[tuple[int, int, int, int]]:
    """(offset, address, bytes in memory, alignment) of each."""
    found = re.findall(rf"^  {kind} +(\S+) (\S+) \S+ \S+ (\S+) [RWE ]+ (\S+)$", readelf("-l", path), re.MULTILINE)
    return [(int(offset, 16), int(at, 16), int(size, 16), int(align, 16)) for offset, at, size, align in found]


@pytest.mark.parametrize("name", BUILT)
def test_segments_do_not_share_a_page_of_64_kib(arm64: Path, name: str) -> None:
    assert "AArch64" in readelf("-h", arm64 / name)
    found = segments(arm64 / name, "LOAD")
    assert len(found) >= 3
    pages = set[int]()
    for offset, at, size, align in found:
        assert align == PAGE
        assert at % PAGE == offset % PAGE
        mine = set(range(at // PAGE, (at + size - 1) // PAGE + 1))
        assert not mine & pages
        pages |= mine


def test_the_part_that_is_read_only_once_it_is_relocated_ends_with_a_page(arm64: Path) -> None:
    ((_, at, size, _),) = segments(arm64 / "libtangram.so", "GNU_RELRO")
    assert (at + size) % PAGE == 0


@pytest.mark.parametrize("name", BUILT)
def test_no_function_of_the_c_library_is_newer_than_2_17(arm64: Path, name: str) -> None:
    versions = {tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", readelf("-V", arm64 / name))}
    assert versions
    assert max(versions) <= (2, 17)
