"""Grant directories that are ready before an allocation: none is visible, each serves one allocation, and none is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.grants.spares import KEPT, Spares
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.grant import Grant, GrantGpu


@pytest.fixture
def grants(tmp_path: Path) -> GrantDirectories:
    image = tmp_path / "image.so"
    image.write_bytes(b"library 1")
    made = GrantDirectories(tmp_path / "state", image, boot="1")
    made.install()
    return made


def record(slot: int) -> Record:
    return Record((f"{uuid(0)}-{slot}",), "uid-a", "default", "a", "main", (uuid(0),), 0.0, 0)


def content(folder: Path) -> dict[str, str]:
    """Names and kinds."""
    kinds = {
        path.name: "link" if path.is_symlink() else "folder" if path.is_dir() else "file" for path in folder.iterdir()
    }
    return dict(sorted(kinds.items()))


def hidden(grants: GrantDirectories) -> set[str]:
    return {path.name for path in grants.folder("x").parent.glob(".*")}


def test_an_allocation_takes_a_spare_which_is_no_spare_any_more(grants: GrantDirectories) -> None:
    assert hidden(grants) == set(grants.spares.names)
    inodes = {(grants.folder("x").parent / name).stat().st_ino for name in grants.spares.names}
    assert len(inodes) == KEPT
    keys = [grants.prepare(record(slot)) for slot in range(KEPT)]
    assert {grants.folder(key).stat().st_ino for key in keys} == inodes
    assert hidden(grants) == set(grants.spares.names) == set()


def test_a_directory_is_the_same_with_a_spare_and_without(grants: GrantDirectories) -> None:
    keys = [grants.prepare(record(slot)) for slot in range(KEPT + 1)]
    with_one, without = content(grants.folder(keys[0])), content(grants.folder(keys[-1]))
    assert without == {
        "allocation.json": "file", "arbiter.sock": "link", "libtangram.so": "file", "socket": "folder"
    }  # fmt: skip
    assert with_one == without | {".grant.new": "file"}, "and the grant has been begun"
    assert {grants.folder(key).stat().st_mode & 0o777 for key in keys} == {0o755}


def test_the_folder_of_the_socket_and_the_files_of_a_spare_become_those_of_its_allocation(
    grants: GrantDirectories,
) -> None:
    parts = (".socket", ".allocation.json.new", ".grant.new")
    spares = [grants.folder("x").parent / name for name in grants.spares.names]
    inodes = [{(path / part).stat().st_ino for path in spares} for part in parts]
    key = grants.prepare(record(0))
    grants.write(key, Grant("default", "a", "uid-a", "main", (GrantGpu(uuid(0), 1024),)))
    folder = grants.folder(key)
    became = (grants.socket(key).parent, folder / "allocation.json", folder / "grant")
    assert all(path.stat().st_ino in of for path, of in zip(became, inodes, strict=True))
    assert grants.socket(key).parent.stat().st_mode & 0o777 == 0o755


def test_a_spare_is_not_seen_as_an_allocation_and_not_collected_while_it_is_one(grants: GrantDirectories) -> None:
    assert list(grants.keys()) == []
    before = hidden(grants)
    (grants.folder("x").parent / ".spare-of-an-earlier-plugin").mkdir()
    assert grants.collect((), now=1e12, older_than_s=0.0) == []
    assert hidden(grants) == before


def test_a_spare_that_was_made_with_an_earlier_library_or_damaged_is_completed(
    grants: GrantDirectories, tmp_path: Path
) -> None:
    (tmp_path / "image.so").write_bytes(b"library 22")
    grants.install()
    for name in grants.spares.names:
        folder = grants.folder("x").parent / name
        (folder / "arbiter.sock").unlink()
    key = grants.prepare(record(0))
    assert (grants.folder(key) / "libtangram.so").read_bytes() == b"library 22"
    assert content(grants.folder(key))["arbiter.sock"] == "link"
    for name in grants.spares.names:
        shutil.rmtree(grants.folder("x").parent / name)
    later = grants.prepare(record(1))
    whole = content(grants.folder(key))
    del whole[".grant.new"]
    assert content(grants.folder(later)) == whole, "though all of it was removed"


def test_a_disk_that_takes_no_spare_leaves_none_behind_that_counts(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    made = Spares(tmp_path, ".", full)
    with pytest.raises(OSError, match="No space"):
        made.fill()
    assert made.take() is None
    assert made.names == set()
