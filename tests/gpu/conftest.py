"""One GPU with an arbiter and a watcher for the tests of this folder: the machine's own, or the fake driver where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.kit.book import Book
from tests.gpu.kit.machine import Machine, Watcher, machine


@pytest.fixture(scope="session")
def here() -> Iterator[Machine]:
    with machine() as made:
        made.start_arbiter()
        yield made


@pytest.fixture(scope="session")
def watch(here: Machine) -> Watcher:
    return here.watcher()


@pytest.fixture(scope="session")
def books() -> Iterator[list[Book]]:
    """Every test's rows. TANGRAM_GPU_CSV names a file that they are written to."""
    kept: list[Book] = []
    yield kept
    if "TANGRAM_GPU_CSV" in os.environ:
        whole = Book.at(Path(os.environ["TANGRAM_GPU_CSV"]))
        for book in kept:
            whole.extend(book)


@pytest.fixture
def book(books: list[Book]) -> Book:
    books.append(Book())
    return books[-1]


@pytest.fixture
def judge() -> Callable[[Book], None]:
    """No row may be `no`; a case that could not be run here says so as a skip."""

    def judged(book: Book) -> None:
        assert not book.failed(), "\n".join(
            f"{row.check}: wanted {row.wanted}, seen {row.seen}" for row in book.failed()
        )
        missing = [row for row in book.rows if row.ok == "not run"]
        if missing:
            pytest.skip(f"not run: {missing[0].seen}")

    return judged
