"""Which folders may have a pool, and what is found there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostpool.folders import file_in_use, memory_bytes, pool_files, sizes, usable


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    open_to_all = tmp_path / "there"
    open_to_all.mkdir(mode=0o755)
    assert usable([tmp_path / "new/one", open_to_all]) == ([tmp_path / "new/one", open_to_all], "")
    assert {(tmp_path / "new/one").stat().st_mode & 0o777, open_to_all.stat().st_mode & 0o777} == {0o700}


def test_a_link_or_a_file_is_no_folder_of_ours_and_the_others_are_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    good, wrong = usable([tmp_path / "link", tmp_path / "file", tmp_path / "good"])
    assert good == [tmp_path / "good"]
    assert wrong == f"{tmp_path}/link: it is a link, not a folder; {tmp_path}/file: File exists"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 1234, 1234)
    assert usable([tmp_path / "theirs"]) == ([], f"{tmp_path}/theirs: it belongs to user 1234, not to 0")


def test_pool_files_are_found_by_gpu_and_nothing_else_counts(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "gone"]
    for folder in folders[:2]:
        folder.mkdir()
    (folders[1] / "GPU-1.pool").write_bytes(b"12")
    (folders[0] / "GPU-1.pool").write_bytes(b"")
    (folders[0] / "GPU-2.lock").write_bytes(b"12")
    (folders[0] / "GPU-3.pool").symlink_to(folders[1] / "GPU-1.pool")
    assert sizes(folders) == {"GPU-1": 2}
    path, file_id = file_in_use(pool_files(folders, "GPU-1"))
    assert path == str(folders[1] / "GPU-1.pool")
    (folders[1] / "GPU-1.pool").rename(tmp_path / "kept")
    (folders[1] / "GPU-1.pool").write_bytes(b"12")
    assert file_in_use(pool_files(folders, "GPU-1"))[1] != file_id, "another file has another identity"
    assert file_in_use(pool_files(folders, "GPU-9")) == ("", "")


def test_the_memory_of_the_node_is_read(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16384 kB\nMemFree: 1 kB\n")
    assert memory_bytes(meminfo) == 16 * 2**20
    meminfo.write_text("MemFree: 1 kB\n")
    with pytest.raises(OSError, match="has no line MemTotal"):
        memory_bytes(meminfo)
    assert memory_bytes() > 0
