"""A walk along the driver's functions, for a program of gpu.py on a driver that lacks one of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_uint64, c_void_p
from typing import Any

import gpu
import gpu_code
import gpu_graphs

MISSING = -1
"""Instead of a CUresult: the program itself did not find the function."""


def called(call: Callable[[], list[Any]]) -> list[Any]:
    try:
        return call()
    except AttributeError:
        return [MISSING]


def _of(call: Callable[..., list[Any]], made: list[Any], *more: object) -> list[Any]:
    """Of something that may not have been made."""
    return called(lambda: call(made[1], *more)) if made[0] == 0 else made


def _destroyed_stream() -> list[Any]:
    """That has work left."""
    _, stream = gpu.stream_new()
    return [gpu.busy(1, stream)[0] or gpu.cuda.cuStreamDestroy_v2(c_void_p(stream)), 0]


def _late_free(suffix: str = "") -> list[Any]:
    """Plain memory, freed in a stream's order."""
    rc, at = gpu.alloc(1)
    return [rc or gpu.stream_free(at, 0, suffix)[0]]


def _captured() -> list[Any]:
    """An allocation in a capture."""
    _, stream = gpu.stream_new()
    rc = gpu_graphs.capture(stream)[0] or gpu.stream_alloc(1, stream)[0]
    made = gpu_graphs.captured(stream)
    return [rc or gpu_graphs.graph_ready(made[1])[0]]


def _announced() -> list[Any]:
    """Work, with the empty kernel before it."""
    library = ctypes.CDLL(None)
    library.tangram_begin()
    library.tangram_end()
    return [0]


def _pointer(name: str) -> list[Any]:
    rc, at = gpu.alloc(1)
    raw = ctypes.create_string_buffer(64)
    return [rc or getattr(gpu.cuda, name)(raw, c_uint64(at)), raw.raw.hex()]


def _looked_up() -> list[Any]:
    at, status = c_void_p(), ctypes.c_int()
    rc = gpu.cuda.cuGetProcAddress_v2(b"cuMemAlloc", byref(at), 3020, c_uint64(0), byref(status))
    return [rc or gpu.cuda.cuGetProcAddress(b"cuMemAlloc", byref(at), 3020, c_uint64(0))]


STEPS: dict[str, Callable[[], list[Any]]] = {
    "a function that is looked up": _looked_up,
    "managed memory": lambda: gpu.managed(1),
    "a stream's own memory": lambda: _of(gpu.stream_free, gpu.stream_alloc(1)),
    "a thread's own stream": lambda: _of(gpu.stream_free, gpu.stream_alloc(1, 0, "_ptsz")),
    "another stream's": lambda: gpu.stream_alloc(1, gpu.stream_new()[1]),
    "freed late": _late_free,
    "freed late in a thread's own stream": lambda: _late_free("_ptsz"),
    "a destroyed stream": _destroyed_stream,
    "a capture": _captured,
    "announced work": _announced,
    "work": lambda: gpu.busy(1),
    "a handle of memory": lambda: _pointer("cuIpcGetMemHandle"),
    "a block that is mapped": lambda: _of(gpu.map_block, gpu.create(2), 2),
    "an array": lambda: _of(gpu.array_end, gpu.array2d(64, 64)),
    "a mipmapped array": lambda: _of(gpu.mipmap_end, gpu.mipmap(64, 64, 2)),
    "external memory": lambda: _of(gpu.external_end, gpu.external(1)),
    "a graph in a graph": lambda: _of(
        gpu_graphs.graph_run, _of(gpu_graphs.graph_ready, gpu_graphs.graph_in_graph(gpu_graphs.graph(1)[1]))
    ),
    "a module": lambda: _of(gpu_code.launch_once, _of(gpu_code.function_of, gpu_code.code(16))),
    "a library": lambda: _of(gpu_code.launch_once, _of(gpu_code.kernel_of, gpu_code.code(16, 4, "cuLibraryLoadData"))),
    "a deep kernel": lambda: gpu_code.deep(4096),
    "a deep graph": lambda: gpu_graphs.deep_graph(4096),
    "a pool": lambda: _of(gpu.pool_end, gpu.pool_new()),
    "a context": lambda: _of(gpu.context_end, gpu.context_new()),
    "a stack": lambda: gpu.set_limit(0, 2048),
    "figures": gpu.info,
    "a stream's end": gpu.stream_sync,
    "a context's end": gpu.context_sync,
    "an event": gpu.event_sync,
}


def walk() -> list[Any]:
    """The code of each step."""
    return [0, {name: called(step)[0] for name, step in STEPS.items()}]


_FREED: dict[str, Callable[[int], list[Any]]] = {
    "alloc": gpu.free,
    "stream_alloc": gpu.stream_free,
    "default_pool": gpu.stream_free,
    "create": gpu.release,
    "array_of": gpu.array_end,
    "graph_of": gpu_graphs.graph_end,
}
PATHS = tuple(_FREED)
_taken: list[tuple[str, int]] = []


def _take(path: str, mib: int) -> list[Any]:
    made: dict[str, Callable[[], list[Any]]] = {
        "alloc": lambda: gpu.alloc(mib),
        "stream_alloc": lambda: gpu.stream_alloc(mib),
        "default_pool": lambda: called(lambda: gpu.pool_alloc(mib, gpu.pool_of()[1])),
        "create": lambda: gpu.create(mib),
        "array_of": lambda: gpu.array2d(1024, 256 * mib),
        "graph_of": lambda: _graph_that_ran(mib),
    }
    return called(made[path])


def _graph_that_ran(mib: int) -> list[Any]:
    rc, made = gpu_graphs.graph_ready(gpu_graphs.graph(mib)[1])
    return [rc or gpu_graphs.graph_run(made)[0], made]


def fill(path: str, mib: int, count: int) -> list[Any]:
    """Takes so much as is given."""
    for _ in range(count):
        rc, *made = _take(path, mib)
        if rc != 0:
            return [0, rc]
        _taken.append((path, made[0]))
    return [0, 0]


def empty() -> list[Any]:
    """Frees it."""
    while _taken:
        path, made = _taken.pop()
        _of(_FREED[path], [0, made])
    called(gpu.context_sync)
    called(lambda: gpu.pool_trim(gpu.pool_of()[1]))
    called(gpu_graphs.graph_trim)
    return [0]
