"""How far a GPU is from the temperature at which it slows down, by whichever of NVML's answers there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nvml import readings


class NvmlFailure(Exception):
    value = 3
    """NVML_ERROR_NOT_SUPPORTED."""


def binding(
    margin_c: int | None, tlimit_c: int | None, slowdown_c: int | None, *, old: bool = False
) -> SimpleNamespace:
    """NVIDIA's binding over a driver with these answers; None = not supported. `old`: without the functions for GPUs since Ada."""

    def answer(value: int | None) -> int:
        if value is None:
            raise NvmlFailure
        return value

    def fields(_: object, asked: list[int]) -> list[Any]:
        assert asked == [194]
        return [SimpleNamespace(nvmlReturn=0 if tlimit_c is not None else 3, value=SimpleNamespace(siVal=tlimit_c))]

    made = SimpleNamespace(
        NVMLError=NvmlFailure,
        NVML_SUCCESS=0,
        NVML_TEMPERATURE_THRESHOLD_SLOWDOWN=1,
        nvmlDeviceGetTemperatureThreshold=lambda _, which: answer(slowdown_c if which == 1 else None),
        nvmlDeviceGetFieldValues=fields,
    )
    if not old:
        made.nvmlDeviceGetMarginTemperature = lambda _: answer(margin_c)
        made.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT = 194
    return made


@pytest.mark.parametrize(
    ("driver", "temperature_c", "expected"),
    [
        (binding(50, -2, 90), 40, 52),
        (binding(-5, -2, None), None, -3),
        (binding(50, None, 90), 40, 50),
        (binding(None, -2, 90), 40, 50),
        (binding(None, None, 90, old=True), 95, -5),
        (binding(None, None, 90), None, None),
        (binding(None, None, 0), 40, None),
        (binding(None, None, None), 40, None),
        (binding(2**30, 0, 90), 40, None),
    ],
)
def test_the_margin_counts_then_the_threshold_and_nonsense_is_nothing(
    monkeypatch: pytest.MonkeyPatch, driver: SimpleNamespace, temperature_c: int | None, expected: int | None
) -> None:
    monkeypatch.setattr(readings, "nv", driver)
    assert readings._headroom_c(object(), temperature_c) == expected
