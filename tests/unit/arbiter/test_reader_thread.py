"""A thread beside the arbiter's loop ends within a second, or with the program."""

from __future__ import annotations

import threading

import pytest

from arbiter import reader_thread
from arbiter.reader_thread import ReaderThread


class Waiting:
    """A thread that waits for `wanted`."""

    def __init__(self) -> None:
        self.wanted = False
        self.rounds = threading.Semaphore(0)
        self.reader = ReaderThread("test", self._run)

    def _run(self) -> None:
        while True:
            with self.reader.changed:
                self.reader.wait(lambda: self.wanted)
                if self.reader.closing:
                    return
                self.wanted = False
            self.rounds.release()


def test_a_thread_that_waits_for_work_is_ended() -> None:
    waiting = Waiting()
    waiting.reader.start()
    with waiting.reader.changed:
        waiting.wanted = True
        waiting.reader.changed.notify()
    assert waiting.rounds.acquire(timeout=10)
    assert waiting.reader.close()


def test_a_thread_that_was_never_started_is_ended() -> None:
    assert Waiting().reader.close()


def test_a_thread_that_waits_for_an_answer_is_reported_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_thread, "CLOSE_S", 0.01)
    answer = threading.Event()
    reader = ReaderThread("test", answer.wait)  # type: ignore[arg-type]
    reader.start()
    assert not reader.close()
    answer.set()
    monkeypatch.setattr(reader_thread, "CLOSE_S", 10.0)
    assert reader.close()


def test_a_thread_that_returned_by_itself_is_ended() -> None:
    done = threading.Event()
    reader = ReaderThread("test", done.set)
    reader.start()
    assert done.wait(10)
    assert reader.close()


def test_a_machine_without_threads_is_an_error_of_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ReaderThread("test", lambda: None)

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start"):
        reader.start()
    assert reader.close()
