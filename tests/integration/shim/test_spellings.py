"""3 GiB of variables in every spelling of PTX: they are counted, or the text counts as not understood and NVML's figure decides.

ptxas 13.5 was given each text of `ACCEPTED` and allocated 3 GiB. Those of `REFUSED` it refuses; another assembler may not.
"""

from __future__ import annotations

import time

import pytest

from tests.images import PTX, fatbin
from tests.integration.shim.conftest import MIB, Stage, wait_for
from tests.integration.shim.reader import Reader

LARGE = 3 << 30
HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n"
KERNEL = "\n.visible .entry k() { ret; }\n"

ACCEPTED = {
    "plain": ".global .align 8 .b8 x[3221225472];",
    "visible": ".visible .global .b8 x[3221225472];",
    "weak": ".weak .global .b8 x[3221225472];",
    "common": ".common .global .b8 x[3221225472];",
    "external": ".extern .global .b8 x[3221225472];",
    "in hexadecimal": ".global .b8 x[0XC0000000U];",
    "in octal": ".global .b8 x[030000000000];",
    "in binary": ".global .b8 x[0b11000000000000000000000000000000];",
    "vectors": ".global .v4 .f32 x[201326592];",
    "of 16 bytes": ".global .b128 x[201326592];",
    "of packed halves": ".global .f16x2 x[805306368];",
    "the second of three": ".global .b8 y, x[3221225472], z;",
    "behind an initialised one": ".global .b8 y = 1, x[3221225472], z[2] = {1,2};",
    "aligned twice": ".global .align 4 .align 8 .b8 x[3221225472];",
    "aligned widely": ".global .align 1048576 .b8 x[3221225472];",
    "managed": ".global .attribute(.managed) .align 4 .b8 x[3221225472];",
    "managed, stated first": ".attribute(.managed) .global .align 4 .b8 x[3221225472];",
    "in a function": ".func f() { .global .b8 x[3221225472]; ret; }",
    "in a kernel's blocks": ".visible .entry q() .maxntid 128,1,1 { { { .global .align 8 .b8 x[3221225472]; } } ret; }",
    "behind a label": ".visible .entry q() { L: bra M; M: .global .b8 x[3221225472]; ret; }",
    "behind a prototype": ".visible .entry q() { p: .callprototype _ (.param .u64 _); .global .b8 x[3221225472]; ret; }",
    "behind targets": ".visible .entry q() { L: ret; .global .b8 x[3221225472]; ts: .branchtargets L; }",
    "without blanks": ".visible.global.b8 x[3221225472];",
    "on many lines": ".global\r\n.b8\r\nx [ 3221225472 ]\r\n;\r\n",
    "with comments": ".global/**/.b8/*;*/x/*[1]*/[/*1*/3221225472/**/]//\n;",
    "behind a comment in a comment": "/* /* */ .global .b8 x[3221225472];",
    "behind a comment's backslash": "// a \\\n.global .b8 x[3221225472];",
    "behind a comment of another language": "// \N{LATIN SMALL LETTER E WITH ACUTE}\n.global .b8 x[3221225472];",
    "named like a register": ".global .b8 %x[3221225472];",
    "named like a directive": ".global .b8 global[3221225472];",
    "behind generic addresses": ".global .b8 y; .global .u64 p[2] = {generic(y)}; .global .b8 x[3221225472];",
    "behind a mask": ".global .b8 y[8]; .global .u8 z[2] = {0xff(y), 0xff00(y)}; .global .b8 x[3221225472];",
    "behind a number of bits": ".global .f32 y = 0f3F800000; .global .b8 x[3221225472];",
    "behind a section": ".section .foo { .b8 1 }\n.global .b8 x[3221225472];",
    "behind a texture": ".global .texref t; .global .surfref s[3]; .global .b8 x[3221225472];",
    "behind a pragma": '.pragma "nounroll";\n.global .b8 x[3221225472];',
    "behind a line of another file": '# 1 "x.c"\n.global .b8 x[3221225472];',
    "in two": ".global .b8 x[1610612736]; .global .b8 y[1610612736];",
    "in rows of many bytes": ".global .b8 x[3][1073741824];",
}
REFUSED = {
    "a product": ".global .b8 x[3*1024*1024*1024];",
    "brackets": ".global .b8 x[(3*1024)*(1024*1024)];",
    "a shift": ".global .b8 x[3 << 30];",
    "a sum": ".global .b8 x[3221225471+1];",
    "a difference": ".global .b8 x[3221225473-1];",
    "a sign": ".global .b8 x[-(-3221225472)];",
    "a choice": ".global .b8 x[1 ? 3221225472 : 1];",
    "a comparison": ".global .b8 x[(2>1)*3221225472];",
    "a cast": ".global .b8 x[(.u64)3221225472];",
    "a name": ".global .b8 x[WARP_SZ*100663296];",
    "a real number": ".global .b8 x[3221225472.0];",
    "another suffix": ".global .b8 x[3221225472LL];",
    "a sum that wraps around": ".global .b8 x[18446744073709551616+3221225472];",
    "an attribute of no name": ".global .attribute(.new(1, {2})) .b8 x[3221225472];",
    "a modifier of no name": ".global .new .b8 x[3221225472];",
    "a type of no name": ".global .e4m3 x[3221225472];",
    "elements that are named": ".global .b8 x[] = {[3221225471]=1};",
    "many of one name": ".global .b8 x<3>[1073741824];",
    "a macro": "#define N 3221225472\n.global .b8 x[N];",
    "a line that goes on": ".glo\\\nbal .b8 x[3221225472];",
    "behind a quote in a string": '.file 1 "a\\"b"\n.global .b8 x[3221225472];',
    "the modifier behind the type": ".global .b8 .align 8 x[3221225472];",
}


