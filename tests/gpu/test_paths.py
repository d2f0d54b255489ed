"""Every way to take GPU memory is held to the grant, in the driver's own books. See paths.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import paths
from tests.gpu.kit.book import Book
from tests.gpu.kit.machine import Machine, Watcher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CASES = dict(paths.cases())


@pytest.mark.parametrize("name", CASES)
def test_memory_is_held_to_the_grant(
    name: str, here: Machine, watch: Watcher, book: Book, judge: Callable[[Book], None]
) -> None:
    paths.run_case(here, watch, book, name, CASES[name])
    judge(book)
