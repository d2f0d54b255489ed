"""examples/04-no-cluster: what its README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.tangramctl.conftest import ROOT, Ctl

README = ROOT / "examples/04-no-cluster/README.md"
NUMBERS = ((r"\bpid \d+", "pid PID"), (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"))


def shown() -> list[tuple[str, str]]:
    """(command, output) of the README, in order; without the shell that a reader would sit in."""
    text = "".join(re.findall(r"^```console\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL))
    steps = [step.split("\n", 1) for step in text.split("$ ")[1:] if not step.endswith("-- bash\n")]
    return [(command, output) for command, output in steps]


def plain(text: str) -> str:
    for pattern, name in NUMBERS:
        text = re.sub(pattern, name, text)
    return text


def test_the_readme_shows_what_happens(ctl: Ctl) -> None:
    programs = ctl.folder / "bin"
    programs.mkdir()
    (programs / "tangramctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m tangramctl "$@"\n')
    (programs / "tangramctl").chmod(0o755)
    steps = shown()
    assert len(steps) > 6
    script = "\n".join(f"echo '--- {at}'; {command}" for at, (command, _) in enumerate(steps))
    env = ctl.environment | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{ctl.environment['PATH']}",
        "POD_NAME": "laptop",
    }
    # `echo $?` requests the command before it, and the mark stands between: it keeps the status
    script = re.sub(r"echo '--- (\d+)'; echo \$\?", r"code=$?; echo '--- \1'; echo $code", script)
    done = subprocess.run(
        ["bash", "-c", script],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=100,
    )
    outputs = re.split(r"^--- \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    assert [plain(text) for text in outputs] == [
        plain(output.strip("\n") + "\n" if output.strip() else "") for _, output in steps
    ]
