"""Build the library for arm64 and run its tests under qemu's user mode: `make arm64`.

    build/arm64           the library, the programs beside it, the fake driver's libraries and test programs, by the zig of the lock file
    build/arm64/native    the fake driver's daemon, for this machine

qemu runs a program for another processor, with this machine's kernel. So it shows that the code is right for aarch64: registers, calling convention, layouts, atomics as
qemu has them. It shows no ioctl of a real driver, no time, no larger pages, and no sanitizer runs under it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hack.cluster import debian
from hack.kubectl import ROOT

BUILD: Final = ROOT / "build/arm64"
NATIVE: Final = BUILD / "native"
TARGET: Final = "aarch64-linux-gnu.2.17"
"""glibc came to aarch64 with this version."""

PACKAGES: Final = {
    "qemu-aarch64": "qemu-user",
    "/usr/aarch64-linux-gnu/lib/libc.so.6": "libc6-arm64-cross",
    "/usr/aarch64-linux-gnu/lib/libgcc_s.so.1": "libgcc-s1-arm64-cross",
}
EMULATOR: Final = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
UNITS: Final = ("unit", "unit_time", "unit_code", "unit_blocks", "unit_burst", "unit_created", "unit_pooled", "unit_opened", "unit_heap")  # fmt: skip
"""Those that take a second or two there. The others (unit_pages, unit_bound) take ten times as long, and have nothing of their own that depends on the processor."""
PROBES: Final = ("probe-direct", "probe-dlsym", "probe-procaddr")

ARENA: Final = "-DARENA_BYTES='((uint64_t)4<<30)'"
"""Of the fake driver's memory in a process: qemu notes each page of a map, and 16 TiB take it minutes."""


def commands(python: str = sys.executable, jobs: int = os.cpu_count() or 1) -> list[list[str]]:
    """What is run, in this order."""
    make = ["make", "--no-print-directory", "-s", f"-j{jobs}", "-Otarget", "-C", "shim", f"PYTHON={python}"]
    built = [str(BUILD / "tests" / name) for name in (*UNITS, *PROBES)]
    zig = f"{python} -m ziglang cc -target {TARGET}"
    return [
        [*make, f"CC={zig}", f"BUILD={BUILD}", f"FAKE_EXTRA={ARENA}", "UNITS_AS_LIBRARY=1", "lib", "fake", *built],
        [*make, f"BUILD={NATIVE}", "fake"],
        *([*EMULATOR, str(BUILD / "tests" / name)] for name in UNITS),
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration/arm64"],
    ]


def run(lines: Sequence[Sequence[str]], folder: Path = ROOT) -> int:
    """Status of the first that failed, else 0."""
    environment = os.environ | {"TANGRAM_ARM64_BUILD": str(BUILD), "TANGRAM_SHIM_BUILD": str(NATIVE), "MAKEFLAGS": ""}
    for line in lines:
        status = subprocess.run(line, cwd=folder, env=environment, check=False).returncode
        if status:
            print(f"arm64: {' '.join(line)}: ended with {status}", file=sys.stderr)
            return status
    return 0


def main() -> int:
    """With the word `packages`: install what the machine lacks, as root, and build nothing."""
    packages = debian.missing(PACKAGES)
    if sys.argv[1:] == ["packages"]:
        if packages:
            print(f"arm64: installing {' '.join(packages)}", file=sys.stderr)
            debian.install(packages)
        return 0
    if packages:
        print(f"arm64: missing {', '.join(packages)}: `make arm64` installs them", file=sys.stderr)
        return 1
    return run(commands())


if __name__ == "__main__":
    sys.exit(main())
