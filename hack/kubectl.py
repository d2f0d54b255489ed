"""kubectl and helm for our own programs: the demo, the end-to-end tests, the benches on a cluster.

Thin on purpose: what a reader could type, they read here. The cluster is the one in KUBECONFIG, else the local one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hack.cluster.layout import Layout

ROOT: Final = Path(__file__).resolve().parent.parent


class CommandFailed(Exception):
    """A command ended with another status than 0. The text has the command and what it printed."""


def _nobody(_command: str) -> None:
    """Commands are not shown."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Runs kubectl and helm against one cluster, in the root of the tree. `report` gets each command as a person would type it."""

    kubeconfig: Path
    path: str = field(default_factory=lambda: os.environ.get("PATH", ""))
    report: Callable[[str], None] = _nobody

    @classmethod
    def local(cls) -> Kubectl:
        """The cluster in KUBECONFIG, else the local one."""
        layout = Layout()
        named = os.environ.get("KUBECONFIG")
        return cls(Path(named) if named else layout.kubeconfig, f"{layout.bin}:{os.environ.get('PATH', '')}")

    def run(self, program: str, *arguments: str, stdin: str | None = None, timeout_s: float = 300) -> str:
        """Standard output of a command. Raises CommandFailed with both streams when it fails."""
        words = self.words(program, *arguments)
        self.report(shlex.join([program, *arguments]))
        return self._run(words, f"{program} {' '.join(arguments)}", stdin, timeout_s)

    def words(self, program: str, *arguments: str) -> Sequence[str]:
        """A command as `environment` runs it. Raises CommandFailed when there is no such program."""
        found = shutil.which(program, path=self.path)
        if found is None:
            raise CommandFailed(f"{program} is not on the PATH ({self.path})")
        return [found, *arguments]

    def environment(self) -> dict[str, str]:
        """In which the cluster's programs run."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": self.path}

    def shell(self, command: str, timeout_s: float = 300) -> str:
        """Standard output of a line for the shell."""
        self.report(command)
        return self._run(["/bin/sh", "-c", command], command, None, timeout_s)

    def _run(self, words: Sequence[str], name: str, stdin: str | None, timeout_s: float) -> str:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=self.environment(), cwd=ROOT
        )
        if done.returncode:
            raise CommandFailed(f"{name}: exit {done.returncode}\n{done.stdout}{done.stderr}".strip())
        return done.stdout

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = 300) -> str:
        return self.run("kubectl", *arguments, stdin=stdin, timeout_s=timeout_s)

    def helm(self, *arguments: str, timeout_s: float = 300) -> str:
        """Standard output of helm."""
        return self.run("helm", *arguments, timeout_s=timeout_s)

    def apply(self, *objects: Mapping[str, Any]) -> str:
        """`kubectl apply` of objects given as mappings."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self("apply", "-f", "-", stdin=json.dumps(listed))

    def create(self, thing: Mapping[str, Any]) -> str:
        """`kubectl create` of one object: it must not exist."""
        return self("create", "-f", "-", stdin=json.dumps(thing))

    def get(self, *arguments: str) -> Any:
        """`kubectl get ... -o json`, decoded."""
        return json.loads(self("get", *arguments, "-o", "json"))

    def wait(self, what: str, condition: str, *arguments: str, timeout_s: int = 120) -> str:
        """`kubectl wait --for=CONDITION WHAT`."""
        return self("wait", f"--for={condition}", what, f"--timeout={timeout_s}s", *arguments, timeout_s=timeout_s + 30)


def set_values(values: Mapping[str, Any], prefix: str = "") -> Sequence[str]:
    """Nested values as helm's `--set-json` arguments."""
    arguments: list[str] = []
    for name, value in values.items():
        key = name.replace(".", r"\.")  # one key, as of a label or an annotation
        if isinstance(value, Mapping) and value:
            arguments += set_values(value, f"{prefix}{key}.")
        else:
            arguments += ["--set-json", f"{prefix}{key}={json.dumps(value)}"]
    return arguments
