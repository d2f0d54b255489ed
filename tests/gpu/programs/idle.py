"""Work that a program leaves behind: driven by its parent, one JSON list a line in, one JSON object a line out, like kit/container.py.

python3 tests/gpu/programs/idle.py
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_uint, c_uint32, c_void_p, cast
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))
import cuda

IMAGE = b"""//fake spin us=param0
//fake broken us=1000 error=719
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u32 us)
{
    .reg .pred %p1;
    .reg .b32 %r1;
    .reg .b64 %rd<4>;
    ld.param.u32 %r1, [us];
    mul.wide.u32 %rd1, %r1, 1000;
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd1, %rd1, %rd2;
again:
    mov.u64 %rd3, %globaltimer;
    setp.lt.u64 %p1, %rd3, %rd1;
    @%p1 bra again;
    ret;
}
.visible .entry broken()
{
    trap;
    ret;
}
"""
IN_FLIGHT = 3
STEP_US = 5000
NON_BLOCKING = 1

context: Any = None
steps = 0


def _kernel(name: bytes) -> c_void_p:
    """In the current context."""
    module, function = c_void_p(), c_void_p()
    cuda.must("cuModuleLoadData", byref(module), IMAGE)
    cuda.must("cuModuleGetFunction", byref(function), module, name)
    return function


def _launch(function: c_void_p, us: int, stream: c_void_p | None = None, form: str = "cuLaunchKernel") -> None:
    value = c_uint32(us)
    parameters = (c_void_p * 1)(cast(byref(value), c_void_p))
    one = c_uint(1)
    cuda.must(form, function, one, one, one, one, one, one, c_uint(0), stream, parameters, None)


def _stream() -> c_void_p:
    made = c_void_p()
    cuda.must("cuStreamCreate", byref(made), c_uint(NON_BLOCKING))
    return made


def start() -> None:
    """cuInit and a context."""
    global context
    cuda.must("cuInit", c_uint(0))
    context = cuda.made_v2()


def work() -> None:
    """From now on kernels of 5 ms without a pause, three of them in flight; `count` returns how many were done."""

    def run() -> None:
        global steps
        cuda.must("cuCtxSetCurrent", context)
        function, streams = _kernel(b"spin"), [_stream() for _ in range(IN_FLIGHT)]
        for stream in streams:
            _launch(function, STEP_US, stream)
        while True:
            for stream in streams:
                cuda.must("cuStreamSynchronize", stream)
                steps += 1
                _launch(function, STEP_US, stream)

    threading.Thread(target=run, daemon=True).start()


def count() -> list[float]:
    """Steps that were done, and when that was, in seconds."""
    return [steps, time.monotonic()]


def thread_ended(us: int) -> None:
    """A kernel in the default stream of a thread that is no more. No code waits for it."""
    function = _kernel(b"spin")

    def run() -> None:
        cuda.must("cuCtxSetCurrent", context)
        _launch(function, us, form="cuLaunchKernel_ptsz")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def many_streams(us: int) -> None:
    """300 streams, each waited for and destroyed."""
    function, made = _kernel(b"spin"), [_stream() for _ in range(300)]
    for stream in made:
        _launch(function, us // 300, stream)
    for stream in made:
        cuda.must("cuStreamSynchronize", stream)
    for stream in made:
        cuda.must("cuStreamDestroy_v2", stream)


def streams_destroyed(us: int) -> None:
    """Streams that are destroyed while they have work. No code waits for it."""
    function, made = _kernel(b"spin"), [_stream() for _ in range(4)]
    for stream in made:
        _launch(function, us // 4, stream)
    for stream in made:
        cuda.must("cuStreamDestroy_v2", stream)


def sticky_error(us: int) -> int:
    """A kernel that traps: the context answers every call with its error from then on. Returns it."""
    spin, broken, one = _kernel(b"spin"), _kernel(b"broken"), c_uint(1)
    _launch(spin, us)
    cuda.must("cuLaunchKernel", broken, one, one, one, one, one, one, c_uint(0), None, None, None)
    return cuda.call("cuCtxSynchronize")


def green_destroyed(us: int) -> None:
    """Streams of a green context that is destroyed while they have work."""
    green, stream = cuda.green(), c_void_p()
    function = _kernel(b"spin")
    try:
        cuda.must("cuGreenCtxStreamCreate", byref(stream), green, c_uint(NON_BLOCKING), c_int(0))
    except cuda.Missing:
        stream = _stream()
    _launch(function, us, stream)
    cuda.must("cuGreenCtxDestroy", green)
    cuda.must("cuCtxSetCurrent", context)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        start, work, count, thread_ended, many_streams, streams_destroyed, sticky_error, green_destroyed,
    )
}  # fmt: skip


def answer(line: str) -> dict[str, Any]:
    """Calls what the line names."""
    function, *arguments = json.loads(line)
    try:
        return {"ok": FUNCTIONS[function](*arguments)}
    except cuda.Missing as missing:
        return {"missing": str(missing)}
    except cuda.Refused as refused:
        return {"refused": str(refused), "code": refused.code}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)
