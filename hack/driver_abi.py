"""What of the NVIDIA kernel driver's interface Tangram reads and writes, extracted from each tag of NVIDIA's open kernel modules.

    python -m hack.driver_abi MIRROR            writes vgpu/gputime/driver_abi.py and shim/src/gputime/driver_abi.h
    python -m hack.driver_abi MIRROR --check    exit status 1 where they differ from the tags

MIRROR is a git directory of github.com/NVIDIA/open-gpu-kernel-modules with its tags. Tags of the branches 535 and later are read. Offsets are
computed as compilers for x86-64 and AArch64 lay the structs out: each checks them when it compiles the header.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, cast

REPOSITORY: Final = Path(__file__).resolve().parent.parent
PYTHON: Final = REPOSITORY / "vgpu/gputime/driver_abi.py"
HEADER: Final = REPOSITORY / "shim/src/gputime/driver_abi.h"
OLDEST: Final = 535

_INC: Final = "src/common/sdk/nvidia/inc"
_UNIX: Final = "src/nvidia/arch/nvalloc/unix/include"
_NVOS: Final = f"{_INC}/nvos.h"
_FIFO: Final = f"{_INC}/ctrl/ctrl2080/ctrl2080fifo.h"
_GPU: Final = f"{_INC}/ctrl/ctrl2080/ctrl2080gpu.h"
_ESCAPES: Final = f"{_UNIX}/nv_escape.h"
_NUMBERS: Final = f"{_UNIX}/nv-ioctl-numbers.h"
_IOCTL: Final = f"{_UNIX}/nv-ioctl.h"
_ENGINES: Final = f"{_INC}/class/cl2080_notification.h"
_GROUP: Final = f"{_INC}/class/cla06c.h"
_METHODS: Final = "src/nvidia/generated/g_subdevice_nvoc.c"
_FLAGS: Final = "src/nvidia/inc/kernel/rmapi/control.h"
_CLASSES: Final = f"{_INC}/class/"

STRUCTS: Final[Mapping[str, tuple[str, str]]] = {
    "rm_free": (_NVOS, "NVOS00_PARAMETERS"),
    "rm_alloc_short": (_NVOS, "NVOS21_PARAMETERS"),
    "rm_alloc": (_NVOS, "NVOS64_PARAMETERS"),
    "rm_control": (_NVOS, "NVOS54_PARAMETERS"),
    "rm_xfer": (_IOCTL, "nv_ioctl_xfer_t"),
    "rm_disable": (_FIFO, "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS"),
    "rm_gid": (_GPU, "NV2080_CTRL_GPU_GET_GID_INFO_PARAMS"),
}
"""Structs of shim/src/gputime/rm.h that have all fields, and where each is from."""

_GROUP_PARAMETERS: Final = "NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS"
_SIZES: Final = {
    "NvHandle": 4, "NvV32": 4, "NvU32": 4, "NvS32": 4, "NvP64": 8, "NvU64": 8, "NvU8": 1, "NvBool": 1, "NvU16": 2,
}  # fmt: skip
Facts = dict[str, object]


class UnreadableHeader(Exception):
    """A header in a form that no earlier header has."""


def number(text: str, name: str) -> int:
    """Value of `#define NAME VALUE`, where VALUE is a number, in brackets or not."""
    found = re.search(rf"^#define\s+{name}\s+\(?(0x[0-9A-Fa-f]+|\d+)(?:U|L)*\)?", text, re.MULTILINE)
    if found is None:
        raise UnreadableHeader(f"no number {name}")
    return int(found[1], 0)


def layout(text: str, name: str) -> tuple[int, dict[str, int]]:
    """Size of a struct and the offset of each field."""
    found = re.search(rf"typedef struct\s*\w*\s*\{{([^{{}}]*)\}}\s*{name};", text)
    if found is None:
        raise UnreadableHeader(f"no struct {name}")
    at, widest, offsets = 0, 1, {}
    body = re.sub(r"/\*.*?\*/|//[^\n]*", "", found[1], flags=re.DOTALL)
    for line in filter(None, (part.strip() for part in body.split(";"))):
        declared = re.sub(r"NV_DECLARE_ALIGNED\((.*),\s*8\)", r"\1", line).replace("NV_ALIGN_BYTES(8)", "").strip()
        field = re.fullmatch(r"(\w+)\s+(\w+)\s*(?:\[(\w+)\])?", declared)
        if field is None or field[1] not in _SIZES:
            raise UnreadableHeader(f"struct {name}: field {line!r}")
        size = _SIZES[field[1]]
        count = 1 if field[3] is None else int(field[3]) if field[3].isdecimal() else number(text, field[3])
        at = -(-at // size) * size
        offsets[field[2]] = at
        at, widest = at + size * count, max(widest, size)
    return -(-at // widest) * widest, offsets


def method_flags(text: str, method: int) -> int:
    """Flags of a control command in the generated table of methods."""
    row = rf"/\*flags=\*/\s*(0x[0-9a-f]+)u,\s*/\*accessRight=\*/\s*0x[0-9a-f]+u,\s*/\*methodId=\*/\s*{method:#x}u"
    found = re.search(row, text)
    if found is None:
        raise UnreadableHeader(f"no method {method:#x}")
    return int(found[1], 16)


def facts(read: Callable[[str], str], classes: Iterable[str]) -> Facts:
    """Of one tag: `read` returns the text of a file, `classes` are the names of the class headers."""
    facts: Facts = {
        "magic": re.search(r"NV_IOCTL_MAGIC\s+'(.)'", read(_NUMBERS))[1],  # type: ignore[index]
        "escape_free": number(read(_ESCAPES), "NV_ESC_RM_FREE"),
        "escape_control": number(read(_ESCAPES), "NV_ESC_RM_CONTROL"),
        "escape_alloc": number(read(_ESCAPES), "NV_ESC_RM_ALLOC"),
        "escape_xfer": number(read(_NUMBERS), "NV_IOCTL_BASE") + _added(read(_NUMBERS), "NV_ESC_IOCTL_XFER_CMD"),
        "disable_channels": number(read(_FIFO), "NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS"),
        "disable_channels_entries": number(read(_FIFO), "NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES"),
        "get_gid_info": number(read(_GPU), "NV2080_CTRL_CMD_GPU_GET_GID_INFO"),
        "channel_group": number(read(_GROUP), "KEPLER_CHANNEL_GROUP_A"),
        "group_engine_at": layout(read(_NVOS), _GROUP_PARAMETERS)[1]["engineType"],
        "engine_compute_first": number(read(_ENGINES), "NV2080_ENGINE_TYPE_GRAPHICS"),
        "engine_compute_last": number(read(_ENGINES), "NV2080_ENGINE_TYPE_GR7"),
        "engine_copy_first": number(read(_ENGINES), "NV2080_ENGINE_TYPE_COPY0"),
    }
    flags = method_flags(read(_METHODS), int(str(facts["disable_channels"])))
    facts["disable_channels_non_privileged"] = bool(flags & number(read(_FLAGS), "RMCTRL_FLAGS_NON_PRIVILEGED"))
    for ours, (path, theirs) in STRUCTS.items():
        size, offsets = layout(read(path), theirs)
        facts[ours] = (size, tuple(offsets.values()))
    facts["channel_classes_low"] = sorted({int(one, 16) & 0xFF for one in channels(classes)})
    return facts


def channels(names: Iterable[str]) -> list[str]:
    """Classes of channels, such as c86f, among names of headers."""
    return sorted(found[1] for name in names if (found := re.search(r"\bcl([0-9a-f]{2}6f)\.h$", name)))


def _added(text: str, name: str) -> int:
    found = re.search(rf"#define\s+{name}\s+\(NV_IOCTL_BASE \+ (\d+)\)", text)
    if found is None:
        raise UnreadableHeader(f"no number {name}")
    return int(found[1])


def tags(mirror: Path) -> list[str]:
    """Of the branches that are read, oldest first."""
    names = (name for name in _git(mirror, "tag").split() if re.fullmatch(r"\d+(\.\d+)+", name))
    return sorted((n for n in names if int(n.split(".")[0]) >= OLDEST), key=lambda n: [int(p) for p in n.split(".")])


def of_tag(mirror: Path, tag: str) -> Facts:
    """Raises UnreadableHeader that names the tag."""
    cache: dict[str, str] = {}

    def read(path: str) -> str:
        if path not in cache:
            cache[path] = _git(mirror, "show", f"{tag}:{path}")
        return cache[path]

    try:
        return facts(read, _git(mirror, "ls-tree", "--name-only", tag, _CLASSES).split())
    except (UnreadableHeader, TypeError) as error:
        raise UnreadableHeader(f"{tag}: {error}") from None


def python_text(of: Mapping[str, Facts]) -> str:
    """The table for the arbiter. Raises UnreadableHeader where tags differ: then one table is not enough."""
    one = _agreed(of)
    branches = sorted({int(tag.split(".")[0]) for tag in of})
    lines = [
        '"""The kernel driver\'s interface by driver branch. Generated by hack/driver_abi.py from NVIDIA\'s open kernel modules; do not edit.',
        "",
        f"All {len(of)} tags of the {len(branches)} branches below agree in everything that Tangram reads and writes, from {min(of, key=_key)} to",
        f"{max(of, key=_key)}. A struct is its size and the offsets of its fields; their names are those of shim/src/gputime/rm.h.",
        '"""',
        "",
        "from typing import Final",
        "",
        f"BRANCHES: Final = frozenset({{{', '.join(map(str, branches))}}})",
        f"TAGS: Final = {len(of)}",
    ]
    for name, value in one.items():
        lines.append(f"{name.upper()}: Final = {_literal(name, value)}")
    return "\n".join(lines) + "\n"


