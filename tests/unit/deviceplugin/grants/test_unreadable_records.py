"""Allocation records that are damaged, of another version, of another directory or missing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from deviceplugin.grants import checked_file as sealed
from deviceplugin.grants.allocation_record import RECORD
from deviceplugin.grants.grant_directories import GrantDirectories
from tests.unit.deviceplugin.grants.grants_kit import record, record_of, restarted
from vgpu.api.sealed import seal


def sealed_as(body: object, version: int = sealed.VERSION, checksum: str = "") -> bytes:
    content = seal(msgspec.json.encode(body), version)
    return re.sub(rb'"sha256":"\w+"', b'"sha256":"%b"' % checksum.encode(), content) if checksum else content


PLAIN = msgspec.to_builtins(record(0))
UNREADABLE = {
    "empty": (b"", "has 0 bytes that are no allocation"),
    "truncated": (b"{", "has 1 bytes that are no allocation"),
    "truncated in its body": (sealed_as(PLAIN)[:-30], "bytes that are no allocation"),
    "no text": (b"\xff\xfe", "has 2 bytes that are no allocation"),
    "no version": (b'{"ids": []}', "no allocation: Object missing required field `v`"),
    "corrupt": (sealed_as(PLAIN, checksum="0" * 64), "is damaged: its checksum is "),
    "one letter changed": (sealed_as(PLAIN).replace(b"uid-a", b"uid-b"), "it must be '"),
    "version of later": (b'{"v": 3, "shape": "of later"}', "allocation.json is of version 3: this device plugin reads versions 1 to 2"),
    "version 0": (b'{"v": 0}', "is of version 0: this device plugin reads versions 1 to 2"),
    "version 1, wrong type": (b'{"ids": 3, "v": 1}', "no allocation: Expected `array`, got `int` - at `$.ids`"),
    "more in it": (sealed_as(PLAIN | {"more": 1}), "no allocation: Object contains unknown field `more`"),
    "of another directory": (sealed_as(record(1)), "is about directory "),
    "endless": (b" " * (sealed.LARGEST + 1), f"bytes: allocation has at most {sealed.LARGEST}"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_record_that_cannot_be_read_is_reported_once_and_its_folder_kept(
    grants: GrantDirectories, content: bytes, sentence: str
) -> None:
    key = grants.prepare(record(0))
    before = record_of(grants, key)
    record_file = grants.folder(key) / RECORD
    record_file.write_bytes(content)
    os.utime(grants.folder(key), (1000, 1000))
    with capture_logs() as logs:
        for _ in range(3):
            assert grants.record(key) is None
            assert grants.collect((), now=2000.0, older_than_s=300.0) == []
    (line,) = logs
    assert sentence in line["error"]
    assert str(record_file) in line["error"]
    (folder,) = grants.of_ids(record(0).ids)
    assert (folder.record, folder.trouble, folder.later) == (None, line["error"], "of version 3" in sentence)
    assert grants.damaged_count == 1
    grants.update(before)
    assert grants.record(key) == before
    assert grants.damaged_count == 0
    os.utime(grants.folder(key), (1000, 1000))
    assert grants.collect((), now=2000.0, older_than_s=300.0) == [key]


def test_a_record_that_is_missing_is_reported_with_its_path(grants: GrantDirectories, tmp_path: Path) -> None:
    key = grants.prepare(record(0))
    (grants.folder(key) / RECORD).unlink()
    (found,) = restarted(tmp_path / "state", tmp_path / "image.so").of_ids(record(0).ids)
    assert (found.key, found.record) == (key, None)
    assert found.trouble == f"{grants.folder(key) / RECORD} is missing"
