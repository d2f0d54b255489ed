"""Books found by device IDs and by pod, against a walk through all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.files import Version
from deviceplugin.known import Books
from deviceplugin.listing import ALIKE
from deviceplugin.record import Record
from tests.examples import examples

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "forget"]), st.sampled_from(["a", "b"]), st.integers(0, 2), st.sampled_from("xyz")
    )
)


@settings(max_examples=examples(200))
@given(steps)
def test_what_an_index_finds_is_what_a_walk_finds(done: list[tuple[str, str, int, str]]) -> None:
    books, slow = Books(), dict[str, Record]()
    for step, ids, number, uid in done:
        key = f"{ids * ALIKE}-{number}"
        if step == "put":
            slow[key] = Record((ids,), uid, "default", uid, "main", (), 0.0)
            books.put(key, slow[key], None)
        else:
            slow.pop(key, None)
            books.forget(key)
        assert books.all() == slow
        for begin in ("a" * ALIKE, "b" * ALIKE):
            assert sorted(books.alike(begin)) == sorted(key for key in slow if key.startswith(begin))
        for uids in ({"x"}, {"y", "z"}):
            assert books.of_pods(uids) == {key: book for key, book in slow.items() if book.uid in uids}


def test_only_the_version_that_was_read_is_answered_and_what_is_forgotten_is_not() -> None:
    books, book = Books(), Record(("a",), "x", "default", "x", "main", (), 0.0)
    books.put("key", book, Version(1, 2, 3))
    assert books.get("key", Version(1, 2, 3)) == book
    assert books.get("key", Version(1, 2, 4)) is None
    books.put("key", book, None)
    assert books.get("key", Version(1, 2, 3)) is None
    assert books.all() == {"key": book}
    books.put("key", book, Version(1, 2, 3))
    books.forget("key")
    assert books.get("key", Version(1, 2, 3)) is None
