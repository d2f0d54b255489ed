"""The arbiter reads the verdicts again when their file has changed, and an unreadable file is no evidence that suspends work."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from arbiter.gputime.trials_file import TrialsFile
from vgpu.api.enforcement import Reason
from vgpu.gputime.trial_verdict import ModelVerdict, TrialOutcome, Trials, TrialVerdict, trials_to_text


def write(path: Path, outcome: TrialOutcome) -> None:
    """As the device plugin does: another file under the same name."""
    fresh = path.with_suffix(".new")
    tried = ModelVerdict("NVIDIA X", ("GPU-0",), TrialVerdict(outcome, "why"))
    fresh.write_text(trials_to_text(Trials(boot_id="b", driver="612.3.1", tried=(tried,))))
    fresh.replace(path)


def version(folder: Path, text: str) -> Path:
    """The kernel's file with the driver's version."""
    path = folder / "version"
    path.write_text(text)
    return path


def test_it_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    verdicts = TrialsFile(path, boot_id="b", version=version(tmp_path, "612.3.1"))
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    write(path, TrialOutcome.WORKS)
    assert verdicts.of(["GPU-0"]).reason is None
    write(path, TrialOutcome.NO_SUSPEND)
    assert verdicts.of(["GPU-0"]).reason is Reason.NO_SUSPEND
    path.unlink()
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER


def test_an_unreadable_file_ends_the_verdicts_and_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    verdicts = TrialsFile(path, boot_id="b", version=version(tmp_path, "612.3.1"))
    write(path, TrialOutcome.WORKS)
    assert verdicts.of(["GPU-0"]).reason is None
    path.write_text("{")
    with capture_logs() as log:
        assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
        assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    assert [line["log_level"] for line in log] == ["error"]


def test_a_driver_of_unknown_version_is_not_known(tmp_path: Path) -> None:
    verdicts = TrialsFile(tmp_path / "none", boot_id="b", version=tmp_path / "no version")
    found = verdicts.of(["GPU-0"])
    assert found.reason is Reason.UNKNOWN_DRIVER
    assert "version cannot be read" in found.why


@pytest.mark.parametrize(("driver", "boot_id", "known"), [
    ("580.65.06", "b", True), ("612.3.1", "b", False), ("580.65.06", "earlier", False), ("", "b", False),
])  # fmt: skip
def test_without_a_version_of_the_module_the_verdicts_own_counts(
    tmp_path: Path, driver: str, boot_id: str, known: bool
) -> None:
    """NVML's: on a machine whose kernel has no module of that name."""
    path = tmp_path / "trials.json"
    path.write_text(trials_to_text(Trials(boot_id=boot_id, driver=driver)))
    verdicts = TrialsFile(path, boot_id="b", version=tmp_path / "no version")
    assert (verdicts.of(["GPU-0"]).reason is None) is known


def test_a_driver_that_comes_later_than_the_arbiter_is_known_then(tmp_path: Path) -> None:
    path = version(tmp_path, "")
    verdicts = TrialsFile(tmp_path / "none", boot_id="b", version=path)
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    path.write_text("580.159.04\n")
    assert verdicts.of(["GPU-0"]).reason is None
