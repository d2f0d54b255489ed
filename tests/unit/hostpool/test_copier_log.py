"""What a copier's lines say of its pool."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hostpool.copier_log import MIB, CopierProgress


def test_progress_follows_the_lines() -> None:
    progress = CopierProgress()
    for line in (
        b"tangram-copier: 7 of 64 MiB of the pool are allocated\n",
        b"tangram-copier: 64 of 64 MiB of the pool are allocated\n",
        b"tangram-copier: 32 of 64 MiB of the pool are registered\n",
    ):
        progress.read(line)
    assert (progress.allocated_bytes, progress.registered_bytes, progress.ready) == (64 * MIB, 32 * MIB, False)
    progress.read(b"tangram-copier: the pool has pages of 4 KiB, the context 520 MiB\n")
    progress.read(b"tangram-copier: ready\n")
    assert (progress.pages, progress.context_mib, progress.ready) == ("pages of 4 KiB", 520, True)


def test_a_line_that_it_is_alive_changes_nothing_else() -> None:
    progress = CopierProgress(ready=True, last="ready")
    assert progress.read(b"tangram-copier: alive\n") == ""
    assert progress == CopierProgress(ready=True, last="ready", states_alive=True)


@given(st.binary(max_size=5000))
def test_any_bytes_are_a_line(line: bytes) -> None:
    progress = CopierProgress()
    assert len(progress.read(line)) <= 5000
