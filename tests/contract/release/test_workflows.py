"""The workflows of .github/: by actionlint, and by the rules that it does not know."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ACTIONLINT
from hack.images.catalogue import ROOT

FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yaml"))
PINNED = re.compile(r"^[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


@pytest.fixture(scope="module")
def actionlint() -> Path:
    return build(cache_folder(), [ACTIONLINT], Steps())["actionlint"]


def checked(program: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    # shellcheck of the lock file, no pyflakes: what is found does not depend on what the machine has
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists()
    command = [str(program), f"-shellcheck={shellcheck}", "-pyflakes=", "-no-color", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.name}: {name}", job


def scripts() -> str:
    return "\n".join(step.get("run", "") for _, job in jobs() for step in job.get("steps", []))


def test_actionlint_finds_nothing(actionlint: Path) -> None:
    done = checked(actionlint, *WORKFLOWS)
    assert (done.returncode, done.stdout) == (0, "")


def test_actionlint_finds_what_is_wrong(actionlint: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FOLDER / "ci.yaml").read_text().replace("github.event_name ==", "github.event_nam =="))
    done = checked(actionlint, wrong)
    assert done.returncode == 1
    assert 'property "event_nam" is not defined' in done.stdout


def test_shellcheck_finds_what_is_wrong_in_a_script(actionlint: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FOLDER / "ci.yaml").read_text().replace("run: make lint", "run: rm -r $HOME/x y$1"))
    assert "SC2086" in checked(actionlint, wrong).stdout


def test_every_action_is_pinned_by_commit_and_says_its_version() -> None:
    lines = [
        line.partition("uses:")[2].strip()
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    others = [line for line in lines if not line.startswith("./")]
    assert others
    assert [line for line in others if not PINNED.match(line)] == []


def test_a_workflow_may_read_and_only_the_job_that_publishes_may_write() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
        assert "pull_request_target" not in path.read_text(), path.name
    assert [name for name, job in jobs() if "permissions" in job] == ["release.yaml: publish"]


def test_no_job_is_without_end_and_no_checkout_leaves_a_token() -> None:
    for name, job in jobs():
        if "uses" in job:
            continue
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_a_program_that_fails_in_a_pipe_fails_its_step() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["defaults"]["run"]["shell"] == "bash", path.name


def test_no_script_has_an_expression_that_others_write() -> None:
    """What is written into a script is run; an environment variable is not."""
    assert re.findall(r"\$\{\{\s*(?:github\.(?:event|head_ref|ref_name)|inputs|needs|steps)[^}]*\}\}", scripts()) == []


def test_the_commands_that_are_called_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\s*make ([a-z][\w-]*)$", scripts(), re.MULTILINE):
        assert re.search(rf"^{target}[ :]", makefile, re.MULTILINE), target
    page = (ROOT / "docs/development/release.md").read_text()
    called = set(re.findall(r"-m hack\.release ([a-z-]+)", scripts() + page))
    source = (ROOT / "hack/release/__main__.py").read_text()
    assert {"version", "digest", "sbom", "reproducible", "man", "pin", "krew", "notes"} <= called
    assert [name for name in called if f'"{name}"' not in source] == []
    assert all(
        (ROOT / path).stat().st_mode & 0o100 for path in re.findall(r"^\s*(hack/[\w-]+)", scripts(), re.MULTILINE)
    )


def commit(folder: Path, message: str) -> None:
    identity = ["-c", "user.name=A B", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", message], cwd=folder, check=True)


def test_a_commit_without_its_authors_sign_off_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit(tmp_path, "base")
    commit(tmp_path, "one\n\nSigned-off-by: A B <a@example.org>")

    def verified(base: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "hack/verify-sign-off", base, "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert verified("HEAD~1").returncode == 0
    commit(tmp_path, "two\n\nSigned-off-by: Someone Else <b@example.org>")
    done = verified("HEAD~2")
    assert done.returncode == 1
    assert done.stderr.count("Signed-off-by: A B <a@example.org>") == 1
