"""A process is not spared for the name that it gives itself."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.integration.shim.conftest import CARDS, Stage, wait_for
from tests.integration.shim.test_bypass import (
    ID,
    KILL,
    KILLED_S,
    REPORTED_S,
    UID,
    container_cgroup,
    document,
    reasons,
    strict,
)
from tests.integration.shim.test_guard import Bypass, bypasses, raw
from vgpu.codec import grant_to_text
from vgpu.grant import Grant, GrantCard

__all__ = ["bypasses", "container_cgroup", "raw", "strict"]
ENTER = 'echo $$ > "$0/cgroup.procs"; exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_static_program_of_a_pod_that_is_called_like_the_mps_server_is_killed(
    strict: Stage, raw: Path, bypasses: list[Bypass], container_cgroup: Path, tmp_path: Path
) -> None:
    """What an MPS server of the node holds is its clients'. In a pod, anybody can take its name."""
    strict.stop_arbiter()
    strict.write_grant(grant_to_text(Grant("default", "a", UID, "main", (GrantCard(CARDS[0], 1000),))))
    (strict.folder / "grants" / strict.key / "container").write_text(f"{ID}\n")
    strict.start_measuring_arbiter(*KILL, "--mount-needed", "true")
    named = shutil.copy(raw, tmp_path / "nvidia-cuda-mps-server")
    began = time.monotonic()
    bypass = Bypass(
        strict, "sh", "-c", ENTER, str(container_cgroup), str(named), str(strict.folder / "driver.sock"), "1500"
    )
    bypasses.append(bypass)
    assert Path(f"/proc/{bypass.pid}/comm").read_text() == "nvidia-cuda-mps\n"
    wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    assert [kill.pid for kill in document(strict).kills] == [bypass.pid]
    wait_for(lambda: not (container_cgroup / "cgroup.procs").read_text())
