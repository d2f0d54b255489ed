"""Completion, as a shell and as kubectl call it: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tangramctl.completion import FILES, NO_FILES, SHELLS, VARIABLE, script

CALL = "import sys; from tangramctl.{module} import {function}; sys.argv = {argv!r}; {function}()"


def called(module: str, function: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = CALL.format(module=module, function=function, argv=list(argv))
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "PYTHONPATH", "HOME"}}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kubectl(*words: str) -> list[str]:
    done = called("completion", "kubectl", "kubectl_complete-tangram", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kubectl_gets_commands_with_what_they_do() -> None:
    *commands, directive = kubectl("")
    assert directive == NO_FILES
    assert {"run", "ps", "mig", "explain"} <= {line.partition("\t")[0] for line in commands}
    assert all(line.partition("\t")[2] for line in commands)


def test_kubectl_gets_the_options_and_values_that_begin_so() -> None:
    assert {line.partition("\t")[0] for line in kubectl("mig", "apply", "--f")} == {"--file", NO_FILES}
    assert kubectl("run", "--gpu-mem", "8 Gi", "--class", "be") == ["best-effort", NO_FILES]


def test_where_nothing_is_known_the_shell_completes_files() -> None:
    assert kubectl("run", "--gpu-mem", "8Gi", "--", "pyth") == [FILES]


def test_a_description_is_one_line() -> None:
    """One of `run` is longer than a terminal."""
    assert all(line.startswith(("--", ":")) for line in kubectl("run", "--"))


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_calls_the_program_and_is_named_after_it(shell: str) -> None:
    text = script(shell)
    assert VARIABLE not in os.environ
    assert VARIABLE in text
    assert f"complete_{shell}" in text


def test_bash_completes_by_its_script(tmp_path: Path) -> None:
    program = tmp_path / "tangramctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tangramctl "$@"\n')
    program.chmod(0o755)
    asked = f'{script("bash")}\nCOMP_WORDS=(tangramctl run --cl) COMP_CWORD=2\n_tangramctl_completion {program}\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["--class", "--clear"], done.stderr


def test_a_shell_that_is_not_known_is_refused_with_those_that_are() -> None:
    done = called("__main__", "main", "tangramctl", "completion", "tcsh")
    assert done.returncode == 2
    assert done.stderr == "tangramctl: SHELL is 'tcsh': it must be bash, zsh or fish\n"
