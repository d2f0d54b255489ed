"""Records found by device IDs and by pod, against a walk through all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.atomic_file import FileVersion
from deviceplugin.grants.listing import ALIKE
from deviceplugin.grants.record_index import RecordIndex
from tests.examples import examples

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "forget"]), st.sampled_from(["a", "b"]), st.integers(0, 2), st.sampled_from("xyz")
    )
)


@settings(max_examples=examples(200))
@given(steps)
def test_what_an_index_finds_is_what_a_walk_finds(done: list[tuple[str, str, int, str]]) -> None:
    records, slow = RecordIndex(), dict[str, Record]()
    for step, ids, number, uid in done:
        key = f"{ids * ALIKE}-{number}"
        if step == "put":
            slow[key] = Record((ids,), uid, "default", uid, "main", (), 0.0)
            records.put(key, slow[key], None)
        else:
            slow.pop(key, None)
            records.forget(key)
        assert records.all() == slow
        for begin in ("a" * ALIKE, "b" * ALIKE):
            assert sorted(records.alike(begin)) == sorted(key for key in slow if key.startswith(begin))
        for uids in ({"x"}, {"y", "z"}):
            assert records.of_pods(uids) == {key: record for key, record in slow.items() if record.uid in uids}


def test_only_the_version_that_was_read_is_answered_and_what_is_forgotten_is_not() -> None:
    records, record = RecordIndex(), Record(("a",), "x", "default", "x", "main", (), 0.0)
    records.put("key", record, FileVersion(1, 2, 3))
    assert records.get("key", FileVersion(1, 2, 3)) == record
    assert records.get("key", FileVersion(1, 2, 4)) is None
    records.put("key", record, None)
    assert records.get("key", FileVersion(1, 2, 3)) is None
    assert records.all() == {"key": record}
    records.put("key", record, FileVersion(1, 2, 3))
    records.forget("key")
    assert records.get("key", FileVersion(1, 2, 3)) is None
