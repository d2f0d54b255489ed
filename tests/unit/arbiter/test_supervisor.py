"""The supervisor starts the arbiter again, passes signals on, reaps, backs off, and ends at a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arbiter.supervisor import FIRST_S, MOST_S, OFTEN, OFTEN_S, RestartDelay
from tests.built import REPOSITORY
from tests.unit.arbiter.conftest import wait_for

SERVES = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from arbiter.supervisor import needed, notify_ready
def ends(number, frame):
    print("ends", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, ends)
signal.signal(signal.SIGHUP, lambda *_: print("hup", flush=True))
print("loaded", os.getpid(), flush=True)
if not needed():
    sys.exit(0)
{before}
notify_ready()  # first: an arbiter that is killed before it served is started later
print("pid", os.getpid(), os.environ["TANGRAM_ARBITER_RESTARTS"], flush=True)
{after}
while True:
    signal.pause()
"""


class Supervised:
    """A supervisor with a small program for an arbiter."""

    def __init__(self, folder: Path, before: str = "", after: str = "") -> None:
        program = folder / "program.py"
        program.write_text(SERVES.format(root=str(REPOSITORY), before=before, after=after))
        self.output, self.log = folder / "output", folder / "log"
        code = (
            "import sys; from arbiter.supervisor import ArbiterSupervisor;"
            f"sys.exit(ArbiterSupervisor([sys.executable, '-S', {str(program)!r}]).run())"
        )
        with self.output.open("wb") as out, self.log.open("wb") as err:
            self.process = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=REPOSITORY, stdout=out, stderr=err)

    def lines(self) -> list[list[str]]:
        """Words of those that are written whole."""
        return [line.split() for line in self.output.read_text().split("\n")[:-1]]

    def starts(self) -> list[tuple[int, int]]:
        """Pid and number of restarts, of each that served."""
        return [(int(line[1]), int(line[2])) for line in self.lines() if line[0] == "pid"]

    def loaded(self) -> list[int]:
        """Pids of all that were loaded."""
        return [int(line[1]) for line in self.lines() if line[0] == "loaded"]

    def events(self) -> list[dict[str, object]]:
        """Those that are more than information."""
        reported = (json.loads(line) for line in self.log.read_text().splitlines())
        return [event for event in reported if event["level"] != "info"]

    def ends(self) -> int:
        return self.process.wait(20)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    made: list[Supervised] = []

    def start(**parts: str) -> Supervised:
        made.append(Supervised(tmp_path, **parts))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.terminate()
        one.process.wait(20)


def served(one: Supervised, times: int = 1) -> int:
    """The pid of the last."""
    wait_for(lambda: len(one.starts()) >= times, 20)
    return one.starts()[-1][0]


def test_an_arbiter_that_is_killed_is_started_again_and_again_at_once(supervise: Callable[..., Supervised]) -> None:
    one = supervise()
    for times in range(1, 6):
        os.kill(served(one, times), signal.SIGKILL)
    served(one, 6)
    assert [restarts for _, restarts in one.starts()] == [0, 1, 2, 3, 4, 5]
    assert {(event["event"], event["status"], event["delay_s"]) for event in one.events()} == {
        ("the arbiter ended and is started again", 128 + signal.SIGKILL, 0.0)
    }


def test_a_spare_one_is_loaded_and_serves_when_it_is_needed(supervise: Callable[..., Supervised]) -> None:
    one = supervise()
    first = served(one)

    wait_for(lambda: len(one.loaded()) == 2 and "a spare arbiter is loaded" in one.log.read_text(), 20)
    os.kill(first, signal.SIGKILL)
    assert served(one, 2) == one.loaded()[1], "the spare, with its own pid"
    wait_for(lambda: len(one.loaded()) == 3, 20)
    spare = one.loaded()[2]
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == 7
    wait_for(lambda: not Path(f"/proc/{spare}").exists(), 20)


