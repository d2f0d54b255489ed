"""The part of PyTorch that examples/12-training calls, without the computing: a step takes 20 ms. `cuda.mem_get_info` asks the driver.

So the Job, its checkpoints and its share are tried where PyTorch's image cannot be had. It is in the local cluster's image alone.
"""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEP_S = 0.02


class _Value:
    """A tensor in which nothing is."""

    def __neg__(self) -> _Value:
        return self

    def backward(self) -> None:
        time.sleep(STEP_S)

    def item(self) -> float:
        return 0.0


class _Stateful:
    """A model or an optimizer."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._state: dict[str, Any] = {}

    def __call__(self, value: _Value) -> _Value:
        return value

    def parameters(self) -> list[_Value]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def zero_grad(self) -> None:
        """Nothing."""

    def step(self) -> None:
        """Nothing."""


def _mem_get_info() -> tuple[int, int]:
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    calls = (
        ("cuInit", (0,)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), 0)),
        ("cuCtxSetCurrent", (context,)),
        ("cuMemGetInfo_v2", (ctypes.byref(free), ctypes.byref(total))),
    )
    for name, arguments in calls:
        if code := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUresult {code}")
    return free.value, total.value


def randn(*_: int, **__: object) -> _Value:
    return _Value()


def save(thing: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(thing))


def load(path: Path, **_: object) -> Any:
    return json.loads(path.read_text())


cuda = SimpleNamespace(mem_get_info=_mem_get_info)
nn = SimpleNamespace(Linear=_Stateful, functional=SimpleNamespace(mse_loss=lambda one, _other: one))
optim = SimpleNamespace(SGD=_Stateful)
