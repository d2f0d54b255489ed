"""The records of runs: exactly the runs that live have one, whatever was killed and whenever."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tangramctl import records
from tangramctl.errors import Broken
from tangramctl.machine import StateRoot, prepared
from vgpu.api.burst import BurstLimits, burst_from_text
from vgpu.api.codec import grant_from_text
from vgpu.api.contract import BURST
from vgpu.api.grant import AssignedGpu, GrantGpu

PIECE = AssignedGpu("GPU-aaaaaaaa-0000-0000-0000-000000000000", 0, 1024, 30)
TERMS = records.RunTerms("best-effort", 4, clear=True, model="T4")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateRoot:
    monkeypatch.setattr("tangramctl.machine.SOCKET_PATH_LIMIT", 4096)  # pytest's folders are long; no sockets here
    return prepared(tmp_path / "s")


def rewrite(machine: StateRoot, run: records.Run, **fields: object) -> None:
    path = machine.grants / run.key / "run.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(run, **fields)))


def test_a_run_is_in_the_record_with_a_grant_that_agrees(machine: StateRoot) -> None:
    run = records.write(machine, ("python", "train.py"), PIECE, TERMS)
    assert records.runs(machine) == [run]
    assert (run.pid, run.assigned, run.service_class, run.level, run.name) == (
        os.getpid(),
        PIECE,
        "best-effort",
        4,
        "python train.py",
    )
    grant = grant_from_text(machine.grant(run.key).read_text())
    assert [(gpu.uuid, gpu.mib, gpu.core_percent) for gpu in grant.gpus] == [(PIECE.uuid, 1024, 30)]
    assert (grant.service_class, grant.level, grant.clear) == ("best-effort", 4, True)
    assert machine.grant(run.key).stat().st_mode & 0o777 == 0o444


def test_a_run_that_may_burst_has_its_limits_beside_its_grant_and_others_have_no_such_file(machine: StateRoot) -> None:
    limits = BurstLimits((GrantGpu(PIECE.uuid, 8192, 30),), 30)
    bursting, plain = (
        machine.grant(records.write(machine, ("x",), PIECE, terms).key)
        for terms in (msgspec.structs.replace(TERMS, burst=limits), TERMS)
    )
    file = bursting.with_name(BURST)
    assert burst_from_text(file.read_text()) == limits
    assert file.stat().st_mode & 0o777 == 0o444
    assert not plain.with_name(BURST).exists()


def test_no_other_user_can_list_the_grants_and_a_process_with_a_name_can_open_one(machine: StateRoot) -> None:
    assert machine.grants.stat().st_mode & 0o777 == 0o711
    run = records.write(machine, ("x",), PIECE, TERMS)
    assert (machine.grants / run.key).stat().st_mode & 0o777 == 0o755
    machine.grants.chmod(0o755)  # of an earlier version
    prepared(machine.root)
    assert machine.grants.stat().st_mode & 0o777 == 0o711


def test_a_run_whose_process_ended_is_taken_out(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    rewrite(machine, run, pid=ended.pid)
    assert records.runs(machine) == []
    assert list(machine.grants.iterdir()) == []


def test_a_pid_that_was_given_to_another_process_is_no_run(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    rewrite(machine, run, start_ticks=run.start_ticks - 1)
    assert records.runs(machine) == []


def test_a_run_of_before_the_reboot_is_no_run_though_its_pid_and_time_are_those_of_another(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    rewrite(machine, run, boot="another")
    assert records.runs(machine) == []


def test_a_process_that_was_started_with_the_grant_keeps_the_run(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    rewrite(machine, run, start_ticks=run.start_ticks - 1)
    env = os.environ | {"TANGRAM_GRANT": str(machine.grant(run.key))}
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as child:
        assert [there.key for there in records.runs(machine)] == [run.key]
        child.communicate()
    assert records.runs(machine) == []


def test_a_zombie_does_not_live(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    rewrite(machine, run, pid=child.pid, start_ticks=ticks)
    assert records.runs(machine) == []
    child.wait()


def test_what_a_kill_in_the_middle_of_writing_left_is_taken_away(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    (machine.grants / ".0123456789abcdef").mkdir()
    shutil.copytree(machine.grants / run.key, machine.grants / ".0123456789abcdee")  # just before its renaming
    (machine.grants / "0123456789abcdef").mkdir()  # in the middle of being taken away
    torn = shutil.copytree(machine.grants / run.key, machine.grants / "0123456789abcdee")  # the grant goes first
    (torn / "grant").unlink()
    (torn / "run.json").unlink()
    assert records.runs(machine) == [run]
    assert [folder.name for folder in machine.grants.iterdir()] == [run.key]


def unreadable(path: Path, how: str) -> None:
    if how in ("folder", "lost"):
        path.unlink()
        if how == "folder":
            path.mkdir()
    elif how == "newer":
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"version": 2}))
    else:
        path.write_text(how)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("", "cannot be read: Input data was truncated"),
        ("{}", "cannot be read: Object missing required field"),
        ("folder", "cannot be read: Is a directory"),
        ("lost", "cannot be read: No such file or directory"),
        ("newer", "version 2: this tangramctl reads up to version 1"),
    ],
)
def test_a_run_that_cannot_be_read_has_the_shares_of_its_grant_while_it_lives(
    machine: StateRoot, how: str, why: str
) -> None:
    other = records.write(machine, ("y",), PIECE, TERMS)
    run = records.write(machine, ("x",), PIECE, TERMS)
    unreadable(machine.grants / run.key / "run.json", how)
    (found,) = [there for there in records.runs(machine) if there != other]
    assert isinstance(found, records.UnreadableRun)
    assert why in found.why
    assert (found.key, found.pid, found.uuid, found.mib, found.core_percent) == (
        run.key,
        os.getpid(),
        PIECE.uuid,
        1024,
        30,
    )


def test_a_run_that_cannot_be_read_is_taken_out_when_nothing_of_it_lives(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    folder = machine.grants / run.key
    (folder / "run.json").write_text("{")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    text = (folder / "grant").read_text().replace(f"run-{os.getpid()}", f"run-{ended.pid}")
    (folder / "grant").unlink()
    (folder / "grant").write_text(text)
    env = os.environ | {"TANGRAM_GRANT": str(machine.grant(run.key))}
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as child:
        assert [there.key for there in records.runs(machine)] == [run.key]
        child.communicate()
    assert records.runs(machine) == []
    assert not folder.exists()


def test_a_run_that_a_kill_left_half_removed_is_removed_by_the_next_listing(
    machine: StateRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    rewrite(machine, run, boot="another")

    def killed(folder: Path) -> None:
        (folder / "run.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            records.runs(machine)
    assert [folder.name for folder in machine.grants.iterdir()] == [run.key]
    assert records.runs(machine) == []
    assert list(machine.grants.iterdir()) == []


def test_a_run_whose_grant_cannot_be_read_either_has_nothing_that_is_known(machine: StateRoot) -> None:
    run = records.write(machine, ("x",), PIECE, TERMS)
    (machine.grants / run.key / "run.json").write_text("{")
    machine.grant(run.key).unlink()
    env = os.environ | {"TANGRAM_GRANT": str(machine.grant(run.key))}
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as child:
        (found,) = records.runs(machine)
        assert isinstance(found, records.UnreadableRun)
        assert (found.mib, "what it has is not known" in found.why) == (0, True)
        child.communicate()


def test_a_plain_file_among_the_grants_belongs_to_no_run(machine: StateRoot) -> None:
    (machine.grants / "notes").write_text("x")
    run = records.write(machine, ("x",), PIECE, TERMS)
    assert records.runs(machine) == [run]
    assert (machine.grants / "notes").exists()


def test_a_command_line_that_is_no_utf_8_is_written_as_far_as_it_can_be_read(machine: StateRoot) -> None:
    run = records.write(machine, ("ls", os.fsdecode(b"caf\xe9")), PIECE, TERMS)
    assert records.runs(machine) == [run]
    assert run.name == "ls caf\ufffd"


def test_a_run_that_cannot_be_written_leaves_nothing_behind(
    machine: StateRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        records.write(machine, ("x",), PIECE, TERMS)
    assert list(machine.grants.iterdir()) == []


def test_a_command_line_is_shown_without_what_a_terminal_would_obey(machine: StateRoot) -> None:
    run = records.write(machine, ("echo", "\x1b[2J\n"), PIECE, TERMS)
    assert run.name == "echo ?[2J?"


def test_a_state_folder_too_deep_for_a_socket_is_refused_with_the_number(tmp_path: Path) -> None:
    with pytest.raises(Broken, match=r"has \d+ characters: it must have 1 to \d+"):
        prepared(tmp_path / ("x" * 100))
