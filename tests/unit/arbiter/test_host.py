"""Facts about processes of the host: their grant, their user, their end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from arbiter import host
from tests.mounting import with_grant
from tests.unit.arbiter.conftest import wait_for
from vgpu.api.contract import GRANT_DIRS

MOUNTS = """\
22 1 0:20 / / rw,relatime - ext4 /dev/sda1 rw
40 22 8:1 /var/lib/tangram/grants/0a /.tangram ro,relatime shared:1 - ext4 /dev/sda1 rw
"""
EARLIER = MOUNTS.replace("/.tangram", "/run/tangram")
OTHER = "41 22 8:1 /var/lib/tangram/grants/0b /run/tangram ro,relatime shared:1 - ext4 /dev/sda1 rw\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MOUNTS, "0a"),
        (MOUNTS.replace("/var/lib/tangram/grants/0a", "/tangram/grants/0a"), "0a"),
        (MOUNTS.replace("/var/lib/tangram/grants/0a", "/elsewhere/0a"), None),
        (MOUNTS.replace("/var/lib/tangram/grants/0a", "/0a"), None),
        (MOUNTS.replace("/.tangram", "/.tangram/x"), None),
        (MOUNTS.replace("/.tangram", "/volume"), None),
        (MOUNTS + "41 22 0:9 / /.tangram rw - tmpfs none rw\n", None),
        (EARLIER, "0a"),
        (EARLIER.replace("/run/tangram", "/run/tangram/x"), None),
        (EARLIER + "41 22 0:9 / /run/tangram rw - tmpfs none rw\n", None),
        (MOUNTS + OTHER, "0a"),
        (OTHER + MOUNTS, "0a"),
        (MOUNTS + "41 22 0:9 / /run/tangram rw - tmpfs none rw\n", "0a"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_a_process_belongs_to_the_grant_that_is_mounted_in_its_namespace(text: str, key: str | None) -> None:
    assert host.grant_in(text, "grants") == key


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("/state/grants/0a/grant", "0a"),
        ("/state/grants/0a/other", None),
        ("/state/grants/0a/b/grant", None),
        ("/state/grants//grant", None),
        ("/other/grants/0a/grant", None),
        ("", None),
    ],
)
def test_a_process_of_a_run_belongs_to_the_grant_it_was_started_with(value: str, key: str | None) -> None:
    with subprocess.Popen(["sleep", "60"], env={"TANGRAM_GRANT": value, "PATH": os.environ["PATH"]}) as child:
        wait_for(Path(f"/proc/{child.pid}/environ").read_bytes, 30)  # a moment later than there is a child
        assert host.grant_named(child.pid, Path("/state/grants")) == key
        child.kill()


def test_a_grant_that_another_users_process_names_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"], env=os.environ | {"TANGRAM_GRANT": "/state/grants/0a/grant"}) as child:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert host.grant_named(child.pid, Path("/state/grants")) is None
        child.kill()


STATE = """\
22 1 0:20 / / rw,relatime - overlay overlay rw
30 22 8:1 /var/lib/tangram /var/lib/tangram rw,relatime shared:1 - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("root", "device", "key"),
    [
        ("/var/lib/tangram/grants/0a", "8:1", "0a"),
        ("/tmp/grants/0a", "8:1", None),
        ("/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/t/grants/0a", "8:1", None),
        ("/var/lib/tangram/grants/0a", "0:51", None),
        ("/var/lib/tangram/grants/0a/b", "8:1", None),
        ("/var/lib/tangram/grants", "8:1", None),
        ("/var/lib/tangram/grants/0a//deleted", "8:1", None),
    ],
)
def test_a_folder_of_the_same_name_elsewhere_is_no_grant(
    monkeypatch: pytest.MonkeyPatch, root: str, device: str, key: str | None
) -> None:
    """As root in its own user namespace a process can make it, to charge its memory to another container."""
    for at in GRANT_DIRS:
        theirs = f"{STATE}40 22 {device} {root} {at} ro,relatime - ext4 /dev/sda1 rw\n"
        monkeypatch.setattr(host, "_read", lambda pid, _, text=theirs: (STATE if pid == "self" else text).encode())
        assert host.grant_of(7, Path("/var/lib/tangram/grants")) == key


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("made_in", "key"), [("state", "0a"), ("elsewhere", None)])
@pytest.mark.parametrize("at", GRANT_DIRS)
def test_a_mount_of_the_kernels_belongs_to_the_process_it_was_made_for(
    tmp_path: Path, at: str, made_in: str, key: str | None
) -> None:
    for folder in ("state", "elsewhere"):
        (tmp_path / folder / "grants" / "0a").mkdir(parents=True)
    command = with_grant(tmp_path / made_in / "grants/0a", at, "sh", "-c", "echo done && exec sleep 60")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        if child.stdout.readline() != "done\n":
            pytest.skip("mounts are not allowed here")
        assert host.grant_of(child.pid, tmp_path / "state" / "grants") == key
        child.kill()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/var/lib/tangram/grants", ("8:1", "/var/lib/tangram/grants")),
        ("/var/lib/tangram", ("8:1", "/var/lib/tangram")),
        ("/var/lib/other", ("0:20", "/var/lib/other")),
        ("/", ("0:20", "")),
        ("/a b", ("0:20", "/a\\040b")),
    ],
)
def test_a_path_has_one_place_in_one_file_system(path: str, place: tuple[str, str]) -> None:
    assert host.place_of(STATE, path) == place
    assert host.place_of("", path) is None


@pytest.mark.parametrize(
    ("status", "user"), [("Name:\tx\nUid:\t1000\t0\t0\t0\nGid:\t5\n", 1000), ("Name:\tx\n", None), ("", None)]
)
def test_a_process_is_of_its_real_user(status: str, user: int | None) -> None:
    assert host.user_of(status) == user


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_that_runs_as_root_for_another_user_is_not_roots() -> None:
    """He chose its environment. Its folder in /proc is root's all the same."""
    with subprocess.Popen(
        ["setpriv", "--ruid", "1000", "cat"],
        env={"TANGRAM_GRANT": "/state/grants/0a/grant", "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"it runs\n")
        child.stdin.flush()
        child.stdout.readline()
        assert Path(f"/proc/{child.pid}").stat().st_uid == 0
        assert host.grant_named(child.pid, Path("/state/grants")) is None
        child.kill()


def test_facts_of_a_process_that_is_gone_are_empty() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert (host.command_of(child.pid), host.started_at(child.pid), host.pid_inside(child.pid)) == ("", 0, 0)
    assert host.grant_of(child.pid, Path("/grants")) is None
    assert not host.runs(child.pid)
    assert not host.kill(child.pid, 1)


def test_only_the_very_process_that_was_meant_is_killed() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = host.started_at(child.pid)
    assert not host.kill(child.pid, started + 1), "the pid was given to another since"
    assert child.poll() is None
    assert host.kill(child.pid, started)
    assert child.wait(10) == -9


def test_a_stopped_process_answers_nothing() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert host.runs(child.pid)
    os.kill(child.pid, 19)
    wait_for(lambda: not host.runs(child.pid))
    child.kill()
    child.wait()


def test_a_name_with_a_bracket_in_it_does_not_confuse_the_reader(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    child = subprocess.Popen([program, "60"])
    wait_for(lambda: "60" in host.command_of(child.pid))
    assert host.started_at(child.pid) > 1000
    child.kill()
    child.wait()
