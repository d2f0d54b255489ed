"""Records with a checksum: what is read is what was sealed, and nothing else."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.sealed import UNREADABLE, seal, unseal, version_of

bodies = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
).map(msgspec.json.encode)
versions = st.none() | st.integers(1, 99)


def read_version(content: bytes) -> int:
    return version_of(content, oldest=2, newest=3, name="the record", reader="plugin")


@given(bodies, versions)
def test_what_is_sealed_is_read(body: bytes, version: int | None) -> None:
    assert bytes(unseal(seal(body, version), name="it")) == body


@given(bodies, versions)
def test_it_is_the_json_that_the_module_describes(body: bytes, version: int | None) -> None:
    described = {"sha256": hashlib.sha256(body).hexdigest(), "body": json.loads(body)}
    assert json.loads(seal(body, version)) == described | ({} if version is None else {"v": version})


@given(bodies, st.data())
def test_no_changed_byte_is_read_as_another_body(body: bytes, data: st.DataObject) -> None:
    content = seal(body, 2)
    at = data.draw(st.integers(0, len(content) - 1))
    changed = content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
    try:
        assert bytes(unseal(changed, name="it")) == body
    except (BadDocument, *UNREADABLE):
        assert changed != content


@given(bodies, st.data())
def test_what_was_cut_is_unreadable(body: bytes, data: st.DataObject) -> None:
    content = seal(body, 2)
    with pytest.raises(UNREADABLE):
        unseal(content[: data.draw(st.integers(0, len(content) - 1))], name="it")


def test_a_body_with_another_checksum_is_damaged_by_name() -> None:
    with pytest.raises(
        BadDocument, match=r"the record is damaged: its checksum is [0-9a-f]{12}, it must be '000000000000'"
    ):
        unseal(b'{"sha256":"%b","body":{}}' % (b"0" * 64), name="the record")


def test_a_field_that_is_not_of_the_form_is_unreadable() -> None:
    with pytest.raises(UNREADABLE, match="unknown field `more`"):
        unseal(seal(b"1")[:-1] + b',"more":1}', name="it")


def test_a_version_is_read_before_the_rest() -> None:
    assert [read_version(b'{"v":%d,"of":"any form"}' % version) for version in (2, 3)] == [2, 3]
    with pytest.raises(NewerVersion, match="the record is of version 4: this plugin reads versions 2 to 3"):
        read_version(b'{"v":4}')
    with pytest.raises(BadDocument, match="the record is of version 1: this plugin reads versions 2 to 3") as error:
        read_version(seal(b"1", 1))
    assert error.type is BadDocument, "an older version is not a newer one"
    with pytest.raises(UNREADABLE, match="missing required field `v`"):
        read_version(seal(b"1"))
