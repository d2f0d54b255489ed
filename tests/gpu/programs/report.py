"""How a framework's program reports what it saw: lines of JSON, of which tests/gpu/frameworks.py makes rows."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

MIB = 2**20
LIMIT_MIB = int(os.environ.get("TANGRAM_TEST_LIMIT_MIB", "8192"))


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def check(name: str, wanted: Any, seen: Any) -> None:
    _say(check=name, wanted=wanted, seen=seen, ok=seen == wanted)


def within(name: str, low: float, high: float, seen: float) -> None:
    _say(check=name, wanted=f"{low:g} to {high:g}", seen=round(seen, 1), ok=low <= seen <= high)


def fact(name: str, seen: Any) -> None:
    _say(fact=name, seen=seen)


def elastic(pointers: list[tuple[int, int]]) -> None:
    """Rows on how much of this memory can be swapped. (address, bytes) of each; the number of an elastic allocation's buffer has bit 62."""
    driver, number, bytes_ = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), 0
    for at, size in pointers:
        if driver.cuPointerGetAttribute(ctypes.byref(number), 7, ctypes.c_uint64(at)) == 0 and number.value & 1 << 62:
            bytes_ += size
    fact("elastic memory, MiB", bytes_ / MIB)
    fact("memory that has addresses, MiB", sum(size for _, size in pointers) / MIB)


def absent(why: str) -> None:
    """The framework is not on this machine; ends the program."""
    _say(not_run=why)
    sys.exit(0)


def at_brim(room_mib: int) -> None:
    """The program stands at its limit within so much: lets the other side look at the driver's records, waits until it did."""
    _say(brim=room_mib)
    sys.stdin.readline()


def kind(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"
