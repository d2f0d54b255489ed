"""Names of MIG slots on demand: each comes back as it went, and nothing else is taken for one."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import DEVICE_ID_LIMIT, slot_device, slot_mib, slot_of_device
from vgpu.api.mig_tables import MODELS, known_profiles, model_of

GPU = f"GPU-{UUID(int=0xA)}"


@given(
    st.integers(0, 2**128 - 1).map(lambda number: f"GPU-{UUID(int=number)}"),
    st.sampled_from(known_profiles()),
    st.integers(0, 99),
)
def test_a_slot_comes_back_as_it_went(uuid: str, profile: str, start: int) -> None:
    slot = MigSlot(start, profile)
    text = slot_device(uuid, slot)
    assert text == f"{uuid}-{profile}-{start}"
    assert len(text) <= DEVICE_ID_LIMIT
    assert slot_of_device(text) == (uuid, slot)


def test_a_profile_may_have_a_hyphen() -> None:
    assert slot_of_device(f"{GPU}-1g.12gb-me-3") == (GPU, MigSlot(3, "1g.12gb-me"))


@pytest.mark.parametrize(
    "text",
    [
        "", GPU, f"{GPU}-", f"{GPU}-3", f"{GPU}-1g.10gb", f"{GPU}-1g.10gb-", f"{GPU}-1g.10gb-03", f"{GPU}-1g.10gb--3", f"{GPU}-1g.10gb-3\n",
        f"{GPU}-1g.10gb-100", f"{GPU}-1g.10gb-٣", f"{GPU}-1c.1g.10gb-3", f"{GPU}1g.10gb-3", f"{GPU.upper()}-1g.10gb-3", f"MIG-{UUID(int=1)}-1g.10gb-3",
        f"{GPU}-1g.{'1' * 20}gb-3",
    ],
)  # fmt: skip
def test_anything_else_is_no_slot(text: str) -> None:
    assert slot_of_device(text) is None


@given(st.text(max_size=30))
def test_no_tail_is_read_as_another_slot(tail: str) -> None:
    found = slot_of_device(f"{GPU}-{tail}")
    assert found is None or slot_device(*found) == f"{GPU}-{tail}"


def test_a_name_that_no_reader_takes_is_not_written() -> None:
    for slot in (MigSlot(-1, "1g.10gb"), MigSlot(100, "1g.10gb"), MigSlot(0, "10gb")):
        with pytest.raises(ValueError, match="names no MIG slot"):
            slot_device(GPU, slot)


def test_memory_of_a_slot_is_its_part_of_the_memory_slices() -> None:
    h100, rtx = model_of("NVIDIA H100 80GB HBM3"), next(one for one in MODELS if one.title == "RTX PRO 6000")
    assert h100 is not None
    assert [slot_mib(81559, h100.table, name) for name in ("1g.10gb", "3g.40gb", "7g.80gb")] == [10194, 40779, 81559]
    assert slot_mib(98304, rtx.table, "1g.24gb") == 24576
