"""A stream whose capture ends, or begins, while another thread's allocation is in the driver: `__import__('captures').ended(...)`.

The driver takes a second for the call (`hang cuMemAllocAsync seconds=1`), so that what happens in the meantime is certain.
"""

from __future__ import annotations

import threading
import time
from ctypes import byref, c_void_p

from gpu import stream_alloc, stream_new
from gpu_driver import cuda
from gpu_graphs import capture, captured

RELAXED = 2
IN_THE_DRIVER_S = 0.3


def _allocates(stream: int, mib: int, meanwhile: object) -> list[int]:
    context, answer = c_void_p(), []
    assert cuda.cuCtxGetCurrent(byref(context)) == 0

    def allocate() -> None:
        cuda.cuCtxSetCurrent(context)
        answer.extend(stream_alloc(mib, stream))

    thread = threading.Thread(target=allocate)
    thread.start()
    time.sleep(IN_THE_DRIVER_S)
    assert meanwhile()[0] == 0  # type: ignore[operator]
    thread.join()
    return [*answer, stream]


def ended(mib: int) -> list[int]:
    """The result, the address and the stream."""
    stream = stream_new()[1]
    assert capture(stream, RELAXED)[0] == 0
    return _allocates(stream, mib, lambda: captured(stream))


def begun(mib: int) -> list[int]:
    stream = stream_new()[1]
    return _allocates(stream, mib, lambda: capture(stream, RELAXED))
