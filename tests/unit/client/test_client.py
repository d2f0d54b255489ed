"""The package for users: what it calls in the library, and that it does nothing where there is none.

The package is run in processes of its own, with a library preloaded that writes down its calls, and without.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.built import REPOSITORY

CLIENT = REPOSITORY / "clients/python/src"
HEADER = REPOSITORY / "shim/include/tangram.h"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("client") / "librecorder.so"
    source = Path(__file__).with_name("recorder.c")
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{HEADER.parent}", "-o", made, source], check=True)
    return made


@pytest.fixture
def calls(recorder) -> Callable[[str], list[str]]:
    """Runs a program in a share: which functions of the library it called, and what it printed, in order."""
    return lambda program: _run(program, LD_PRELOAD=str(recorder))


def _run(program: str, **env: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-u", "-W", "error", "-c", "import tangram\n" + program],
        env=clean | {"PYTHONPATH": str(CLIENT)} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_outside_a_share_everything_runs_and_nothing_is_reported():
    program = """
with tangram.latency_critical(), tangram.best_effort():
    print(tangram.hint(1500), tangram.end(), tangram.memory(), tangram.version())
print(tangram.latency_critical()(lambda a, b=1: a + b)(2, b=3))
"""
    assert _run(program) == ["False False None None", "5"]


def test_a_hint_has_the_time_until_the_work(calls):
    assert calls("print(tangram.hint(1500), tangram.end())") == ["hint 1500", "end 0", "True True"]


def test_a_fraction_of_a_microsecond_is_dropped(calls):
    assert calls("tangram.hint(999.9)") == ["hint 999"]


@pytest.mark.parametrize("us", ["-1", "10_000_001", "float('nan')", "float('inf')"])
def test_a_hint_that_cannot_be_is_an_error_with_its_range(calls, us):
    printed = calls(f"try:\n    tangram.hint({us})\nexcept ValueError as error:\n    print(error)")
    assert len(printed) == 1
    assert printed[0].endswith("microseconds: 0 to 10,000,000")


def test_a_hint_that_is_no_number_is_an_error_with_argument_value_and_range(calls):
    printed = calls("try:\n    tangram.hint('x')\nexcept TypeError as error:\n    print(error)")
    assert printed == ["hint: us is 'x': it must be a number, 0 to 10,000,000"]


@pytest.mark.parametrize(
    ("section", "first", "last"),
    [("latency_critical", "begin 0", "end 0"), ("best_effort", "yield_begin 0", "yield_end 0")],
)
class TestSection:
    def test_a_block_begins_and_ends_it(self, calls, section, first, last):
        assert calls(f"with tangram.{section}():\n    print('in')") == [first, "in", last]

    def test_an_error_ends_it_and_goes_on(self, calls, section, first, last):
        program = f"try:\n    with tangram.{section}():\n        1 / 0\nexcept ZeroDivisionError:\n    print('seen')"
        assert calls(program) == [first, last, "seen"]

    def test_the_outer_one_of_two_ends_it(self, calls, section, first, last):
        program = f"with tangram.{section}():\n    with tangram.{section}():\n        pass\n    print('still in')"
        assert calls(program) == [first, first, "still in", last]

    def test_a_function_is_one_at_each_call(self, calls, section, first, last):
        program = f"""
@tangram.{section}()
def work(depth):
    "What it does."
    if depth:
        work(depth - 1)
    return depth
print(work(1), work.__name__, work.__doc__)
work(0)
"""
        assert calls(program) == [first, first, last, "1 work What it does.", first, last]

    def test_a_coroutine_is_one_until_it_returns(self, calls, section, first, last):
        program = f"""
import asyncio
@tangram.{section}()
async def work():
    await asyncio.sleep(0)
    print('done')
asyncio.run(work())
"""
        assert calls(program) == [first, "done", last]

    def test_the_last_thread_that_leaves_ends_it(self, calls, section, first, last):
        program = f"""
import threading
entered, leave = threading.Event(), threading.Event()
def other():
    with tangram.{section}():
        entered.set()
        leave.wait()
with tangram.{section}():
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
print('left')
leave.set()
thread.join()
"""
        assert calls(program) == [first, first, "left", last]

    def test_a_forked_child_starts_afresh(self, calls, section, first, last):
        program = f"""
import os
with tangram.{section}():
    child = os.fork()
    if child == 0:
        with tangram.{section}():
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
        assert calls(program) == [first, first, last, last]


@pytest.mark.parametrize("section", ["latency_critical", "best_effort"])
def test_a_generator_is_refused(calls, section):
    program = f"""
def pieces():
    yield 1
try:
    tangram.{section}()(pieces)
except TypeError as error:
    print(error)
"""
    assert calls(program) == ["pieces is a generator, which runs in pieces: use a with statement inside of it"]


def test_memory_is_that_of_the_gpu_requested(calls):
    printed = calls("print(*tangram.memory(1), tangram.memory(2), tangram.memory(-1), tangram.version())")
    assert printed == ["5 3 2 1 None None 9.8.7"]


def test_a_library_that_lacks_a_function_is_as_none(tmp_path):
    made = tmp_path / "libold.so"
    words = ["gcc", "-shared", "-fPIC", "-o", str(made), "-x", "c", "-"]
    subprocess.run(words, input='const char *tangram_version(void) { return "0"; }', text=True, check=True)
    printed = _run("print(tangram.version(), tangram.hint(1))", LD_PRELOAD=str(made))
    assert printed == ["0 False"]


def test_every_function_of_the_header_is_used():
    declared = set(re.findall(r"\b(tangram_\w+)\(", HEADER.read_text()))
    used = set(re.findall(r'"(tangram_\w+)"', (CLIENT / "tangram/__init__.py").read_text()))
    assert declared == used
