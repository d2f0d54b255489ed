"""Kernels that touch all of a range of memory, for a real GPU and for the fake driver, which reads the comments before them.

    spin(us)                          takes that long by the GPU's clock, whether it runs or is suspended
    write(at, bytes, seed)            cell i becomes i x 2654435761 + seed
    add(at, bytes, times)             adds `times` to each cell. The fake driver adds one, `times` times
    compare(at, bytes, seed, to)      adds to the cell `to` how many cells are not as `write` leaves them with that seed
    count(at, bytes, word, to)        adds to the cell `to` how many cells are that word. Not on the fake driver, whose memory the host reads

A cell has 32 bits. Runs in the process that is measured; standard library only.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint, c_uint32, c_uint64, c_void_p
from typing import Final

import cuda

MULTIPROCESSORS: Final = 16
THREADS, BLOCKS_PER_MULTIPROCESSOR = 256, 8

_FAKE = """//fake spin us=param0
//fake write us=0 does=write at=param0 bytes=param1 seed=param2
//fake add us=0 does=add at=param0 bytes=param1 times=param2
//fake compare us=0 does=compare at=param0 bytes=param1 seed=param2 to=param3
"""
_SPIN = """.visible .entry spin(.param .u32 p_us)
{
 .reg .pred %p<2>;
 .reg .b32 %r<2>;
 .reg .b64 %rd<5>;
 ld.param.u32 %r1, [p_us];
 mul.wide.u32 %rd1, %r1, 1000;
 mov.u64 %rd2, %globaltimer;
again:
 mov.u64 %rd3, %globaltimer;
 sub.s64 %rd4, %rd3, %rd2;
 setp.lt.u64 %p1, %rd4, %rd1;
 @%p1 bra again;
 ret;
}
"""
_LOOP = """.visible .entry NAME(.param .u64 p_at, .param .u64 p_bytes, .param .u32 p_wordPARAMETER)
{
 .reg .pred %p<3>;
 .reg .b32 %r<8>;
 .reg .b64 %rd<9>;
 ld.param.u64 %rd1, [p_at];
 ld.param.u64 %rd2, [p_bytes];
 ld.param.u32 %r1, [p_word];
 shr.u64 %rd2, %rd2, 2;
 mov.u32 %r2, %ctaid.x;
 mov.u32 %r3, %ntid.x;
 mov.u32 %r4, %tid.x;
 mul.wide.u32 %rd3, %r2, %r3;
 cvt.u64.u32 %rd4, %r4;
 add.u64 %rd3, %rd3, %rd4;
 mov.u32 %r2, %nctaid.x;
 mul.wide.u32 %rd4, %r2, %r3;
 mov.u32 %r5, 0;
again:
 setp.ge.u64 %p1, %rd3, %rd2;
 @%p1 bra done;
 shl.b64 %rd5, %rd3, 2;
 add.u64 %rd5, %rd1, %rd5;
BODY add.u64 %rd3, %rd3, %rd4;
 bra again;
done:
END ret;
}
"""
_PATTERN = " cvt.u32.u64 %r6, %rd3;\n mul.lo.u32 %r6, %r6, 2654435761;\n add.u32 %r6, %r6, %r1;\n"
_TELL = (
    " setp.eq.u32 %p2, %r5, 0;\n @%p2 bra out;\n ld.param.u64 %rd6, [p_to];\n red.global.add.u32 [%rd6], %r5;\nout:\n"
)
_BODIES = {
    "write": _PATTERN + " st.global.u32 [%rd5], %r6;\n",
    "add": " ld.global.u32 %r6, [%rd5];\n add.u32 %r6, %r6, %r1;\n st.global.u32 [%rd5], %r6;\n",
    "compare": _PATTERN + " ld.global.u32 %r7, [%rd5];\n setp.ne.u32 %p2, %r7, %r6;\n @%p2 add.u32 %r5, %r5, 1;\n",
    "count": " ld.global.u32 %r7, [%rd5];\n setp.eq.u32 %p2, %r7, %r1;\n @%p2 add.u32 %r5, %r5, 1;\n",
}
_TYPES: Final[dict[str, tuple[type[c_uint32] | type[c_uint64], ...]]] = {
    "spin": (c_uint32,),
    "write": (c_uint64, c_uint64, c_uint32),
    "add": (c_uint64, c_uint64, c_uint32),
    "compare": (c_uint64, c_uint64, c_uint32, c_uint64),
    "count": (c_uint64, c_uint64, c_uint32, c_uint64),
}


def ptx() -> str:
    """The module's text."""
    text = _FAKE + ".version 7.0\n.target sm_70\n.address_size 64\n" + _SPIN
    for name, body in _BODIES.items():
        tells = name in ("compare", "count")
        one = _LOOP.replace("NAME", name).replace("PARAMETER", ", .param .u64 p_to" if tells else "")
        text += one.replace("BODY", body).replace("END", _TELL if tells else "")
    return text


class Kernels:
    """The kernels in the current context."""

    def __init__(self) -> None:
        module, processors = c_void_p(), c_int()
        cuda.must("cuModuleLoadData", byref(module), ptx().encode())
        cuda.must("cuDeviceGetAttribute", byref(processors), c_int(MULTIPROCESSORS), c_int(0))
        self._blocks = max(1, processors.value) * BLOCKS_PER_MULTIPROCESSOR
        self._functions: dict[str, c_void_p] = {}
        for name in _TYPES:
            found = c_void_p()
            cuda.must("cuModuleGetFunction", byref(found), module, name.encode())
            self._functions[name] = found

    def launch(self, name: str, *values: int, stream: c_void_p | None = None) -> None:
        """Queue one. A spin has one thread, every other kernel fills the GPU."""
        kept = [kind(value & 0xFFFFFFFFFFFFFFFF) for kind, value in zip(_TYPES[name], values, strict=True)]
        parameters = (c_void_p * len(kept))(*(ctypes.addressof(one) for one in kept))
        blocks, threads = (1, 1) if name == "spin" else (self._blocks, THREADS)
        one = c_uint(1)
        cuda.must(
            "cuLaunchKernel", self._functions[name], c_uint(blocks), one, one, c_uint(threads), one, one, c_uint(0), stream,
            parameters, None,
        )  # fmt: skip
