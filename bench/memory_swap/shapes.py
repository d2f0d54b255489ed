"""Allocations of a program with the shape of a model: what PyTorch requests of the driver for it, in each of the forms that are measured.

Pure. The model is a decoder of 32 layers in 16 bits, 15.3 GiB: four matrices of attention, three of the feed-forward part and two norms each layer,
and two embeddings. Its sizes are those of a published model of 8 billion parameters (specified: the issue's "16 GB model").

    segments     the caching allocator: 2 MiB for what is at most 1 MiB, 20 MiB for less than 10 MiB, whole pages of 2 MiB for the rest
    expandable   the same allocator with expandable_segments: physical blocks of 20 MiB in one range of addresses
    2 MiB        8,000 blocks in the full size
    managed      the allocator's segments in memory of cuMemAllocManaged
"""

from __future__ import annotations

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
PAGE: Final = 2 * MIB
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
"""PyTorch's own: kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer of CUDACachingAllocator."""
LAYERS: Final = 32
FORMS: Final = ("segments", "expandable", "2 MiB", "managed")
FAKE_PART: Final = 64
"""On the fake driver everything is so much smaller."""


def tensors(total_bytes: int) -> list[int]:
    """Bytes of each tensor of a model that has so much in all, about. A model of another size has matrices of another size."""
    part = total_bytes / sum(_tensors_of_8b())
    return [max(256, round(size * part / 256) * 256) for size in _tensors_of_8b()]


def _tensors_of_8b() -> list[int]:
    layer = [32 * MIB, 8 * MIB, 8 * MIB, 32 * MIB, 112 * MIB, 112 * MIB, 112 * MIB, 8192, 8192]
    return [1002 * MIB, *(size for _ in range(LAYERS) for size in layer), 1002 * MIB]


def segments(sizes: list[int]) -> list[int]:
    """Bytes of each segment that the caching allocator requests for these tensors."""
    small = sum(size for size in sizes if size <= SMALL)
    middle = sum(size for size in sizes if SMALL < size < MIDDLE)
    large = [-(-size // PAGE) * PAGE for size in sizes if size >= MIDDLE]
    return [
        *large,
        *[MIDDLE_SEGMENT] * -(-middle // MIDDLE_SEGMENT),
        *[SMALL_SEGMENT] * -(-small // SMALL_SEGMENT),
    ]


def blocks(form: str, total_bytes: int) -> list[int]:
    """Bytes of each request to the driver in that form. Raises KeyError for another form."""
    whole = sum(segments(tensors(total_bytes)))
    return {
        "segments": segments(tensors(total_bytes)),
        "managed": segments(tensors(total_bytes)),
        "expandable": [MIDDLE_SEGMENT] * -(-whole // MIDDLE_SEGMENT),
        "2 MiB": [PAGE] * -(-total_bytes // PAGE),
    }[form]
