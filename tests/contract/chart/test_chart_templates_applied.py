"""Objects whose templates were normalised meet kubectl, helm and Argo CD again. In units everything stays as it is. In bytes the second write is refused,
and nothing that Kueue has counted changes: since Kubernetes 1.36 it would otherwise reach the template of a suspended Job."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import KUBERNETES
from tests.apiserver import ApiServer, Denied
from tests.contract.chart.rendering import ROOT, Helm, Refused
from tests.contract.chart.templates_kit import (
    JOB,
    QUEUE,
    RAY_CLUSTER,
    Counted,
    container,
    create,
    in_force,
    pod_template,
    texts,
    thing,
)

PAGE = ROOT / "docs/tasks/kueue.md"
KINDS = pytest.mark.parametrize("of", [JOB, RAY_CLUSTER], ids=lambda of: of.kind)
WAYS = pytest.mark.parametrize("way", ["apply", "server-side", "helm"])
WRITE_8 = "container main: tangram.sh/gpu-mem is 8Gi, and Kueue counts bytes as units of 1Gi: write 8"
numbers = itertools.count()


@pytest.fixture(scope="module")
def normalising(kinds: ApiServer, helm: Helm) -> Iterator[ApiServer]:
    with in_force(kinds, helm):
        yield kinds


@dataclass(frozen=True, slots=True)
class Applied:
    """An object that a person applies, and what is stored of it."""

    api: ApiServer
    of: Counted
    manifest: dict[str, Any]
    write: Callable[[dict[str, Any]], str]
    """Applies a manifest; its output. Raises Refused."""

    def stored(self) -> Any:
        return self.api("GET", f"{self.of.path}/{self.manifest['metadata']['name']}")


@pytest.fixture
def applied(request: pytest.FixtureRequest, normalising: ApiServer, helm: Helm, tmp_path: Path) -> Iterator[Applied]:
    """By parameters: a kind, how it is applied, and its memory. It was applied once."""
    of, way, memory = (request.node.callspec.params[name] for name in ("of", "way", "memory"))
    name = f"applied-{next(numbers)}"
    manifest = thing(of, pod_template(container("main", memory, memory)), name=name)
    if of is JOB:
        manifest["spec"]["suspend"] = True  # as Kueue's webhook makes it
    write = _helm(helm, normalising, tmp_path, name) if way == "helm" else _kubectl(normalising, way)
    made = Applied(normalising, of, manifest, write)
    made.write(manifest)
    yield made
    normalising("DELETE", f"{of.path}/{name}", {"propagationPolicy": "Background"})


def _kubectl(api: ApiServer, way: str) -> Callable[[dict[str, Any]], str]:
    program = build(cache_folder(), [KUBERNETES], Steps())["kubectl"]
    flags = ["--server-side"] if way == "server-side" else []

    def write(manifest: dict[str, Any]) -> str:
        command = ["kubectl", "apply", "--kubeconfig", api.kubeconfig, *flags, "-f", "-"]
        done = subprocess.run(
            command, executable=program, input=json.dumps(manifest), capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    return write


def _helm(helm: Helm, api: ApiServer, folder: Path, name: str) -> Callable[[dict[str, Any]], str]:
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: queued, version: 1.0.0}")

    def write(manifest: dict[str, Any]) -> str:
        (folder / "templates/it.yaml").write_text(yaml.safe_dump(manifest))
        return helm("upgrade", "--install", name, str(folder), "-n", "default", kubeconfig=api.kubeconfig)

    return write


@KINDS
@WAYS
@pytest.mark.parametrize("memory", ["8"])
def test_units_are_applied_again_without_a_change(applied: Applied, of: Counted, way: str, memory: str) -> None:
    before = applied.stored()
    applied.write(applied.manifest)
    after = applied.stored()
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1
    assert after["spec"] == before["spec"]


@KINDS
@WAYS
@pytest.mark.parametrize("memory", ["8Gi"])
def test_bytes_are_normalised_once_and_then_refused_with_the_number(
    applied: Applied, of: Counted, way: str, memory: str
) -> None:
    before = applied.stored()
    assert set(texts(before, of)) == {"8"}
    if (way, of) == ("helm", RAY_CLUSTER):  # of a custom resource helm compares two manifests, and not what is stored
        applied.write(applied.manifest)
        with pytest.raises(Refused, match=WRITE_8):  # a list is written whole
            applied.write(json.loads(json.dumps(applied.manifest).replace('"none"', '"another"')))
    else:
        with pytest.raises(Refused, match=WRITE_8):
            applied.write(applied.manifest)
    assert applied.stored()["spec"] == before["spec"]
    corrected = json.loads(json.dumps(applied.manifest).replace("8Gi", "8"))
    applied.write(corrected)
    assert applied.stored()["spec"] == before["spec"]


@pytest.mark.parametrize("of", [JOB], ids=lambda of: of.kind)
@WAYS
@pytest.mark.parametrize("memory", ["8Gi"])
def test_a_running_job_is_refused_by_kubernetes_itself(applied: Applied, of: Counted, way: str, memory: str) -> None:
    """Its template never changes, so it says that instead."""
    running = copy.deepcopy(applied.manifest)
    path = f"{of.path}/{running['metadata']['name']}"
    applied.api.patch(path, {"spec": {"suspend": False}})
    running["spec"]["suspend"] = False
    with pytest.raises(Refused, match="field is immutable"):
        applied.write(running)
    assert set(texts(applied.stored(), of)) == {"8"}


@KINDS
def test_an_object_that_joins_a_queue_with_bytes_is_denied(normalising: ApiServer, of: Counted) -> None:
    made = create(normalising, of, thing(of, pod_template(container("main", "8Gi")), queue=""), dry=False)
    path = f"{of.path}/{made['metadata']['name']}"
    normalising.patch(path, {"metadata": {"labels": {"other": "label"}}})
    with pytest.raises(Denied, match=WRITE_8):
        normalising.patch(path, {"metadata": {"labels": {QUEUE: "team"}}})
    normalising("DELETE", path, {"propagationPolicy": "Background"})


def jq_paths() -> list[str]:
    """Of the page's Argo CD block."""
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if "jqPathExpressions" in block:
            (ignored,) = yaml.safe_load(textwrap.dedent(block))["spec"]["ignoreDifferences"]
            assert (ignored["group"], ignored["kind"]) == ("batch", "Job")
            return list(ignored["jqPathExpressions"])
    raise AssertionError(f"{PAGE} has no jqPathExpressions")


