"""Waits with a precision of some microseconds: the time-outs of epoll and of Python's poll count milliseconds."""

from __future__ import annotations

import ctypes
import os
import select
import time
from math import inf
from typing import Final

_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """One timerfd on time.monotonic's clock. Python has it from 3.13 on."""

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _TimerSpec()
        self._set_s = inf

    @property
    def at_s(self) -> float:
        """When it expires; inf = never."""
        return self._set_s

    def set(self, at_s: float) -> None:
        """Expire at a time of time.monotonic; inf = never. A past time expires at once."""
        if at_s == self._set_s:
            return
        self._set_s = at_s
        ns = 0 if at_s == inf else max(1, int(at_s * 1e9))
        self._spec.value.s, self._spec.value.ns = divmod(ns, 1_000_000_000)
        _libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def rang(self) -> None:
        """Reset it after it expired, until it is set again."""
        self._set_s = inf
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.fd)


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


class Nap:
    """Sleeping for some microseconds, or until a descriptor has something to read."""

    def __init__(self, fd: int, us: int) -> None:
        self._watched = _PollFd(fd, select.POLLIN)
        self._time = _TimeSpec(0, us * 1000)
        self._arguments = (ctypes.byref(self._watched), 1, ctypes.byref(self._time), None)

    def ends_early(self) -> bool:
        """Sleep. Returns whether there is something to read. A signal meanwhile has no effect."""
        return bool(_libc.ppoll(*self._arguments) > 0)


def now_s() -> float:
    """The clock of all times here."""
    return time.monotonic()
