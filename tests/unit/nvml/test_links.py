"""The errors of a GPU's NVLinks, whichever of NVML's fields it answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nvml import links

NUMBERS = {name: 1000 + at for at, name in enumerate(sorted({links.STATE} | {name for pair in links.COUNTERS for names in pair for name in names}))}  # fmt: skip
NAMES = {number: name for name, number in NUMBERS.items()}
UNSIGNED_INT, UNSIGNED_LONG_LONG = 1, 3
NOT_SUPPORTED, IS_LOST = 3, 15


class NvmlFailure(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def binding(answers: dict[str, list[int]], *, up: list[bool] | None = None, whole: int | None = None) -> Any:
    """NVIDIA's binding over a driver with these values of fields, by link. `up`: what nvmlDeviceGetNvLinkState says. `whole`: why no field is answered."""

    def fields(_: object, wanted: list[tuple[int, int]]) -> list[Any]:
        if whole is not None:
            raise NvmlFailure(whole)
        return [one(NAMES[field], link) for field, link in wanted]

    def one(name: str, link: int) -> Any:
        values = answers.get(name, [])
        if link >= len(values):
            return SimpleNamespace(nvmlReturn=NOT_SUPPORTED)
        if values[link] < 0:
            return SimpleNamespace(nvmlReturn=-values[link])
        kind = UNSIGNED_INT if name == links.STATE else UNSIGNED_LONG_LONG
        value = SimpleNamespace(uiVal=values[link] if kind == UNSIGNED_INT else 77, ullVal=values[link])
        return SimpleNamespace(nvmlReturn=0, valueType=kind, value=value)

    def state(_: object, link: int) -> int:
        if up is None or link >= len(up):
            raise NvmlFailure(2)
        return up[link]

    return SimpleNamespace(
        **NUMBERS, NVMLError=NvmlFailure, NVML_SUCCESS=0, NVML_NVLINK_MAX_LINKS=36, NVML_VALUE_TYPE_UNSIGNED_INT=UNSIGNED_INT,
        nvmlDeviceGetFieldValues=fields, nvmlDeviceGetNvLinkState=state,
    )  # fmt: skip


PRE = "NVML_FI_DEV_NVLINK_"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (  # Hopper: each link by itself; a total beside it does not count twice
            {PRE + "ERROR_DL_REPLAY": [1, 2, 3], PRE + "ERROR_DL_RECOVERY": [0, 0, 4], PRE + "ERROR_DL_CRC": [2**40, 1, 0],
             PRE + "REPLAY_ERROR_COUNT_TOTAL": [9]},
            (6, 4, 2**40 + 1),
        ),
        (  # before
            {PRE + "REPLAY_ERROR_COUNT_TOTAL": [5], PRE + "RECOVERY_ERROR_COUNT_TOTAL": [6],
             PRE + "CRC_FLIT_ERROR_COUNT_TOTAL": [7], PRE + "CRC_DATA_ERROR_COUNT_TOTAL": [8]},
            (5, 6, 15),
        ),
        ({PRE + "COUNT_LINK_RECOVERY_EVENTS": [1, 1, 1]}, (None, 3, None)),  # Blackwell
        ({}, (None, None, None)),
    ],
)  # fmt: skip
def test_errors_are_those_of_all_links(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]], expected: tuple[int | None, ...]
) -> None:
    monkeypatch.setattr(links, "nv", binding(answers))
    assert links.errors(object(), 3) == expected
    assert links.errors(object(), 0) == (None, None, None)


@pytest.mark.parametrize(
    "driver",
    [
        binding({links.STATE: [1, 0, 2]}),
        binding({}, up=[True, False, True]),
        binding({}, up=[True, False, True], whole=NOT_SUPPORTED),
    ],
)
def test_states_are_those_of_the_field_else_of_each_link(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setattr(links, "nv", driver)
    assert links.states(object()) == (True, False, True)


@pytest.mark.parametrize("driver", [binding({}, whole=IS_LOST), binding({links.STATE: [-IS_LOST]})])
def test_a_lost_gpu_is_an_error_and_not_one_without_links(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setattr(links, "nv", driver)
    with pytest.raises(NvmlFailure):
        links.states(object())


def test_a_binding_without_the_fields_asks_link_by_link(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = binding({}, up=[True, True])
    for name in NUMBERS:
        delattr(driver, name)
    monkeypatch.setattr(links, "nv", driver)
    assert links.states(object()) == (True, True)
    assert links.errors(object(), 2) == (None, None, None)
