"""Tell Tangram when this program's GPU work is urgent, and when it can wait.

    import tangram

    tangram.hint(1500)                    # a request comes in 1.5 ms: the GPU is free by then
    with tangram.latency_critical():      # or: it is here now
        answer = model(request)

    @tangram.best_effort()                # any other container preempts it, whatever the pod's class
    def reindex(): ...

The library that enforces the limits of a container is in each of its processes; this package finds its functions there
(shim/include/tangram.h) and calls them. Where they are not, as outside a share, everything here does nothing and is as cheap as
that. Announcements have an effect in a container of class latency-critical alone; `best_effort` has in any.

All of it may be used from any thread. Nothing here imports a framework, and nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar, cast

__all__ = ["Memory", "best_effort", "end", "hint", "latency_critical", "memory", "version"]

HINT_MOST_US: Final = 10_000_000
"""What is further away than ten seconds cannot be announced: the arbiter takes it for ten."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Memory(NamedTuple):
    """One GPU within this container's limit. Bytes."""

    limit_bytes: int
    used_bytes: int
    """Allocated by this process."""
    leased_bytes: int
    """Used, and what this process may still take without asking."""
    unleased_bytes: int
    """Of the container's limit, leased to none of its processes."""


class _MemoryOut(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in Memory._fields)


class _Library:
    """The functions of the library in this process. A missing function returns what the library returns when the arbiter cannot be reached."""

    def __init__(self) -> None:
        try:
            self._process: ctypes.CDLL | None = ctypes.CDLL(None)
        except (OSError, TypeError):  # no dlopen of oneself here: not Linux
            self._process = None
        self.version = self._find("tangram_version", (), ctypes.c_char_p)
        self.memory = self._find("tangram_memory", (ctypes.c_uint, ctypes.POINTER(_MemoryOut)))
        self.hint = self._find("tangram_hint", (ctypes.c_uint64,))
        self.begin = self._find("tangram_begin")
        self.end = self._find("tangram_end")
        self.yield_begin = self._find("tangram_yield_begin")
        self.yield_end = self._find("tangram_yield_end")

    def _find(self, name: str, takes: tuple[Any, ...] = (), answers: Any = ctypes.c_int) -> Callable[..., Any]:
        try:
            found = getattr(self._process, name)
        except AttributeError:
            return (lambda *_: None) if answers is ctypes.c_char_p else (lambda *_: -1)
        found.argtypes, found.restype = takes, answers
        return cast("Callable[..., Any]", found)


_library = _Library()


def version() -> str | None:
    """Of the library that enforces the limits of this process; None: there is none."""
    found = _library.version()
    return None if found is None else found.decode()


def memory(gpu: int = 0) -> Memory | None:
    """The container's `gpu`-th GPU, from 0. None when there is no such GPU, or no share."""
    out = _MemoryOut()
    if gpu < 0 or _library.memory(gpu, ctypes.byref(out)) != 0:
        return None
    return Memory(*(getattr(out, name) for name in Memory._fields))


def hint(us: float) -> bool:
    """GPU work comes in so many microseconds. 1500 are enough to meet it as if alone, and best; True when the arbiter received it.

    With a CUDA context current in this thread, the process is brought back onto the GPU before the request. Work that does not
    come costs the others some milliseconds. Raises ValueError outside 0 to 10,000,000, TypeError for what is no number.
    """
    try:
        possible = 0 <= us <= HINT_MOST_US
    except TypeError:
        raise TypeError(f"hint: us is {us!r}: it must be a number, 0 to {HINT_MOST_US:,}") from None
    if not possible:
        raise ValueError(f"hint of {us} microseconds: 0 to {HINT_MOST_US:,}")
    return bool(_library.hint(int(us)) == 0)


def end() -> bool:
    """What was announced by `hint` is over: the others may have the GPU at once. True when the arbiter received it."""
    return bool(_library.end() == 0)


class _Section:
    """A stretch of the program, as context manager or decorator. Stretches may nest and overlap: the last to leave ends it."""

    _lock = threading.Lock()
    _inside = 0
    """How many are inside now, of all threads; each subclass has its own."""

    def __enter__(self) -> None:
        of = type(self)
        with of._lock:
            of._inside += 1
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        of = type(self)
        with of._lock:
            of._inside = max(0, of._inside - 1)  # 0: entered before a fork, which starts afresh
            if of._inside == 0:
                self._end()

    def __call__(self, function: Function) -> Function:
        """The function's calls are such stretches; those of a coroutine until it returns."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator, which runs in pieces: use a with statement inside of it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wait(*arguments: Any, **named: Any) -> Any:
                with self:
                    return await function(*arguments, **named)

            return cast("Function", wait)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self:
                return function(*arguments, **named)

        return cast("Function", call)

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class latency_critical(_Section):  # noqa: N801 it is used as a function
    """Urgent GPU work: best-effort work is off the GPU from here on, not only from the first launch.

    A stretch keeps the GPU for a second at most while nothing runs on it; entering another one starts the second anew.
    """

    _lock = threading.Lock()
    _inside = 0

    def _begin(self) -> None:
        _library.begin()

    def _end(self) -> None:
        _library.end()


class best_effort(_Section):  # noqa: N801 it is used as a function
    """Any other container preempts this one until the end, as if it were of class best-effort.

    The whole container is preempted, with all its threads and processes: the GPU cannot distinguish them.
    """

    _lock = threading.Lock()
    _inside = 0

    def _begin(self) -> None:
        _library.yield_begin()

    def _end(self) -> None:
        _library.yield_end()


def _start_afresh() -> None:
    """In a forked child, which the arbiter does not know yet."""
    for kind in (latency_critical, best_effort):
        kind._lock, kind._inside = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