def header_text(of: Mapping[str, Facts]) -> str:
    """What rm.h is held to when it is compiled."""
    one = _agreed(of)
    fields = {
        "rm_free": ("client", "parent", "handle", "status"),
        "rm_alloc_short": ("client", "parent", "handle", "object_class", "parameters", "parameters_bytes", "status"),
        "rm_alloc": (
            "client",
            "parent",
            "handle",
            "object_class",
            "parameters",
            "rights",
            "parameters_bytes",
            "flags",
            "status",
        ),
        "rm_control": ("client", "object", "command", "flags", "parameters", "parameters_bytes", "status"),
        "rm_xfer": ("escape", "bytes", "argument"),
        "rm_disable": ("disable", "channels", "only_scheduling", "rewind", "preempt_event", "client", "channel"),
        "rm_gid": ("index", "flags", "bytes", "data"),
    }
    constants = {
        "RM_ESCAPE_FREE": "escape_free", "RM_ESCAPE_CONTROL": "escape_control", "RM_ESCAPE_ALLOC": "escape_alloc",
        "RM_ESCAPE_XFER": "escape_xfer", "RM_COMMAND_DISABLE_CHANNELS": "disable_channels", "RM_CHANNELS": "disable_channels_entries",
        "RM_COMMAND_GET_GID": "get_gid_info", "RM_GROUP": "channel_group", "RM_ENGINE_COMPUTE_FIRST": "engine_compute_first",
        "RM_ENGINE_COMPUTE_LAST": "engine_compute_last", "RM_ENGINE_COPY_FIRST": "engine_copy_first",
        "offsetof(struct rm_group_parameters, engine)": "group_engine_at",
    }  # fmt: skip
    lines = [
        "/* driver_abi.h - rm.h against NVIDIA's open kernel modules. Generated by hack/driver_abi.py; do not edit. */",
        "#ifndef TANGRAM_DRIVER_ABI_H",
        "#define TANGRAM_DRIVER_ABI_H",
        "",
        "#include <stddef.h>",
        "",
    ]
    for ours, name in constants.items():
        lines.append(f'_Static_assert({ours} == {one[name]}, "{name}");')
    for struct, names in fields.items():
        size, offsets = cast("tuple[int, tuple[int, ...]]", one[struct])
        lines.append(f'_Static_assert(sizeof(struct {struct}) == {size}, "{struct}");')
        for name, at in zip(names, offsets, strict=True):
            lines.append(f'_Static_assert(offsetof(struct {struct}, {name}) == {at}, "{struct}.{name}");')
    return "\n".join([*lines, "", "#endif"]) + "\n"


