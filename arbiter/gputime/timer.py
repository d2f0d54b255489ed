"""Waiting, exact to some microseconds: the time-outs of epoll and of Python's poll count milliseconds."""

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
        """When it rings; inf = never."""
        return self._set_s

    def set(self, at_s: float) -> None:
        """Ring at a time of time.monotonic; inf = never. A time that has passed rings at once."""
        if at_s == self._set_s:
            return
        self._set_s = at_s
        ns = 0 if at_s == inf else max(1, int(at_s * 1e9))
        self._spec.value.s, self._spec.value.ns = divmod(ns, 1_000_000_000)
        _libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def rang(self) -> None:
        """Take note, so that it is silent until it is set again."""
        self._set_s = inf
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give it up."""
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
        """Sleep. Is there something to read? A signal that comes meanwhile is nothing."""
        return bool(_libc.ppoll(*self._arguments) > 0)


def now_s() -> float:
    """The clock of it all."""
    return time.monotonic()
