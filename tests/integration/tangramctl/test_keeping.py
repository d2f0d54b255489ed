"""One arbiter for all runs, there when it is needed, gone some time after; and what is left when things are killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tangramctl.machine import held
from tests.integration.tangramctl.conftest import (
    OUT_OF_MEMORY,
    SMALL_MIB,
    Ctl,
    alive,
    arbiters,
    kill,
    wait_for,
)
from tests.signals import send_signal


def test_sixteen_starts_at_once_make_one_arbiter(ctl: Ctl) -> None:
    runs = [ctl.start("256Mi", "sh", "-c", "echo in; read x") for _ in range(16)]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "in\n", run.stderr
    keeper = ctl.keeper()
    assert arbiters(ctl.folder) == [keeper["arbiter_pid"]]
    assert len({entry["key"] for entry in ctl.ps()}) == 16
    for run in runs:
        run.communicate("\n")
    assert {run.returncode for run in runs} == {0}


def test_sixteen_requests_at_once_never_get_more_than_the_gpu_has(ctl: Ctl) -> None:
    runs = [ctl.start("512Mi", "sh", "-c", "echo in; read x", options=["--gpu", "1"]) for _ in range(16)]
    lines = [run.stdout.readline() for run in runs if run.stdout]
    assert lines.count("in\n") == SMALL_MIB // 512
    for run in runs:
        run.communicate("\n")
    assert sorted(run.returncode for run in runs) == [0] * 8 + [75] * 8


def test_the_arbiter_ends_some_time_after_the_last_run(ctl: Ctl) -> None:
    ctl.env["TANGRAMCTL_IDLE_S"] = "0.2"
    run = ctl.start("1Gi", "sh", "-c", "echo in; read x")
    assert run.stdout is not None
    run.stdout.readline()
    keeper = ctl.keeper()
    assert alive(keeper["pid"])
    run.communicate("\n")
    wait_for(lambda: not alive(keeper["pid"]))
    assert arbiters(ctl.folder) == []
    assert ctl.run("1Gi", "true").returncode == 0


def test_a_keeper_stays_while_a_run_is_being_started(ctl: Ctl) -> None:
    ctl.env["TANGRAMCTL_IDLE_S"] = "0"
    run = ctl.start("1Gi", "sh", "-c", "echo in; read x")
    assert run.stdout is not None
    run.stdout.readline()
    keeper, machine = ctl.keeper(), ctl.machine()
    with held(machine / "wanted.lock", fcntl.LOCK_SH):
        run.communicate("\n")
        for mark in (".one", ".other"):
            (machine / "grants" / mark).mkdir()
            wait_for(lambda mark=mark: not (machine / "grants" / mark).exists())  # type: ignore[misc]
        assert alive(keeper["pid"]), "it has looked twice and found no run"
    wait_for(lambda: not alive(keeper["pid"]))


def test_a_killed_run_gives_its_share_back(ctl: Ctl) -> None:
    probe = ctl.probe("16Gi")
    assert probe.alloc(1000) == 0
    kill(probe.process.pid)
    assert ctl.ps() == []
    assert ctl.run("16Gi", "true").returncode == 0


def test_a_share_is_held_until_the_last_process_of_the_run_has_ended(ctl: Ctl) -> None:
    run = ctl.start("16Gi", "sh", "-c", "exec 3<&0; (exec >&- 2>&-; read x <&3) & exit 3")
    assert run.wait() == 3
    (entry,) = ctl.ps()
    assert entry["pid"] == run.pid
    assert ctl.run("16Gi", "true").returncode == 75
    run.communicate("\n")
    wait_for(lambda: ctl.ps() == [])
    assert ctl.run("16Gi", "true").returncode == 0


def test_a_killed_arbiter_is_started_again_and_learns_what_is_held(ctl: Ctl) -> None:
    probe = ctl.probe("1000Mi")
    assert probe.alloc(600) == 0
    before = ctl.keeper()
    kill(before["arbiter_pid"])
    assert probe.alloc(300) == 0  # waits for the new one
    assert probe.alloc(101) == OUT_OF_MEMORY
    after = ctl.keeper()
    assert after["pid"] == before["pid"]
    assert after["arbiter_pid"] != before["arbiter_pid"]
    assert arbiters(ctl.folder) == [after["arbiter_pid"]]


def test_a_killed_keeper_ends_its_arbiter_and_the_next_listing_starts_both_again(ctl: Ctl) -> None:
    run = ctl.start("1000Mi", "cat")
    wait_for(lambda: ctl.ps())
    before = ctl.keeper()
    kill(before["pid"])
    wait_for(lambda: not alive(before["arbiter_pid"]))
    (entry,) = ctl.ps()
    assert entry["pid"] == run.pid
    assert entry["processes"] == []  # not null: an arbiter answered
    after = ctl.keeper()
    assert arbiters(ctl.folder) == [after["arbiter_pid"]]
    assert after["pid"] != before["pid"]


def test_an_arbiter_that_is_ending_without_its_keeper_is_not_taken_for_one_that_stays(ctl: Ctl) -> None:
    run = ctl.start("1000Mi", "cat")
    wait_for(lambda: ctl.ps())
    before = ctl.keeper()
    send_signal(before["arbiter_pid"], signal.SIGSTOP)  # its sockets are there as before
    kill(before["pid"])
    with subprocess.Popen(ctl.line("ps", "--json"), env=ctl.environment, stdout=subprocess.PIPE) as looks:
        wait_for(lambda: is_locked(ctl.machine() / "keeper.lock"))
        os.kill(before["arbiter_pid"], signal.SIGCONT)
        assert looks.stdout is not None
        (entry,) = json.loads(looks.stdout.read())["entries"]
    assert looks.returncode == 0
    assert (entry["pid"], entry["processes"]) == (run.pid, [])
    after = ctl.keeper()
    assert after["pid"] != before["pid"]
    assert arbiters(ctl.folder) == [after["arbiter_pid"]]


def is_locked(path: Path) -> bool:
    """By a process; we do not take the lock from one that is about to."""
    return any(
        line.split()[5].endswith(f":{path.stat().st_ino}") for line in Path("/proc/locks").read_text().splitlines()
    )


def test_an_arbiter_that_cannot_run_is_an_error_and_nothing_is_left(ctl: Ctl) -> None:
    ctl.env["TANGRAM_ARBITER_GRACE_MS"] = "never"
    ctl.env["TANGRAM_ARBITER_CONNECTIONS_LIMIT"] = "never"
    done = ctl.run("1Gi", "true")
    assert done.returncode == 70
    assert "the arbiter ended with" in done.stderr
    del ctl.env["TANGRAM_ARBITER_CONNECTIONS_LIMIT"], ctl.env["TANGRAM_ARBITER_GRACE_MS"]
    assert ctl.ps() == []
    assert ctl.run("1Gi", "true").returncode == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_that_cannot_be_read_leaves_the_arbiter_to_the_others(ctl: Ctl, lost: bool) -> None:
    probe, other = ctl.probe("3Gi", ["--gpu", "1"]), ctl.probe("1Gi", ["--gpu", "0"])
    keeper = ctl.keeper()
    (broken,) = [entry["key"] for entry in ctl.ps() if entry["pid"] == probe.process.pid]
    written = ctl.machine() / "grants" / broken / "run.json"
    written.unlink() if lost else written.write_text("{")
    full = ctl.run("2Gi", "true", options=["--gpu", "1"])
    assert full.returncode == 75
    assert f"3072 MiB granted to pid {probe.process.pid}, ?" in full.stderr
    assert "run.json cannot be read" in ctl.call("ps").stdout
    kill(keeper["arbiter_pid"])
    assert other.alloc(1000) == 0  # waits for the new one
    assert probe.alloc(3000) == 0
    assert ctl.keeper()["pid"] == keeper["pid"]
    kill(probe.process.pid)
    wait_for(lambda: len(ctl.ps()) == 1)


def test_stop_spares_an_arbiter_with_runs_unless_forced(ctl: Ctl) -> None:
    status = ctl.call("arbiter", "status")
    assert (status.returncode, "no arbiter runs" in status.stdout) == (3, True)
    run = ctl.start("1Gi", "cat")
    wait_for(lambda: ctl.ps())
    status = ctl.call("arbiter", "status")
    assert (status.returncode, "; 1 run; log" in status.stdout) == (0, True)
    kept = ctl.call("arbiter", "stop")
    assert kept.returncode == 2
    assert f"1 run lives (process {run.pid}) and could get no more memory: end it, or" in kept.stderr
    pid = ctl.keeper()["pid"]
    assert ctl.call("arbiter", "stop", "--force").stdout == "1 stopped\n"
    assert not alive(pid)
    assert arbiters(ctl.folder) == []
    assert ctl.call("arbiter", "stop").stdout == "no arbiter was running\n"
    assert run.communicate("a\n")[0] == "a\n"


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_watch_shows_again_until_it_is_interrupted(ctl: Ctl, options: list[str]) -> None:
    line = ctl.line("ps", "--watch", *options)
    with subprocess.Popen(
        line, env=ctl.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watch:
        assert watch.stdout is not None
        first = "no run has a share of a GPU\n" if not options else "{\n"
        assert watch.stdout.readline() == first
        while watch.stdout.readline() != first:
            pass
        watch.send_signal(signal.SIGINT)
        assert watch.wait() == -signal.SIGINT
        assert watch.stderr is not None
        assert watch.stderr.read() == ""


def test_a_listing_leaves_nothing_behind(ctl: Ctl) -> None:
    assert ctl.ps() == []
    assert ctl.call("arbiter", "status").returncode == 3
    assert ctl.call("arbiter", "stop").returncode == 0
    assert not (ctl.folder / "s").exists()


def test_a_state_folder_that_is_taken_away_takes_the_keeper_along(ctl: Ctl) -> None:
    assert ctl.run("1Gi", "true").returncode == 0
    keeper = ctl.keeper()
    machine = ctl.machine()
    for name in ("grants", "keeper.lock"):
        path = ctl.folder / "new" / machine.relative_to(ctl.folder / "s") / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.touch() if name == "keeper.lock" else path.mkdir()
    (ctl.folder / "s").rename(ctl.folder / "gone")
    (ctl.folder / "new").rename(ctl.folder / "s")
    wait_for(lambda: not alive(keeper["pid"]))
    assert ctl.run("1Gi", "true").returncode == 0  # has a keeper of its own, in a new folder of the same name
    assert arbiters(ctl.folder) == [ctl.keeper()["arbiter_pid"]]


def test_a_user_other_than_root_has_a_separate_record(ctl: Ctl) -> None:
    runtime = ctl.folder / "run"
    runtime.mkdir(mode=0o700)
    ctl.folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(runtime, 65534, 65534)
        ctl.prefix = as_nobody()
    ctl.env |= {"XDG_RUNTIME_DIR": str(runtime), "HOME": "/nonexistent", "TANGRAMCTL_STATE": ""}
    state = runtime / "tangramctl"
    probe = ctl.probe("1000Mi")
    assert probe.alloc(1001) == OUT_OF_MEMORY
    assert probe.alloc(1000) == 0
    (entry,) = ctl.ps()
    assert entry["gpus"][0]["used_bytes"] is not None
    assert entry["name"] == ("nobody" if os.geteuid() == 0 else entry["name"])
    assert state.stat().st_mode & 0o777 == 0o700
    assert len(arbiters(state)) == 1


def test_another_users_folder_in_the_place_of_ours_is_refused(ctl: Ctl) -> None:
    state = ctl.folder / "s"
    state.mkdir()
    state.chmod(0o777)
    done = ctl.run("1Gi", "true")
    assert done.returncode == 70
    assert "it must be a folder of user" in done.stderr
    state.chmod(0o755)


def as_nobody() -> list[str]:
    """User `nobody`, with no right but, where the interpreter lies in root's home, to look into folders."""
    plain = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
    itself = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', ''], check=True)"
    if subprocess.run([*plain, sys.executable, "-c", itself], capture_output=True, check=False).returncode == 0:
        return plain
    search = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    return [*plain[:-1], "--bounding-set=-all,+dac_read_search", *search]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_fake_driver_that_ends_is_replaced_for_the_next_run(ctl: Ctl, number: int) -> None:
    assert ctl.run("1Gi", "true").returncode == 0
    keeper = ctl.keeper()
    children = Path(f"/proc/{keeper['pid']}/task/{keeper['pid']}/children").read_text().split()
    (driver,) = {int(pid) for pid in children} - {keeper["arbiter_pid"]}
    os.kill(driver, number)
    wait_for(lambda: not alive(keeper["pid"]))
    assert ctl.run("1Gi", "true").returncode == 0
