"""The arbiter reads the verdicts anew when their file has changed, and takes nothing to work for an unreadable file's sake."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from arbiter.gputime.trial_verdicts import Verdicts
from vgpu.api.enforcement import Reason
from vgpu.gputime.trial import Outcome, Trials, Tried, Verdict, trials_to_text


def write(path: Path, outcome: Outcome) -> None:
    """As the device plugin does: another file under the same name."""
    fresh = path.with_suffix(".new")
    tried = Tried("NVIDIA X", ("GPU-0",), Verdict(outcome, "why"))
    fresh.write_text(trials_to_text(Trials(boot_id="b", driver="612.3.1", tried=(tried,))))
    fresh.replace(path)


def version(folder: Path, text: str) -> Path:
    """The kernel's file with the driver's version."""
    path = folder / "version"
    path.write_text(text)
    return path


def test_it_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    verdicts = Verdicts(path, boot_id="b", version=version(tmp_path, "612.3.1"))
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    write(path, Outcome.WORKS)
    assert verdicts.of(["GPU-0"]).reason is None
    write(path, Outcome.NO_SUSPEND)
    assert verdicts.of(["GPU-0"]).reason is Reason.NO_SUSPEND
    path.unlink()
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER


def test_an_unreadable_file_ends_what_was_known_and_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    verdicts = Verdicts(path, boot_id="b", version=version(tmp_path, "612.3.1"))
    write(path, Outcome.WORKS)
    assert verdicts.of(["GPU-0"]).reason is None
    path.write_text("{")
    with capture_logs() as log:
        assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
        assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    assert [line["log_level"] for line in log] == ["error"]


def test_a_driver_whose_version_nobody_says_is_not_known(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "none", boot_id="b", version=tmp_path / "no version")
    found = verdicts.of(["GPU-0"])
    assert found.reason is Reason.UNKNOWN_DRIVER
    assert "version cannot be read" in found.why


@pytest.mark.parametrize(("driver", "boot_id", "known"), [
    ("580.65.06", "b", True), ("612.3.1", "b", False), ("580.65.06", "earlier", False), ("", "b", False),
])  # fmt: skip
def test_where_the_module_says_no_version_the_verdicts_own_counts(
    tmp_path: Path, driver: str, boot_id: str, known: bool
) -> None:
    """NVML's: on a machine whose kernel has no module of that name."""
    path = tmp_path / "trials.json"
    path.write_text(trials_to_text(Trials(boot_id=boot_id, driver=driver)))
    verdicts = Verdicts(path, boot_id="b", version=tmp_path / "no version")
    assert (verdicts.of(["GPU-0"]).reason is None) is known


def test_a_driver_that_comes_later_than_the_arbiter_is_known_then(tmp_path: Path) -> None:
    path = version(tmp_path, "")
    verdicts = Verdicts(tmp_path / "none", boot_id="b", version=path)
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    path.write_text("580.159.04\n")
    assert verdicts.of(["GPU-0"]).reason is None
