"""Folders for a pool on file systems with and without huge pages."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

MIB = 2**20
HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


@contextmanager
def pool_folder(kind: str, mib: int) -> Iterator[Path]:
    """A folder for a pool of that size: `hugetlb`, `transparent` or `plain`. Raises OSError or CalledProcessError if this machine has none."""
    with ExitStack() as stack:
        mounted = kind != "plain" or shutil.disk_usage("/dev/shm").free < mib * MIB
        at = Path(tempfile.mkdtemp(prefix="tangram-bench-", dir=None if mounted else "/dev/shm"))
        stack.callback(shutil.rmtree, at, ignore_errors=True)
        if kind == "hugetlb":
            before = HUGE_PAGES.read_text()
            stack.callback(HUGE_PAGES.write_text, before)
            HUGE_PAGES.write_text(str(mib // 2))
            if int(HUGE_PAGES.read_text()) < mib // 2:
                raise OSError(f"the kernel reserves {HUGE_PAGES.read_text().strip()} huge pages of {mib // 2}")
        if mounted:
            huge = "advise" if kind == "transparent" else "never"
            options = [] if kind == "hugetlb" else ["-o", f"huge={huge},size={mib + 64}m"]
            words = ["mount", "-t", "hugetlbfs" if kind == "hugetlb" else "tmpfs", *options, "none", str(at)]
            subprocess.run(words, check=True, capture_output=True)
            stack.callback(subprocess.run, ["umount", str(at)], check=False)
        yield at