def _agreed(of: Mapping[str, Facts]) -> Facts:
    first, one = next(iter(of.items()))
    for tag, other in of.items():
        differ = [name for name in one if one[name] != other[name]]
        if differ:
            raise UnreadableHeader(
                f"{first} and {tag} differ in {', '.join(differ)}: {[(one[n], other[n]) for n in differ]}"
            )
    return one


def _literal(name: str, value: object) -> str:
    if isinstance(value, list):
        return f"({', '.join(f'0x{one:X}' for one in value)},)"
    if name in ("disable_channels", "get_gid_info", "channel_group") or name.startswith("escape"):
        return f"0x{value:X}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _key(tag: str) -> list[int]:
    return [int(part) for part in tag.split(".")]


def _git(mirror: Path, *words: str) -> str:
    command = ["git", "-C", str(mirror), *words]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode(errors="replace")


def main() -> None:
    """Writes or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirror", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        of = {tag: of_tag(options.mirror, tag) for tag in tags(options.mirror)}
        texts = {PYTHON: python_text(of), HEADER: header_text(of)}
    except UnreadableHeader as error:
        sys.exit(f"hack/driver_abi.py: {error}")
    for path, text in texts.items():
        if not options.check:
            path.write_text(text)
        elif path.read_text() != text:
            sys.stdout.writelines(
                difflib.unified_diff(path.read_text().splitlines(True), text.splitlines(True), str(path), "tags")
            )
            sys.exit(f"hack/driver_abi.py: {path} differs from the tags: run it without --check")


if __name__ == "__main__":
    main()
