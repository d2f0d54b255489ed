"""The division of the host pool, against one that gives grain after grain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.pool_shares import GRAIN_BYTES, shares, too_large

NAMES = ("a", "b", "c", "d")
FILES = st.dictionaries(st.sampled_from((*NAMES, "gone")), st.integers(0, 40 * GRAIN_BYTES), max_size=5)


def slowly(pool_bytes: int, gpus: list[str], files: dict[str, int]) -> dict[str, int]:
    """What exists stays; then every GPU that has least gets one grain more, until not all of those can."""
    grains = {gpu: -(-files.get(gpu, 0) // GRAIN_BYTES) for gpu in gpus}
    taken = {gpu: -(-size // GRAIN_BYTES) for gpu, size in files.items()}
    free = pool_bytes // GRAIN_BYTES if pool_bytes >= 0 else 0
    free -= sum(taken[gpu] for gpu in taken if gpu not in gpus)
    level = 0
    while gpus:
        wanted = {gpu: max(grains[gpu], level + 1) for gpu in gpus}
        if sum(wanted.values()) > free or level > free:
            break
        level += 1
    return {gpu: max(grains[gpu], level) * GRAIN_BYTES for gpu in gpus}


@given(st.integers(0, 100 * GRAIN_BYTES), st.lists(st.sampled_from(NAMES), unique=True), FILES)
def test_each_gpu_gets_an_equal_part_and_no_file_becomes_smaller(
    pool_bytes: int, gpus: list[str], files: dict[str, int]
) -> None:
    found = shares(pool_bytes, gpus, files)
    assert found == slowly(pool_bytes, gpus, files)
    assert all(found[gpu] >= files.get(gpu, 0) for gpu in gpus)
    assert all(size % GRAIN_BYTES == 0 for size in found.values())


def test_a_pool_that_leaves_less_than_the_reserve_is_refused_with_the_largest_size_that_is_not() -> None:
    gib = 2**30
    assert too_large(60 * gib, 64 * gib, 4 * gib) == ""
    assert too_large(60 * gib + 1, 64 * gib, 4 * gib).endswith("it must be at most 60.0 GiB")
    assert too_large(1, 2 * gib, 4 * gib).endswith("it must be at most 0.0 GiB")
