"""The sizes that the host pool's program is given."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hostpool.settings import HostPoolSettings


def made(**given: str) -> HostPoolSettings:
    return HostPoolSettings(_cli_parse_args=False, **given)  # type: ignore[arg-type]


def test_sizes_are_quantities() -> None:
    settings = made(pool="64Gi", reserve="0")
    assert (settings.pool_bytes, settings.reserve_bytes) == (64 * 2**30, 0)


@pytest.mark.parametrize("pool", ["", "64GB", "0", "-1Gi", "1Mi", "x"])
def test_what_is_no_size_of_a_pool_is_refused(pool: str) -> None:
    with pytest.raises(ValidationError, match="pool"):
        made(pool=pool)


def test_a_reserve_that_is_no_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="reserve"):
        made(pool="64Gi", reserve="4GB")
