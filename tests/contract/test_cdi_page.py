"""docs/operations/cdi.md says of container runtimes what the device plugin takes from their versions."""

from __future__ import annotations

import re

from tests.built import REPOSITORY
from vgpu.api import driver_places
from vgpu.api.runtime import TABLE, cdi_support, page

PAGE = (REPOSITORY / "docs/operations/cdi.md").read_text()


def test_the_page_has_the_table_of_runtimes() -> None:
    assert page() in PAGE


def test_the_page_has_the_table_of_places() -> None:
    assert driver_places.page() in PAGE


def test_each_row_is_what_the_versions_that_it_names_say() -> None:
    for row in TABLE:
        for version in re.findall(r"\d+\.\d+", row.versions):
            assert cdi_support(f"{row.runtime.lower()}://{version}.0") is row.support
