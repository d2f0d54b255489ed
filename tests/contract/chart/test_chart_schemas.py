"""kubeconform finds nothing in the chart, by the schemas of the API server itself. It reads what helm prints, as users of GitOps commit it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import KUBECONFORM
from tests.apiserver import ApiServer
from tests.contract.chart.rendering import EXAMPLES, Helm
from tests.contract.chart.schemas import LOCATION, write_schemas

OF_OPERATORS: Final = "Certificate,Issuer,PrometheusRule,ServiceMonitor"
"""Kinds that the API server does not know by itself."""


class Kubeconform:
    """kubeconform with the schemas of a folder."""

    def __init__(self, program: Path, schemas: Path) -> None:
        self.command = [
            str(program), "-schema-location", str(schemas / LOCATION), "-strict", "-output", "json", "-verbose", "-skip", OF_OPERATORS,
        ]  # fmt: skip

    def findings(self, manifests: str) -> tuple[list[str], int]:
        """What is wrong, by kind and name, and how many objects were read."""
        done = subprocess.run(
            [*self.command, "-"], input=manifests, capture_output=True, text=True, timeout=60, check=False
        )
        read: list[dict[str, Any]] = json.loads(done.stdout)["resources"]
        wrong = [one for one in read if one["status"] not in ("statusValid", "statusSkipped")]
        return [f"{one['kind']} {one['name']}: {one['msg']}" for one in wrong], len(read)


@pytest.fixture(scope="module")
def kubeconform(helm: Helm, api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Kubeconform:
    schemas = tmp_path_factory.mktemp("schemas")
    kinds = {thing["kind"] for example in EXAMPLES.values() for thing in helm.objects(example).items}
    document = api.http.get("/openapi/v2", headers={"Accept": "application/json"}).json()
    assert write_schemas(document, kinds, schemas) >= len(kinds) - len(OF_OPERATORS.split(","))
    return Kubeconform(build(cache_folder(), [KUBECONFORM], Steps(quiet=True))["kubeconform"], schemas)


@pytest.mark.parametrize("example", EXAMPLES)
def test_kubeconform_finds_nothing(helm: Helm, kubeconform: Kubeconform, example: str) -> None:
    wrong, read = kubeconform.findings(helm.text(EXAMPLES[example]))
    assert wrong == []
    assert read > 20


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("hostPID: true", "hostPid: true", "hostPid"),
        ("replicas: 2", "replicas: two", "replicas"),
        ("subjects:", "subject:", "'subject' not allowed"),
        ("cpu: 50m", "cpu: [50m]", "cpu"),
        ("apiVersion: apps/v1", "apiVersion: apps/v1beta9", "could not find schema"),
    ],
)
def test_kubeconform_finds_what_is_wrong(
    helm: Helm, kubeconform: Kubeconform, old: str, new: str, finding: str
) -> None:
    text = helm.text()
    assert old in text
    wrong, _ = kubeconform.findings(text.replace(old, new))
    assert [one for one in wrong if finding in one], wrong
