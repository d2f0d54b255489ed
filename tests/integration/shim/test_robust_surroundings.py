"""Processes that have little: no standard files, no descriptors, no right to a socket, a root that cannot be written, a loader that distrusts
them. The library refuses memory where it cannot count, and is otherwise not noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.shim.conftest import OUT_OF_MEMORY, Stage
from tests.integration.shim.robust import Ran, run, run_command

NOBODY = 65534
NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT, of the driver: without memory for a context there is none."""


def test_nothing_of_ours_becomes_a_standard_file(stage: Stage, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(stage, "surroundings", "closed", str(out)).status == 0
    code, standard, others = map(int, out.read_text().split())
    assert (code, standard, others) == (0, 0, 2)


def test_without_a_descriptor_memory_is_refused_and_with_one_it_comes(stage: Stage) -> None:
    assert run(stage, "surroundings", "full").codes == [0, OUT_OF_MEMORY, 0]


def test_where_sockets_are_forbidden_what_was_connected_before_serves(stage: Stage) -> None:
    ran = run(stage, "surroundings", "sandbox", "late")
    assert (ran.codes, ran.errors) == ([0, 0, 0, 0], "")


def test_where_the_library_may_not_have_a_socket_memory_is_refused_with_one_warning(stage: Stage) -> None:
    ran = run(stage, "surroundings", "sandbox", "early")
    assert (ran.status, ran.codes) == (0, [0, OUT_OF_MEMORY, NO_CONTEXT, NO_CONTEXT])
    assert "the arbiter does not answer" in ran.errors
    assert ran.errors.count("\n") == 1


def test_a_file_of_the_programs_that_got_the_number_of_stderr_stays_its_own(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "data"
    ran = run(stage, "surroundings", "reused", str(file))
    assert (ran.status, ran.codes, file.read_text()) == (0, [0, OUT_OF_MEMORY], "")


def in_its_own_mounts(stage: Stage, *steps: str, user: int | None = None) -> Ran:
    """Shell steps as root in a mount namespace of their own, where nothing that they mount is seen from outside."""
    script = " && ".join(["mount --make-rprivate /", *steps])
    return run_command(stage, ["unshare", "--mount", "sh", "-ec", script], LD_PRELOAD="")


def test_a_root_that_cannot_be_written_and_no_tmp_are_enough(stage: Stage) -> None:
    program = stage.build / "tests/processes"
    moved = "/mnt"
    ran = in_its_own_mounts(
        stage,
        f"mount --bind {stage.folder} {moved}",
        f"mkdir -p {stage.folder}/none",
        "mount -t tmpfs -o ro,size=4k none /var/tmp",
        "mount -o remount,bind,ro /",
        f"export TANGRAM_FAKE_DRIVER={moved}/driver.sock TANGRAM_GRANT={moved}/grants/{stage.key}/grant",
        f"! touch {stage.build}/written 2>/dev/null",
        f"LD_PRELOAD={stage.library} {program} take 1000",
        f"! LD_PRELOAD={stage.library} {program} take 1001 > /dev/null",
    )
    assert (ran.status, ran.codes) == (0, [0])


@pytest.fixture
def setuid_program(stage: Stage, tmp_path: Path) -> Path:
    """A program of root's with the set-user-ID bit, where every user may run it."""
    stage.folder.chmod(0o755)
    program = stage.folder / f"setuid-{stage.key}"
    shutil.copy(stage.build / "tests/surroundings", program)
    program.chmod(0o4755)
    return program


def as_nobody(program: Path, preload: str) -> str:
    return f"LD_PRELOAD={preload} setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups {program} secure"


def test_the_loader_drops_ld_preload_for_a_setuid_program(stage: Stage, setuid_program: Path) -> None:
    assert in_its_own_mounts(stage, as_nobody(setuid_program, stage.library)).codes == [0, 0]


def test_ld_so_preload_reaches_a_setuid_program_too(stage: Stage, setuid_program: Path) -> None:
    etc = stage.folder / f"etc-{stage.key}"
    ran = in_its_own_mounts(
        stage, f"cp -a /etc {etc}", f"echo {stage.library} > {etc}/ld.so.preload", f"mount --bind {etc} /etc",
        as_nobody(setuid_program, ""),
    )  # fmt: skip
    assert ran.codes == [OUT_OF_MEMORY, 1]
