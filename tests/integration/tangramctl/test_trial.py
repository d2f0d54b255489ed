"""Before the first run on a machine the driver is tried, as on a node of a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.integration.tangramctl.conftest import Ctl


def trials(ctl: Ctl) -> Any:
    (file,) = (ctl.folder / "s/fake").glob("*/trials.json")
    return json.loads(file.read_text())


def library_alone(ctl: Ctl) -> str:
    """A copy with no trial program beside it."""
    folder = ctl.folder / "alone"
    folder.mkdir()
    return str(shutil.copy(ctl.build / "libtangram.so", folder))


def test_a_driver_is_tried_once_a_boot(ctl: Ctl) -> None:
    first = ctl.run("1Gi", "true")
    assert (first.returncode, first.stderr) == (0, "")
    found = trials(ctl)
    assert {one["verdict"]["outcome"] for one in found["tried"]} == {"works"}
    assert found["driver"] == "580.65.06", "NVML reports it, where the kernel has no such module"
    ctl.env["TANGRAMCTL_LIBRARY"] = library_alone(ctl)
    again = ctl.run("1Gi", "true")
    assert (again.returncode, again.stderr) == (0, "")
    assert trials(ctl) == found


def test_a_trial_that_cannot_run_is_reported_and_made_again_when_nothing_runs(ctl: Ctl) -> None:
    ctl.env["TANGRAMCTL_LIBRARY"] = library_alone(ctl)
    program = Path(ctl.env["TANGRAMCTL_LIBRARY"]).with_name("tangram-trial")
    first = ctl.run("1Gi", "true")
    assert first.returncode == 0
    assert f"cannot-run ({program} cannot be started" in first.stderr
    runs_on = ctl.probe("1Gi")
    beside = ctl.run("1Gi", "true")
    assert (beside.returncode, beside.stderr) == (0, ""), "not while others run"
    runs_on.end()
    shutil.copy(ctl.build / "tangram-trial", program)
    assert ctl.run("1Gi", "true").stderr == ""
    assert {one["verdict"]["outcome"] for one in trials(ctl)["tried"]} == {"works"}
