"""How a framework's program reports what it saw: lines of JSON, of which tests/gpu/frameworks.py makes rows."""

from __future__ import annotations

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
