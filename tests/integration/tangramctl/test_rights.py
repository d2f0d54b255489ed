"""What other users of the machine can do with the runs of root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.tangramctl.conftest import Ctl

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has runs that others could reach")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]


def denied(path: Path, *words: str) -> bool:
    done = subprocess.run([*NOBODY, *words, str(path)], capture_output=True, text=True, check=False)
    return done.returncode != 0 and "Permission denied" in done.stderr


def test_another_user_cannot_find_the_grants_of_roots_runs(ctl: Ctl) -> None:
    ctl.folder.chmod(0o755)
    ctl.probe("1000Mi")
    machine = ctl.machine()
    assert subprocess.run([*NOBODY, "ls", str(machine)], capture_output=True, check=False).returncode == 0
    assert denied(machine / "grants", "ls")
    assert denied(machine / "arbiter.log", "cat")  # it names grants


def test_a_command_that_drops_its_rights_still_reaches_its_grant(ctl: Ctl) -> None:
    ctl.folder.chmod(0o755)
    reads = ctl.run("1000Mi", *NOBODY, "sh", "-c", 'cat "$TANGRAM_GRANT"')
    assert reads.stdout.startswith("tangram-grant 1\n"), reads.stderr
