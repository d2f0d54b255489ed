"""Arrays and mipmapped arrays: how their rows, heights and depths are padded, and which share a block."""

from __future__ import annotations

import ctypes as c
from functools import partial

from bench.granularity.driver import SUCCESS, Gpu, Rows, cuda, measure, ok, ptr, size


class Array3D(c.Structure):
    _fields_ = [
        ("width", size),
        ("height", size),
        ("depth", size),
        ("format", c.c_int),
        ("channels", c.c_uint),
        ("flags", c.c_uint),
    ]


BITS = {0x01: 8, 0x02: 16, 0x20: 32, 0x10: 16}


SHAPES = (
    (1, 0, 0, 0), (1000, 0, 0, 0), (16384, 0, 0, 0), (65536, 0, 0, 0), (131072, 0, 0, 0), (16, 16, 0, 0), (64, 64, 0, 0), (100, 100, 0, 0),
    (256, 256, 0, 0), (500, 300, 0, 0), (1000, 1000, 0, 0), (1024, 1024, 0, 0), (2048, 2048, 0, 0), (5000, 3, 0, 0), (3, 5000, 0, 0),
    (32768, 1, 0, 0), (32, 32, 32, 0), (100, 100, 10, 0), (128, 128, 128, 0), (33, 65, 17, 0), (7, 3, 129, 0), (64, 64, 6, 4), (64, 64, 10, 1),
    (500, 0, 10, 1), (256, 256, 0, 2), (1000, 700, 3, 2),
)  # fmt: skip
"""Width, height, depth, flags: 1 layered, 2 surface, 4 cubemap."""
MIPMAPS = (
    (64, 64, 0, 7), (256, 256, 0, 9), (1000, 1000, 0, 10), (1024, 1024, 0, 1), (1024, 1024, 0, 11), (128, 128, 128, 8), (4096, 0, 0, 13),
    (2048, 2048, 0, 12),
)  # fmt: skip
"""Width, height, depth, levels."""


def arrays(rows: Rows) -> None:
    """Arrays of every shape and format, one and several, then mipmapped ones."""
    gpu = Gpu()
    for form, channels in ((0x01, 1), (0x01, 4), (0x20, 1), (0x20, 2), (0x20, 4), (0x10, 2)):
        for width, height, depth, flags in SHAPES:
            requested = width * max(height, 1) * max(depth, 1) * BITS[form] // 8 * channels
            case = f"{width}x{height}x{depth} format={form:#x} channels={channels} flags={flags}"
            how = Array3D(width, height, depth, form, channels, flags)
            for count in (1, 20, 100):
                if requested * count <= 8 << 30:
                    measure(
                        gpu, rows, "arrays", case, count, requested * count, partial(_arrays, count, how), _end_arrays
                    )
    for width, height, depth, levels in MIPMAPS:
        for form, channels in ((0x01, 4), (0x20, 1), (0x20, 4)):
            texels = sum(max(width >> n, 1) * max(height >> n, 1) * max(depth >> n, 1) for n in range(levels))
            requested = texels * BITS[form] // 8 * channels
            case = f"{width}x{height}x{depth} levels={levels} format={form:#x} channels={channels}"
            how = Array3D(width, height, depth, form, channels, 0)
            for count in (1, 20):
                measure(
                    gpu,
                    rows,
                    "mipmaps",
                    case,
                    count,
                    requested * count,
                    partial(_mipmaps, count, how, levels),
                    _end_mipmaps,
                )


def _arrays(count: int, how: Array3D) -> list[object]:
    made: list[object] = []
    for _ in range(count):
        array = ptr()
        ok(cuda.cuArray3DCreate_v2(c.byref(array), c.byref(how)), "cuArray3DCreate")
        made.append(array)
    return made


def _end_arrays(made: list[object]) -> None:
    for one in made:
        cuda.cuArrayDestroy(one)


def _mipmaps(count: int, how: Array3D, levels: int) -> list[object]:
    made: list[object] = []
    for _ in range(count):
        array = ptr()
        ok(cuda.cuMipmappedArrayCreate(c.byref(array), c.byref(how), c.c_uint(levels)), "cuMipmappedArrayCreate")
        made.append(array)
    return made


def _end_mipmaps(made: list[object]) -> None:
    for one in made:
        cuda.cuMipmappedArrayDestroy(one)


