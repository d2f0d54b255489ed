"""Files that are written whole: begun beforehand, taken over from a writer that was killed, and never another user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from deviceplugin.grants.atomic_file import create_temporary, temporary_path, version_of, write_atomically


def test_a_file_that_was_begun_becomes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    create_temporary(temporary_path(path))
    create_temporary(temporary_path(path))
    inode = Path(temporary_path(path)).stat().st_ino
    write_atomically(path, b"content", 0o444)
    assert (path.read_bytes(), path.stat().st_ino, path.stat().st_mode & 0o777) == (b"content", inode, 0o444)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("left", [b"", b"1", b"what a writer left that was killed, and longer than what follows"])
def test_nothing_of_what_a_killed_writer_left_stays(tmp_path: Path, left: bytes) -> None:
    path, beside = tmp_path / "book", tmp_path / "beside"
    beside.write_bytes(left)
    write_atomically(path, b"short", 0o600, temporary=beside)
    assert path.read_bytes() == b"short"
    assert not beside.exists()


def test_a_file_with_another_name_or_behind_a_link_is_not_written_to(tmp_path: Path) -> None:
    path, other = tmp_path / "grant", tmp_path / "other"
    other.write_bytes(b"another user's")
    Path(temporary_path(path)).symlink_to(other)
    write_atomically(path, b"first", 0o444)
    Path(temporary_path(path)).hardlink_to(other)
    write_atomically(path, b"second", 0o444)
    assert (path.read_bytes(), path.is_symlink(), other.read_bytes()) == (b"second", False, b"another user's")


def test_each_file_that_is_written_is_another_version(tmp_path: Path) -> None:
    path = tmp_path / "grant"
    assert version_of(path) is None
    seen = set()
    for content in (b"a", b"b", b"c"):
        write_atomically(path, content, 0o444)
        found = version_of(path)
        assert found is not None
        assert found == version_of(path)
        seen.add(found)
    assert len(seen) == 3
