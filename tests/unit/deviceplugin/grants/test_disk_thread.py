"""A thread for the disk: one thing after another, bounded waits, nothing lost and nothing done that was given up."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from deviceplugin.grants import disk_thread as disk_thread
from deviceplugin.grants.disk_thread import DiskThread
from vgpu.api.errors import Refused


async def test_what_is_given_up_is_never_begun_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_thread, "DISK_S", 0.05)
    answers, done, thread = threading.Event(), list[str](), DiskThread("test")
    try:
        for name in ("hangs", "is behind it"):
            with pytest.raises(Refused, match=r"not answered a write for 0\.05 s: nothing is written"):
                await thread.do(
                    lambda name=name: answers.wait(20) and done.append(name), otherwise="nothing is written"
                )
    finally:
        answers.set()
    monkeypatch.setattr(disk_thread, "DISK_S", 20.0)
    await thread.do(done.append, "later", otherwise="")
    assert done == ["hangs", "later"]


async def test_an_error_reaches_the_waiting_caller_and_the_thread_goes_on() -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    thread = DiskThread("test")
    with pytest.raises(OSError, match="No space"):
        await thread.do(fails, otherwise="")
    assert await thread.do(lambda: 1, otherwise="") == 1


async def test_a_thread_that_cannot_begin_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = DiskThread("test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none_left)
        for begin in (thread.begin, thread.begin_soon):
            with pytest.raises(OSError, match="no thread for test: can't start new thread"):
                begin(lambda: None)
    assert await thread.do(lambda: 1, otherwise="") == 1


async def test_what_is_begun_soon_is_begun_after_what_the_loop_does_now() -> None:
    begun, thread = threading.Event(), DiskThread("test")
    done = thread.begin_soon(begun.set)
    assert not begun.wait(0.01)
    await asyncio.wrap_future(done)
    assert begun.is_set()


async def test_the_thread_ends_with_its_worker() -> None:
    thread = DiskThread("that ends")
    await thread.do(lambda: None, otherwise="")
    (running,) = [one for one in threading.enumerate() if one.name == "that ends"]
    del thread
    gc.collect()
    await asyncio.to_thread(running.join, 10)
    assert not running.is_alive()
