"""Programs that hide from the arbiter: each is gone before the next reading, or replaces another one, or has a mapping or a connection to show."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.integration.shim.conftest import GPUS, Stage, wait_for
from tests.integration.shim.test_bypass import (
    KILLED_S,
    REPORTED_S,
    SEEN,
    document,
    reasons,
    some_readings,
    strict,
)
from tests.integration.shim.test_guard import PROGRAM, Bypass, bypasses, raw, set_policy
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

__all__ = ["bypasses", "raw", "strict"]

RELAY = """
import subprocess, sys, time
seconds, words, before = float(sys.argv[1]), sys.argv[2:], None
while True:
    one = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    one.stdout.readline()
    if before is None:
        print("ready", flush=True)
    else:
        time.sleep(seconds)
        if before.poll() is not None:
            sys.exit(before.returncode)
        before.kill()
        before.wait()
    time.sleep(seconds)
    before = one
"""
"""Static programs, one after the other. Each begins half its life before the one before it ends. Ends with the first that is killed."""


def relay(stage: Stage, raw: Path, life_s: float, mib: int) -> Bypass:
    words = (str(life_s / 2), str(raw), str(stage.folder / "driver.sock"), str(mib))
    return Bypass(stage, sys.executable, "-c", RELAY, *words)


def test_a_relay_of_programs_that_live_for_less_than_two_readings_is_reported_within_5_s_and_ended_within_10(
    strict: Stage, raw: Path, bypasses: list[Bypass]
) -> None:
    worker = strict.worker()
    worker.must("alloc(100)")
    began = time.monotonic()
    bypass = relay(strict, raw, 1.4, 1500)
    bypasses.append(bypass)
    wait_for(lambda: "bypassing" in reasons(strict), REPORTED_S)
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == 256 - signal.SIGKILL
    killed = document(strict).kills
    assert killed
    assert all(one.bypass and one.container == "main" and str(raw) in one.command for one in killed)
    assert worker.request("info()")[0] == 0


def test_under_another_policy_a_relay_is_reported_and_goes_on(strict: Stage, raw: Path, bypasses: list[Bypass]) -> None:
    strict.stop_arbiter()
    strict.start_measuring_arbiter("--bypass", "report", "--bypass-quiet-s", "0", *SEEN)
    bypass = relay(strict, raw, 1.4, 1500)
    bypasses.append(bypass)
    wait_for(lambda: "bypassing" in reasons(strict), REPORTED_S)
    wait_for(lambda: [one.policy for one in strict.status().bypasses] == ["report"], KILLED_S)
    some_readings()
    assert bypass.process.poll() is None
    assert document(strict).kills == ()


TAKES = PROGRAM.replace("sys.stdin.read()", "import os; os.execve({program!r}, {words!r}, {env!r})")


def becomes(stage: Stage, *words: str, env: dict[str, str]) -> Bypass:
    """A program of the container that connects, allocates 64 MiB and replaces itself."""
    with_library = {key: stage.env()[key] for key in ("TANGRAM_GRANT", "LD_PRELOAD")}
    program = TAKES.format(bytes=64 * 2**20, program=words[0], words=words, env=env)
    return Bypass(stage, sys.executable, "-c", program, **with_library)


def test_a_program_that_connects_and_replaces_itself_by_a_static_one_is_killed(
    strict: Stage, raw: Path, bypasses: list[Bypass]
) -> None:
    worker = strict.worker()
    worker.must("alloc(100)")
    began = time.monotonic()
    bypass = becomes(strict, str(raw), str(strict.folder / "driver.sock"), "1500", env={})
    bypasses.append(bypass)
    assert bypass.process.stdout is not None
    assert bypass.process.stdout.readline() == "ready\n", "the static program"
    wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    assert [(one.pid, one.bypass) for one in document(strict).kills] == [(bypass.pid, True)]
    assert worker.request("info()")[0] == 0


def test_a_program_that_replaces_itself_by_one_with_the_library_connects_anew_and_lives(
    strict: Stage, bypasses: list[Bypass]
) -> None:
    """Also far over its limit, as the limit is lowered: that is for `guard`."""
    program = (sys.executable, "-c", PROGRAM.format(bytes=500 * 2**20))
    bypass = becomes(strict, *program, env=strict.env())
    bypasses.append(bypass)
    assert bypass.process.stdout is not None
    assert bypass.process.stdout.readline() == "ready\n", "the second program"
    assert [one.pid for one in strict.status().processes if one.pid_in_container] == [bypass.pid]
    strict.write_grant(grant_to_text(Grant("default", "a", "1", "main", (GrantGpu(GPUS[0], 300),))))
    wait_for(lambda: "over-limit" in reasons(strict))
    some_readings()
    assert reasons(strict).keys() & {"bypassing", "unconnected"} == set()
    assert document(strict).kills == ()
    assert bypass.process.poll() is None


KIT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "e2e/attacks/programs")!r})
from kit import *
"""
HIDING = {
    "mapped-only": "import mmap; file = open({library!r}, 'rb'); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n",
    "forged-hello": KIT + "sock = connect({socket!r}); sock.send(hello()); assert answer(sock)\n",
    "past-the-hooks": KIT
    + "Driver(addresses=addresses(*NAMES)).take(1472); print('ready', flush=True); sys.stdin.read()\n",
}
"""Attacks of tests/e2e/attacks that a mapping or a connection hides."""


@pytest.mark.parametrize("way", HIDING)
def test_a_mapping_or_a_connection_hides_from_arbiter_bypass_and_not_from_the_guards_policy(
    strict: Stage, bypasses: list[Bypass], way: str
) -> None:
    """Under report and evict the arbiter does not kill it; under evict the device plugin deletes the pod, by the arbiter's status."""
    grants = strict.folder / "grants" / strict.key
    program = HIDING[way].format(library=str(strict.build / "libtangram.so"), socket=str(grants / "arbiter.sock"))
    program += "" if way == "past-the-hooks" else PROGRAM.format(bytes=1472 * 2**20)
    env = {key: strict.env()[key] for key in ("TANGRAM_GRANT", "LD_PRELOAD")} if way == "past-the-hooks" else {}
    bypass = Bypass(strict, sys.executable, "-c", program, **env)
    bypasses.append(bypass)
    wait_for(lambda: strict.status().over and "over-limit" in reasons(strict), REPORTED_S)
    set_policy(strict, "evict")
    some_readings()
    status = strict.status()
    assert (status.over_limit_action, status.over, status.bypasses) == ("evict", True, ())
    assert ("unconnected" in reasons(strict)) is (way != "forged-hello"), "that one keeps its connection"
    assert "bypassing" not in reasons(strict)
    assert document(strict).kills == ()
    assert bypass.process.poll() is None
    set_policy(strict, "kill")
    assert bypass.process.wait(KILLED_S) == -signal.SIGKILL
    assert [(one.pid, one.bypass) for one in document(strict).kills] == [(bypass.pid, False)]


def test_a_program_without_the_library_that_greets_the_arbiter_and_hangs_up_is_killed(
    strict: Stage, bypasses: list[Bypass]
) -> None:
    """As one that connected and became another program."""
    grants = strict.folder / "grants" / strict.key
    greets = HIDING["forged-hello"].format(socket=str(grants / "arbiter.sock"))
    began = time.monotonic()
    bypass = Bypass(strict, sys.executable, "-c", f"{greets}sock.close()\n" + PROGRAM.format(bytes=1500 * 2**20))
    bypasses.append(bypass)
    wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    assert [(one.pid, one.bypass) for one in document(strict).kills] == [(bypass.pid, True)]
