"""At which paths a pod with a share mounts nothing."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mount_paths import ALLOWED, REFUSED
from vgpu.api.contract import CONTAINER_DIR, EARLIER_CONTAINER_DIR, PRELOAD_FILE, mounts
from vgpu.api.mount_paths import PATTERN, cleaned, refusal

words = st.lists(
    st.sampled_from(
        ["", ".", "..", "etc", "ld.so.preload", ".tangram", "run", "var", "tangram", "proc", "self", "data"]
    ),
    max_size=7,
)
DEFENDED = (CONTAINER_DIR, EARLIER_CONTAINER_DIR, f"/var{EARLIER_CONTAINER_DIR}", PRELOAD_FILE)


@pytest.mark.parametrize(("path", "reason"), REFUSED.items())
def test_a_path_that_covers_the_library_is_refused_in_every_spelling(path: str, reason: str) -> None:
    assert reason in str(refusal(path))


@pytest.mark.parametrize("path", ALLOWED)
def test_other_paths_are_the_users(path: str) -> None:
    assert refusal(path) is None


@given(words, st.sampled_from(["", "/", "//"]))
def test_the_obvious_slow_reading_of_a_path_comes_to_the_same(parts: list[str], begin: str) -> None:
    path = begin + "/".join(parts)
    found = [part for part in path.split("/") if part not in ("", ".")]
    clean = PurePosixPath("/", *found)
    expected = (
        ".." in found
        or clean in (PurePosixPath("/"), PurePosixPath("/etc"))
        or any(clean.is_relative_to(place) for place in DEFENDED)
        or (found[:1] == ["proc"] and len(found) > 2)
    )
    assert (refusal(path) is not None) == expected
    assert bool(re.search(PATTERN, cleaned(path))) == expected, "as the admission policy reads it"


@given(words)
def test_what_is_cleaned_stays_clean_and_is_judged_the_same(parts: list[str]) -> None:
    path = "/".join(parts)
    assert cleaned(cleaned(path)) == cleaned(path)
    assert refusal(cleaned(path)) == refusal(path)


def test_no_volume_is_a_parent_of_what_the_plugin_mounts() -> None:
    """Nor is one what it mounts: the owner of a parent directory removes the mount point."""
    for mount in mounts("/state", "key", earlier=False):
        place = PurePosixPath(mount.container)
        assert [str(p) for p in (place, *place.parents) if refusal(str(p)) is None] == []
