"""The attacks on the order of libraries, in a root directory like a container's: the library is loaded by /etc/ld.so.preload. Needs root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.attacks import loading
from tests.e2e.attacks.attack import LIMIT_MIB, Attack, Outcome
from tests.integration.shim.conftest import GPUS, Stage, wait_for
from tests.integration.shim.test_preload import own
from tests.mounting import with_grant
from vgpu.api.contract import CONTAINER_DIR

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
PROGRAMS = Path(loading.__file__).parent / "programs"
PYTHON = "/usr/bin/python3"
ROWS = [row for row in loading.ATTACKS if row.name.startswith(("preload-", "driver-", "deep-bind", "dlmopen"))]
CONTAINER = """
cp -a /etc "{folder}/etc"
echo "{library}" > "{folder}/etc/ld.so.preload"
echo "{fake}" > "{folder}/etc/ld.so.conf.d/0-fake.conf"
mount --bind "{folder}/etc" /mnt/etc
mkdir -p /mnt/attacks /mnt/run/nvidia-persistenced
mount --bind "{programs}" /mnt/attacks
mount -t tmpfs none /mnt/dev
cp -a /dev/null /dev/urandom /mnt/dev
touch /mnt/dev/nvidia0
touch /mnt/run/nvidia-persistenced/socket
mount --bind "{folder}/driver.sock" /mnt/run/nvidia-persistenced/socket
mount -t tmpfs none /mnt/tmp
chroot /mnt /sbin/ldconfig -X
"""


@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"needs {PYTHON}, whose _ctypes is a library")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_attack_has_its_outcome_where_the_library_comes_last(own_measured: Stage, row: Attack) -> None:
    stage = own_measured
    stage.grant((GPUS[0], LIMIT_MIB))
    then = CONTAINER.format(folder=stage.folder, library=own(stage), fake=stage.build / "fake", programs=PROGRAMS)
    head = "import sys; sys.path.insert(0, '/attacks'); from kit import *\n"
    command = with_grant(stage.folder / "grants" / stage.key, CONTAINER_DIR, PYTHON, "-c", head + row.script, then=then)
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            seen: list[str] = []
            allocated = ""
            while not allocated and (line := process.stdout.readline()):
                seen.append(line)
                allocated = line if " allocated " in line or " refused" in line else ""
            mib = int(allocated.split(" allocated ")[1].split()[0]) if " allocated " in allocated else 0
            assert allocated, seen
            if row.outcome is Outcome.HARMLESS:
                assert (0 if row.name == "dlmopen" else 1) <= mib <= LIMIT_MIB, seen  # which gets no context
            else:
                assert mib > LIMIT_MIB
                wait_for(lambda: row.reason in {one.reason for one in stage.status().unenforced})
        finally:
            process.kill()
