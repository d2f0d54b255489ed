"""How the host pool of a node is divided among its GPUs. Pure: sizes come in, sizes go out.

Each GPU gets an equal part. A pool file that exists keeps its size, if that is more: containers may be swapped out to it. Such files,
and those of GPUs that are not served, leave less to the other GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

GRAIN_BYTES: Final = 2 * 2**20
"""Specified: docs/reference/copier.md."""
MIB: Final = 2**20
GIB: Final = 2**30


def shares(pool_bytes: int, gpus: Collection[str], files: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each GPU's pool, multiples of the grain; 0 where nothing is left.

    `files`: GPU -> size of a file that exists, also of GPUs that are not in `gpus`. The sum is more than `pool_bytes` only if the files are.
    """
    sizes = {gpu: -(-size // GRAIN_BYTES) * GRAIN_BYTES for gpu, size in files.items()}
    found: dict[str, int] = {}
    left = pool_bytes - sum(size for gpu, size in sizes.items() if gpu not in gpus)
    while unset := [gpu for gpu in gpus if gpu not in found]:
        share = max(0, left) // len(unset) // GRAIN_BYTES * GRAIN_BYTES
        larger = {gpu: sizes[gpu] for gpu in unset if sizes.get(gpu, 0) > share}
        found |= larger or dict.fromkeys(unset, share)
        left -= sum(larger.values())
    return found


def too_large(pool_bytes: int, memory_bytes: int, reserve_bytes: int) -> str:
    """Why a node with so much memory has no pool of that size; empty when it may have."""
    most = max(0, memory_bytes - reserve_bytes)
    if pool_bytes <= most:
        return ""
    return (
        f"burst.hostPool is {_gib(pool_bytes)}: the node has {_gib(memory_bytes)} of memory, of which burst.hostReserve keeps "
        f"{_gib(reserve_bytes)}; it must be at most {_gib(most)}"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
