"""A wheel that contains the library is for the machine that the library is for; one without it is for any.

Read by hatchling. The tag comes from the library itself: its ELF header names the architecture, and its symbol versions the oldest glibc.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = Path("tangramctl/lib/libtangram.so")
MACHINES = {62: "x86_64", 183: "aarch64"}
"""e_machine of ELF. Source: elf.h."""
OLDEST = 17
"""glibc 2.17, the oldest of the manylinux tags of both architectures."""


class WrongLibrary(Exception):
    """The library is none that a wheel can have."""


def platform_tag(library: bytes) -> str:
    """`manylinux_2_17_x86_64` and the like."""
    if library[:5] != b"\x7fELF\x02" or len(library) < 20:
        raise WrongLibrary(f"{LIBRARY}: no 64-bit ELF file")
    (machine,) = struct.unpack_from("<H", library, 18)
    if machine not in MACHINES:
        raise WrongLibrary(f"{LIBRARY}: machine {machine} of ELF: it must be one of {MACHINES}")
    minors = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)", library)]
    return f"manylinux_2_{max([OLDEST, *minors])}_{MACHINES[machine]}"


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """Sets the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root) / LIBRARY
        if version == "standard" and library.exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes())}"
