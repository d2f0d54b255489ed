"""Forked children and descriptors, for programs of gpu.py."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from typing import Any

_limits: list[tuple[int, int]] = []


def in_child(do: Callable[[], list[Any]]) -> list[Any]:
    """What a forked child gets for it."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(into, json.dumps(do()).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return list(json.loads(text))


def use_up_descriptors() -> list[int]:
    """None is left: 0, 1 and 2 are open, and no number above may be made."""
    _limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, _limits[-1][1]))
    return [0]


def free_descriptors() -> list[int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, _limits.pop())
    return [0]


def open_and_close(handles: list[str], times: int) -> list[Any]:
    """Each handle in turn; the CUresults that there were."""
    import __main__ as gpu  # evaluates this

    codes = set()
    for number in range(times):
        code, at = gpu.ipc_open(handles[number % len(handles)])
        codes.add(code)
        if code == 0:
            codes.add(1000 + gpu.fill(at, 0.25, number % 256)[0])
            codes.add(2000 + gpu.ipc_close(at)[0])
    return [0, sorted(codes)]
