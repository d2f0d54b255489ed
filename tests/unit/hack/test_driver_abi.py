"""The extractor of the kernel driver's interface, on excerpts as NVIDIA's headers look, and its table beside the code that uses it."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from hack import driver_abi as extractor
from vgpu.gputime import driver_abi
from vgpu.gputime import resource_manager as rm

HEADER = """
#define ENTRIES (64)
#define COMMAND (0x2080110b) /* finn: Evaluated from "(X << 8) | Y" */
#define LENGTH  (0x000000100ULL)
typedef struct
{
    NvHandle hRoot;      // [IN] client handle; with a semicolon
    NvBool   bDisable;
    NvP64    pParms NV_ALIGN_BYTES(8);
    NV_DECLARE_ALIGNED(NvP64 pEvent, 8);
    NvU32    list[ENTRIES];
} ONE_PARAMETERS;
typedef struct TWO {
    NvU8 data[3];
    NvU32 last;
    NvU8 tail;
} TWO;
"""
METHODS = """
        /*flags=*/      0x10108u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x2080110bu,
        /*paramSize=*/  sizeof(ONE_PARAMETERS),
"""


def test_a_struct_is_laid_out_as_a_compiler_does() -> None:
    assert extractor.layout(HEADER, "ONE_PARAMETERS") == (
        24 + 256,
        {"hRoot": 0, "bDisable": 4, "pParms": 8, "pEvent": 16, "list": 24},
    )
    assert extractor.layout(HEADER, "TWO") == (12, {"data": 0, "last": 4, "tail": 8})


def test_the_layout_is_the_c_compilers(tmp_path: Path) -> None:
    types = "typedef unsigned NvHandle, NvU32; typedef unsigned char NvBool, NvU8; typedef void *NvP64;\n"
    macros = (
        "#define NV_ALIGN_BYTES(n) __attribute__((aligned(n)))\n#define NV_DECLARE_ALIGNED(d, n) d NV_ALIGN_BYTES(n)\n"
    )
    size, at = extractor.layout(HEADER, "ONE_PARAMETERS")
    checks = [f'_Static_assert(sizeof(ONE_PARAMETERS) == {size}, "");']
    checks += [
        f'_Static_assert(__builtin_offsetof(ONE_PARAMETERS, {name}) == {where}, "");' for name, where in at.items()
    ]
    source = tmp_path / "check.c"
    source.write_text(types + macros + HEADER + "\n".join(checks))
    subprocess.run(["cc", "-fsyntax-only", str(source)], check=True)


def test_numbers_and_flags_are_found_by_name() -> None:
    assert extractor.number(HEADER, "COMMAND") == 0x2080110B
    assert extractor.number(HEADER, "LENGTH") == 256
    assert extractor.method_flags(METHODS, 0x2080110B) == 0x10108
    assert extractor.channels(["x/clc86f.h", "x/clc86fsw.h", "x/cl2080.h", "x/cl506f.h"]) == ["506f", "c86f"]


@pytest.mark.parametrize("text", ["", "typedef struct { NvU32 x : 3; } ONE;", "typedef struct { struct y z; } ONE;"])
def test_what_it_cannot_read_it_does_not_guess(text: str) -> None:
    with pytest.raises(extractor.UnreadableHeader):
        extractor.layout(text, "ONE")
    with pytest.raises(extractor.UnreadableHeader):
        extractor.number(text, "COMMAND")
    with pytest.raises(extractor.UnreadableHeader):
        extractor.method_flags(text, 0x2080110B)


def test_tags_that_differ_make_no_table() -> None:
    with pytest.raises(extractor.UnreadableHeader, match=r"535\.1 and 600\.1 differ in rm_free"):
        extractor.python_text({"535.1": {"rm_free": (16, (0,))}, "600.1": {"rm_free": (24, (0,))}})


def test_the_table_is_what_is_packed() -> None:
    packed = rm.disable_parameters(0xC1D00001, [0x5C000001, 0x5C000002], disable=True)
    size, (disable, channels, only, rewind, event, client, channel) = driver_abi.RM_DISABLE
    assert len(packed) == size
    assert (packed[disable], packed[only], packed[rewind]) == (1, 0, 0)
    assert struct.unpack_from("<I", packed, channels) == (2,)
    assert struct.unpack_from("<Q", packed, event) == (0,)
    assert struct.unpack_from("<2I", packed, client) == (0xC1D00001, 0xC1D00001)
    assert struct.unpack_from("<2I", packed, channel) == (0x5C000001, 0x5C000002)
    argument = rm.control(1, 2, 3)
    size, (*_, status) = driver_abi.RM_CONTROL
    assert len(argument) == size
    argument[status : status + 4] = struct.pack("<I", 0x56)
    assert rm.status(argument) == 0x56
    request = 0xC0000000 | size << 16 | ord(driver_abi.MAGIC) << 8 | driver_abi.ESCAPE_CONTROL
    assert request == rm.CONTROL_REQUEST


def test_a_process_may_suspend_without_privileges_on_every_known_driver() -> None:
    assert driver_abi.DISABLE_CHANNELS_NON_PRIVILEGED


@pytest.mark.parametrize(
    ("version", "known"),
    [("580.159.04", True), ("535.54.03\n", True), ("612.3.1", False), ("530.41.03", False), ("", False), ("x", False)],
)
def test_a_branch_is_known_by_the_table(version: str, known: bool) -> None:
    assert rm.is_known(version) is known