def test_a_spare_that_was_killed_is_replaced(supervise: Callable[..., Supervised]) -> None:
    one = supervise()
    first = served(one)
    wait_for(lambda: len(one.loaded()) == 2, 20)
    spare = one.loaded()[1]
    os.kill(spare, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{spare}").exists(), 20)
    os.kill(first, signal.SIGKILL)
    assert served(one, 2) not in (first, spare)


def test_a_signal_is_passed_on_and_the_end_of_the_arbiter_is_its_own_end(supervise: Callable[..., Supervised]) -> None:
    one = supervise()
    served(one)
    one.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "hup" in one.output.read_text(), 20)
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == 7
    assert f"ends {int(signal.SIGTERM)}" in one.output.read_text()
    assert one.events() == []


def test_what_the_arbiter_leaves_behind_is_reaped(supervise: Callable[..., Supervised]) -> None:
    one = supervise(
        after="import subprocess\norphan = subprocess.Popen(['sleep', '0.3'])\nos._exit(0) if os.environ['TANGRAM_ARBITER_RESTARTS'] == '0' else None"
    )
    served(one, 2)

    def zombies() -> list[str]:
        children = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
        return [child for child in children if ") Z " in Path(f"/proc/{child}/stat").read_text()]

    pause = time.monotonic() + 0.5  # the orphans have ended by then
    wait_for(lambda: time.monotonic() > pause and not zombies(), 20)
    assert one.process.poll() is None


def test_an_arbiter_that_never_served_is_the_kubelets_to_show(supervise: Callable[..., Supervised]) -> None:
    one = supervise(before="sys.exit(2)")
    assert one.ends() == 2
    assert [event["event"] for event in one.events()] == ["the arbiter ended before it served"]


def test_a_program_that_cannot_be_started_ends_the_supervisor(tmp_path: Path) -> None:
    code = "import sys; from arbiter.supervisor import ArbiterSupervisor; sys.exit(ArbiterSupervisor(['/nonexistent']).run())"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == 127
    assert "/nonexistent" in ended.stderr


def test_one_that_dies_before_it_serves_is_started_later_and_later_and_an_end_is_obeyed_meanwhile(
    supervise: Callable[..., Supervised],
) -> None:
    one = supervise(before="os._exit(3) if os.environ['TANGRAM_ARBITER_RESTARTS'] != '0' else None")
    os.kill(served(one), signal.SIGKILL)
    wait_for(lambda: sum(event["event"] == "the arbiter dies again and again" for event in one.events()) == 2, 20)
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == 0
    delays = [event["delay_s"] for event in one.events() if "restarts" in event]
    assert delays == [0.0, FIRST_S, 2 * FIRST_S]


def test_an_arbiter_does_not_outlive_its_supervisor(supervise: Callable[..., Supervised]) -> None:
    one = supervise()
    pid = served(one)
    one.process.kill()
    one.process.wait(20)
    wait_for(lambda: f"ends {int(signal.SIGTERM)}" in one.output.read_text(), 20)
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text(), 20)


def test_the_pause_grows_to_its_most_and_ends_with_one_that_served() -> None:
    delay = RestartDelay()
    assert [delay.delay_s(float(at), served=False) for at in range(7)] == [0.5, 1, 2, 4, 8, MOST_S, MOST_S]
    assert delay.delay_s(8.0, served=True) == 0.0
    assert delay.delay_s(9.0, served=False) == FIRST_S


def test_twenty_kills_in_a_minute_are_no_crash_loop_and_sixty_are() -> None:
    delay = RestartDelay()
    assert {delay.delay_s(3.0 * at, served=True) for at in range(20)} == {0.0}
    delay = RestartDelay()
    delays = [delay.delay_s(OFTEN_S / 60 * at, served=True) for at in range(60)]
    assert delays[:OFTEN] == [0.0] * OFTEN
    assert min(delays[OFTEN:]) >= FIRST_S
