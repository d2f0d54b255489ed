"""The chart as helm renders it, decoded, and what a test reads of the result. Runs helm and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hack.cluster.programs import kubernetes_version
from hack.kubectl import set_values

ROOT: Final = Path(__file__).resolve().parents[3]
CHART: Final = ROOT / "deploy/helm/tangram"
NAMESPACE: Final = "tangram-system"
EXAMPLES: Final = {
    file.name.removesuffix("-values.yaml"): file for file in sorted((CHART / "ci").glob("*-values.yaml"))
}
"""Values files that every test of the whole chart renders, by name."""


class Refused(Exception):
    """helm would not render. The text is what it said."""


@dataclass(frozen=True, slots=True)
class Helm:
    """helm, by its path."""

    program: Path

    def text(
        self, values: Mapping[str, Any] | Path | None = None, *, kube: str = "", served: Collection[str] = ()
    ) -> str:
        """Manifests as helm prints them, comments and hooks included. `served`: kinds that the API server serves, such as v1/Pod; empty: helm knows
        no cluster. Raises Refused."""
        given = ["-f", str(values)] if isinstance(values, Path) else set_values(values or {})
        version = kube or kubernetes_version()
        return self(
            "template",
            "tangram",
            str(CHART),
            "-n",
            NAMESPACE,
            "--kube-version",
            version,
            *given,
            *(f"--api-versions={kind}" for kind in served),
        )

    def notes(self, values: Mapping[str, Any] | Path, kubeconfig: Path) -> str:
        """What is printed after an installation, on a cluster that has no operators."""
        given = ["-f", str(values)] if isinstance(values, Path) else set_values(values)
        operators = set_values({"webhook": {"certManager": {"enabled": False}}, "serviceMonitor": {"enabled": False}})
        given = [*given, *operators, *set_values({"prometheusRule": {"enabled": False}})]
        printed = self(
            "install", "tangram", str(CHART), "-n", NAMESPACE, "--dry-run=server", *given, kubeconfig=kubeconfig
        )
        return printed.partition("\nNOTES:\n")[2]

    def objects(self, values: Mapping[str, Any] | Path | None = None, *, kube: str = "") -> Objects:
        """The same, decoded."""
        return Objects([thing for thing in yaml.safe_load_all(self.text(values, kube=kube)) if thing])

    def __call__(self, *arguments: str, kubeconfig: Path = Path("/nonexistent")) -> str:
        done = subprocess.run(
            [self.program, *arguments, "--kubeconfig", str(kubeconfig)], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout


@dataclass(frozen=True, slots=True)
class Objects:
    """Rendered objects."""

    items: list[dict[str, Any]]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """All objects of a kind, by name."""
        return {thing["metadata"]["name"]: thing for thing in self.items if thing["kind"] == kind}

    def one(self, kind: str, name: str) -> dict[str, Any]:
        return self.of(kind)[name]

    def pods(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(object, its pod's metadata and spec) of everything that runs."""
        for thing in self.items:
            if thing["kind"] == "Pod":
                yield thing, thing
            elif thing["kind"] in ("DaemonSet", "Deployment", "Job"):
                yield thing, thing["spec"]["template"]

    def containers(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(pod's spec, container) of everything that runs."""
        for _, template in self.pods():
            for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
                yield template["spec"], container

    def container(self, name: str) -> dict[str, Any]:
        (found,) = (container for _, container in self.containers() if container["name"] == name)
        return found


def env(container: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a container: value, or where it comes from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env", [])}
