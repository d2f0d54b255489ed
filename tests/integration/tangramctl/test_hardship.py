"""What the machine may lack: space on the disk, open streams, files that can be read. A sentence, and nothing broken after it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.tangramctl.conftest import Ctl, arbiters, kill, wait_for

FULL_DISK = ["prlimit", "--fsize=0"]
"""No file may grow: as good as a full disk, and the test's own."""


def errors(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a command that ended with 70."""
    assert done.returncode == 70, done.stderr
    assert done.stderr.startswith("tangramctl: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_run_that_cannot_be_written_down_is_a_sentence_and_leaves_nothing(ctl: Ctl) -> None:
    probe = ctl.probe("1Gi")
    ctl.prefix = FULL_DISK
    assert f"state folder {ctl.folder}/s: File too large" in errors(ctl.run("1Gi", "true"))
    ctl.prefix = ()
    assert len(list((ctl.machine() / "grants").iterdir())) == 1
    assert probe.alloc(1000) == 0
    assert ctl.run("1Gi", "true").returncode == 0


def test_fake_gpus_that_could_not_be_made_on_a_full_disk_are_made_by_the_next_run(ctl: Ctl) -> None:
    ctl.prefix = FULL_DISK
    assert "File too large" in errors(ctl.run("1Gi", "true"))
    ctl.prefix = ()
    assert ctl.run("1Gi", "true").returncode == 0


def test_fake_gpus_that_were_left_half_made_are_made_whole(ctl: Ctl) -> None:
    assert ctl.run("1Gi", "true").returncode == 0
    machine = ctl.machine()
    assert ctl.call("arbiter", "stop", "--force").returncode == 0
    (machine / "driver.conf").write_text("")
    (machine / "driver/lib").unlink()
    (machine / "driver").rmdir()
    assert ctl.run("1Gi", "true").returncode == 0


def test_an_arbiter_is_started_again_though_that_cannot_be_logged(ctl: Ctl) -> None:
    probe = ctl.probe("1000Mi")
    before = ctl.keeper()
    (ctl.machine() / "keeper.new").mkdir()
    kill(before["arbiter_pid"])
    assert probe.alloc(300) == 0  # waits for the new one
    assert ctl.keeper() == before
    (arbiter,) = arbiters(ctl.folder)
    status = ctl.call("arbiter", "status").stdout
    assert f": arbiter {arbiter}, kept by {before['pid']}; 1 run" in status, status
    assert "keeper.json cannot be written" in (ctl.machine() / "arbiter.log").read_text()
    (ctl.machine() / "keeper.new").rmdir()
    wait_for(lambda: ctl.keeper()["arbiter_pid"] != before["arbiter_pid"])
    assert ctl.keeper()["pid"] == before["pid"]


def test_a_run_with_arguments_that_are_no_utf_8_gets_them_as_they_are(ctl: Ctl) -> None:
    done = ctl.run("1Gi", "sh", "-c", 'printf %s "$1" | od -An -tx1', "sh", os.fsdecode(b"caf\xe9"))
    assert done.stdout.split() == ["63", "61", "66", "e9"], done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_run_with_a_closed_stream_starts_an_arbiter_and_hands_the_stream_on_closed(ctl: Ctl, closed: str) -> None:
    program = f"exec 9>{ctl.folder}/seen; ls /proc/$$/fd >&9"
    line = ctl.line("run", "--fake", ctl.gpus, "--gpu-mem", "1Gi", "--", "bash", "-c", program)
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *line], env=ctl.environment, check=False, timeout=60)
    assert done.returncode == 0
    there = set((ctl.folder / "seen").read_text().split())
    gone = {"<": "0", ">": "1", "2": "2"}
    assert not there & {gone[word[0]] for word in closed.split()}
    assert ctl.call("arbiter", "status").returncode == 0


def test_a_listing_with_output_closed_ends_as_it_would_with_output(ctl: Ctl) -> None:
    for words in (("ps",), ("ps", "--json"), ("arbiter", "stop")):
        line = ctl.line(*words)
        done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *line], env=ctl.environment, check=False, timeout=60)
        assert done.returncode == 0


@pytest.mark.parametrize(
    "words",
    [("ps",), ("ps", "--json"), ("arbiter", "stop"), ("top", "--once"), ("run", "--help"), ("--help",), ("--version",)],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error(ctl: Ctl, words: tuple[str, ...], unbuffered: str) -> None:
    ctl.env["PYTHONUNBUFFERED"] = unbuffered
    with Path("/dev/full").open("w") as full:
        done = ctl.call(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert "standard output: No space left on device" in errors(done)


def test_a_reader_that_closes_the_pipe_ends_a_listing_without_a_message(ctl: Ctl) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = ctl.call("ps", capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode < 0 or done.returncode == 1, done.stderr) == (True, "")


@pytest.mark.parametrize("words", [("ps",), ("arbiter", "status"), ("arbiter", "stop"), ("run",)])
def test_the_error_for_an_unusable_state_folder_names_the_file(ctl: Ctl, words: tuple[str, ...]) -> None:
    (ctl.folder / "s/grants").mkdir(parents=True)
    (ctl.folder / "s/lock").mkdir()
    done = ctl.run("1Gi", "true") if words == ("run",) else ctl.call(*words)
    assert f"{ctl.folder}/s/lock: Is a directory" in errors(done)
    (ctl.folder / "s/lock").rmdir()


def test_a_grant_variable_with_an_impossible_file_name_is_an_error(ctl: Ctl) -> None:
    ctl.env["TANGRAM_GRANT"] = "/" + "x" * 5000
    done = ctl.run("1Gi", "true")
    assert "File name too long" in errors(done)
    assert len(done.stderr) < 500


@pytest.mark.parametrize("text", ["[]", '{"pid": {}}'])
def test_a_keepers_file_that_is_none_is_as_none(ctl: Ctl, text: str) -> None:
    assert ctl.run("1Gi", "true").returncode == 0
    file = ctl.machine() / "keeper.json"
    whole = file.read_text()
    file.write_text(text)
    assert ctl.call("arbiter", "status").returncode == 3
    assert ctl.run("1Gi", "true").returncode == 0
    file.write_text(whole)
    assert json.loads(whole)["pid"] == ctl.keeper()["pid"]
