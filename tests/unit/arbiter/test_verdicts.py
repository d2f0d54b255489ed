"""The arbiter reads the verdicts anew when their file has changed, and takes nothing to work for an unreadable file's sake."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from arbiter.verdicts import Verdicts, text_of
from vgpu.enforcement import Reason
from vgpu.trial import Outcome, Trials, Tried, Verdict, trials_to_text


def write(path: Path, outcome: Outcome) -> None:
    """As the device plugin does: another file under the same name."""
    fresh = path.with_suffix(".new")
    tried = Tried("NVIDIA X", ("GPU-0",), Verdict(outcome, "why"))
    fresh.write_text(trials_to_text(Trials(boot_id="b", driver="612.3.1", tried=(tried,))))
    fresh.replace(path)


def test_it_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    verdicts = Verdicts(path, boot_id="b", driver="612.3.1")
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    write(path, Outcome.WORKS)
    assert verdicts.of(["GPU-0"]).reason is None
    write(path, Outcome.NO_SUSPEND)
    assert verdicts.of(["GPU-0"]).reason is Reason.NO_SUSPEND
    path.unlink()
    assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER


def test_an_unreadable_file_ends_what_was_known_and_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    verdicts = Verdicts(path, boot_id="b", driver="612.3.1")
    write(path, Outcome.WORKS)
    assert verdicts.of(["GPU-0"]).reason is None
    path.write_text("{")
    with capture_logs() as log:
        assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
        assert verdicts.of(["GPU-0"]).reason is Reason.UNKNOWN_DRIVER
    assert [line["log_level"] for line in log] == ["error"]


def test_without_a_driver_nothing_is_unknown(tmp_path: Path) -> None:
    assert text_of(tmp_path / "version") == ""
    assert Verdicts(tmp_path / "none", boot_id="b", driver="").of(["GPU-0"]).reason is None
    (tmp_path / "version").write_text("580.159.04\n")
    assert text_of(tmp_path / "version") == "580.159.04"
