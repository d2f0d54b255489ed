"""What other users of the machine can do with the runs of root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.tangramctl.conftest import Ctl, kill, wait_for

roots = pytest.mark.skipif(os.geteuid() != 0, reason="only root has runs that others could reach")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]


def denied(path: Path, *words: str) -> bool:
    done = subprocess.run([*NOBODY, *words, str(path)], capture_output=True, text=True, check=False)
    return done.returncode != 0 and "Permission denied" in done.stderr


@roots
def test_another_user_cannot_find_the_grants_of_roots_runs(ctl: Ctl) -> None:
    ctl.folder.chmod(0o755)
    ctl.probe("1000Mi")
    machine = ctl.machine()
    assert subprocess.run([*NOBODY, "ls", str(machine)], capture_output=True, check=False).returncode == 0
    assert denied(machine / "grants", "ls")
    assert denied(machine / "arbiter.log", "cat")  # it names grants


@roots
def test_a_command_that_drops_its_rights_still_reaches_its_grant(ctl: Ctl) -> None:
    ctl.folder.chmod(0o755)
    reads = ctl.run("1000Mi", *NOBODY, "sh", "-c", 'cat "$TANGRAM_GRANT"')
    assert reads.stdout.startswith("tangram-grant 1\n"), reads.stderr


@pytest.mark.parametrize("umask", [0o000, 0o007])
def test_nobody_else_may_write_what_is_made_and_the_command_has_its_callers_umask(ctl: Ctl, umask: int) -> None:
    run = ctl.call("run", "--fake", ctl.gpus, "--gpu-mem", "1Gi", "--", "sh", "-c", "umask", umask=umask)
    assert (run.returncode, int(run.stdout, 8)) == (0, umask), run.stderr
    machine = ctl.machine()
    kill(ctl.keeper()["pid"])
    run_that_stays = ctl.start("1Gi", "sh", "-c", "echo in; read x")
    assert run_that_stays.stdout is not None
    run_that_stays.stdout.readline()
    kill(ctl.keeper()["pid"])
    (machine / "keeper.json").unlink()
    assert ctl.call("ps", umask=umask).returncode == 0  # starts a keeper, too
    wait_for((machine / "keeper.json").exists)
    made = [path for path in (ctl.folder / "s").rglob("*") if not path.is_symlink() and not path.is_socket()]
    assert {"driver", "description", "driver.conf", "driver.log", "keeper.json", "run.json"} <= {p.name for p in made}
    assert [path for path in made if path.stat().st_mode & 0o022] == []