def make_array(how: Array3D, levels: int = 0) -> ptr | None:
    array = ptr()
    rc = (
        cuda.cuMipmappedArrayCreate(c.byref(array), c.byref(how), c.c_uint(levels))
        if levels
        else cuda.cuArray3DCreate_v2(c.byref(array), c.byref(how))
    )
    return array if rc == SUCCESS else None


class Requirements(c.Structure):
    _fields_ = [("size", size), ("alignment", size), ("reserved", c.c_uint * 4)]


def requirements(gpu: Gpu, how: Array3D, levels: int = 0) -> str:
    """What an array of this kind would need by the driver, which reports it only for one whose memory comes later."""
    later = Array3D(how.width, how.height, how.depth, how.format, how.channels, how.flags | 0x80)
    array, got = make_array(later, levels), Requirements()
    if array is None:
        return "refused"
    request, end = (
        (cuda.cuMipmappedArrayGetMemoryRequirements, cuda.cuMipmappedArrayDestroy)
        if levels
        else (cuda.cuArrayGetMemoryRequirements, cuda.cuArrayDestroy)
    )
    rc = request(c.byref(got), array, gpu.device)
    end(array)
    return f"size={got.size} alignment={got.alignment}" if rc == SUCCESS else f"answered {rc}"


def per_block(gpu: Gpu, rows: Rows, how: Array3D, levels: int = 0) -> None:
    """How many arrays of this kind fit into the first block, or the loss of one that is larger than a block."""
    case = f"{how.width}x{how.height}x{how.depth} format={how.format:#x} channels={how.channels} flags={how.flags} levels={levels}"
    start, made = gpu.free(), []
    destroy = cuda.cuMipmappedArrayDestroy if levels else cuda.cuArrayDestroy
    first = 0
    while len(made) < 1100:
        array = make_array(how, levels)
        if array is None:
            break
        made.append(array)
        lost = start - gpu.free()
        first = first or lost
        if lost > first:
            break
    lost = start - gpu.free()
    for array in made:
        destroy(array)
    rows.add(
        "per block",
        case,
        len(made) - 1,
        "",
        first,
        start - gpu.free(),
        lost,
        requirements(gpu, how, levels) if made else "refused",
    )


def arrays_per_block(rows: Rows) -> None:
    gpu = Gpu()
    for width in (1, 63, 64, 65, 128, 200, 256, 500, 512, 1000, 1024, 4096):
        for height in (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 127, 128, 129, 200, 256, 257, 500, 1000, 5000):
            per_block(gpu, rows, Array3D(width, height, 0, 0x01, 1, 0))
    for form, channels in ((0x01, 4), (0x20, 1), (0x20, 4)):
        for width, height in ((1, 1), (4, 4), (16, 16), (17, 5), (100, 100), (256, 256), (1000, 30)):
            for flags in (0, 2):
                per_block(gpu, rows, Array3D(width, height, 0, form, channels, flags))
    for width, height in ((1, 1), (64, 8), (100, 20), (128, 128), (33, 65)):
        for depth in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 100):
            per_block(gpu, rows, Array3D(width, height, depth, 0x01, 1, 0))
            per_block(gpu, rows, Array3D(width, height, depth, 0x01, 1, 1))
    for width in (100, 4096):
        per_block(gpu, rows, Array3D(width, 0, 10, 0x20, 1, 1))
    for side in (4, 64, 100):
        per_block(gpu, rows, Array3D(side, side, 6, 0x20, 1, 4))
        per_block(gpu, rows, Array3D(side, side, 12, 0x20, 1, 5))
    for width, height, depth, levels in (
        (16, 0, 0, 5),
        (1000, 0, 0, 10),
        (64, 64, 0, 7),
        (64, 64, 0, 1),
        (64, 64, 0, 2),
        (64, 64, 0, 3),
        (100, 50, 0, 7),
        (256, 256, 0, 9),
        (500, 300, 0, 9),
        (1024, 1024, 0, 11),
        (32, 32, 32, 6),
        (33, 17, 9, 6),
        (64, 64, 6, 7),
    ):
        for form, channels in ((0x01, 1), (0x01, 4), (0x20, 4)):
            per_block(gpu, rows, Array3D(width, height, depth, form, channels, 1 if depth == 6 else 0), levels)