@pytest.mark.parametrize("way", ["as a text", "in a fatbin"])
@pytest.mark.parametrize("spelling", ACCEPTED)
def test_large_variables_are_counted_in_every_spelling_that_the_assembler_takes(
    reader: Reader, spelling: str, way: str
) -> None:
    text = (HEAD + ACCEPTED[spelling] + KERNEL + "\0").encode()
    needs = reader.needs(text if way == "as a text" else fatbin((PTX, 90, text)))
    assert LARGE <= needs.variables < LARGE + 4096


@pytest.mark.parametrize("spelling", REFUSED)
def test_large_variables_in_a_spelling_that_the_assembler_refuses_are_counted_or_not_understood(
    reader: Reader, spelling: str
) -> None:
    needs = reader.needs((HEAD + REFUSED[spelling] + KERNEL + "\0").encode())
    assert needs.variables >= LARGE or not needs.known


@pytest.mark.parametrize("kept", ["", "\0\0\0"])
def test_what_stands_behind_the_end_of_a_text_is_not_understood(reader: Reader, kept: str) -> None:
    """A fatbin states the length of its text; whether the driver stops at a zero is not documented."""
    text = HEAD + ".global .b8 x[5000];\n\0"
    assert reader.needs(fatbin((PTX, 90, (text + kept).encode()))).known
    assert not reader.needs(fatbin((PTX, 90, (text + kept + ".global .b8 y[3221225472];").encode()))).known


def test_variables_that_are_not_understood_are_charged_within_seconds_and_reported(measured: Stage) -> None:
    """The driver is of another mind than the library on where the string ends."""
    worker = measured.worker()
    began = time.monotonic()
    text = HEAD + f'.file 1 " .global .b8 x[{2000 * MIB}]; \\"\n' + KERNEL
    worker.must(f"module_bytes({text.encode().hex()!r})")
    wait_for(lambda: measured.status().over)
    assert time.monotonic() - began < 5.0
    of_memory = [(one.reason, one.pids) for one in measured.status().unenforced if "memory" in one.limits]
    assert of_memory == [("over-limit", (worker.pid,))]
    assert worker.request("alloc(1)")[0] == 2