def places(thing: Any, path: str) -> Iterator[tuple[Any, str]]:
    """(parent, key) of each place that a path such as .a.b[]?.c."d" leads to, as jq reads it; nothing else of jq is known here."""
    parts = re.findall(r'\.(?:"([^"]+)"|(\w+))((?:\[\]\?)?)', path)
    assert "".join(f'."{quoted}"{each}' if quoted else f".{word}{each}" for quoted, word, each in parts) == path
    here = [thing]
    for quoted, word, each in parts[:-1]:
        found = [one[quoted or word] for one in here if (quoted or word) in one]
        here = [inner for one in found for inner in one] if each else found
    last = parts[-1][0] or parts[-1][1]
    yield from ((one, last) for one in here if last in one)


@pytest.mark.parametrize("of", [JOB], ids=lambda of: of.kind)
@pytest.mark.parametrize("way", ["apply"])
@pytest.mark.parametrize("memory", ["8Gi"])
def test_what_argo_cd_is_told_to_ignore_is_all_that_differs(
    applied: Applied, of: Counted, way: str, memory: str
) -> None:
    """Read only of Argo CD: it deletes these paths from both before it compares them, and with RespectIgnoreDifferences it writes what is stored there."""
    live, wanted = applied.stored(), copy.deepcopy(applied.manifest)
    both = [copy.deepcopy(one["spec"]["template"]["spec"]) for one in (live, wanted)]
    assert both[0]["containers"][0]["resources"] != both[1]["containers"][0]["resources"]
    for path in jq_paths():
        for one in both:
            for parent, key in list(places({"spec": {"template": {"spec": one}}}, path)):
                del parent[key]
        for (parent, key), (stored, _) in zip(places(wanted, path), places(live, path), strict=True):
            parent[key] = stored[key]
    assert (
        both[0]["containers"][0]["resources"] == both[1]["containers"][0]["resources"] == {"limits": {}, "requests": {}}
    )
    applied.write(wanted)
    assert applied.stored()["spec"] == live["spec"]
