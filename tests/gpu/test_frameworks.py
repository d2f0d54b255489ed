"""Frameworks at their limit: their own error, life after it, the driver's books. See frameworks.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import frameworks
from tests.gpu.kit.book import Book
from tests.gpu.kit.machine import Machine, Watcher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", frameworks.CASES, ids=lambda case: case.name)
def test_a_framework_meets_its_limit_and_lives_on(
    case: frameworks.Case,
    here: Machine,
    watch: Watcher,
    books: list[Book],
    judge: Callable[[Book], None],
) -> None:
    books.append(frameworks.run_case(here, watch, case))
    judge(books[-1])
