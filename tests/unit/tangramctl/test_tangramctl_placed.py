"""What `explain pod` shows of a pod that has its GPUs and may burst: what it has now, by the caller's own kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tangramctl.placed import NODE_PODS
from tangramctl.view import GpuView, RunView, StateRootView, encode
from tests.unit.tangramctl.explained import cluster, explain, held
from vgpu.protocol.status import SwapStatus
from vgpu.scheduling.snapshot import snapshot_to_json

GIB = 2**30
NOWHERE = "http://127.0.0.1:1"
PAUSED = SwapStatus(True, 185.0, "waits for its turn", "", 0, "", "", "kill", "no room", "keep")
CONDITION = {
    "type": "tangram.sh/GpuMemoryStranded",
    "status": "True",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "message": "no room",
}


def container(name: str) -> RunView:
    gpu = GpuView("GPU-1", None, None, 100 * GIB, 0, 70 * GIB, 70 * GIB, 0, 0, 0, 60 * GIB, 8 * GIB, 10 * GIB)
    return RunView("container", name, name, None, "x", None, "standard", 2, False, None, (gpu,), (), None, (), PAUSED)


class Kubectl:
    """A program in PATH whose answers are files, and that notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kubectl").write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/calls\ncat {folder}/$1-$2 2>/dev/null || {{ cat {folder}/$1 2>/dev/null || {{ echo "no $1 $2" >&2; exit 1; }}; }}\n'
        )
        (folder / "kubectl").chmod(0o755)

    def answer(self, name: str, document: object) -> None:
        (self.folder / name).write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    """Reads a cluster in which pod a of node n1 may burst to 100 GiB."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made = Kubectl(tmp_path)
    bursting: dict[str, Any] = held("a", "n1", 0, 60).annotated(gpu_mem_burst="100Gi").plain()
    bursting["kind"] = "Pod"
    bursting["status"]["conditions"] = [CONDITION, {"type": "Ready", "status": "True"}]
    node = {"metadata": {"name": "n1", "annotations": {}}}
    made.answer("get-nodes", {"items": [node]})
    made.answer("get-pods", {"items": [bursting]})
    made.answer("get-pod", bursting)
    return made


def with_node_pod(kubectl: Kubectl, view: StateRootView) -> None:
    """`get pods -A` lists the pods of the cluster, and with labels the device plugin's."""
    (kubectl.folder / "kubectl").write_text(
        (kubectl.folder / "kubectl").read_text().replace(
            "cat", f'case "$*" in *-l*) cat {kubectl.folder}/labelled; exit;; esac\ncat', 1
        )
    )  # fmt: skip
    kubectl.answer("labelled", {"items": [{"metadata": {"namespace": "gpus", "name": "tangram-node-x"}}]})
    kubectl.answer("exec", encode(view))


def test_what_it_has_above_its_guarantee_and_in_host_memory_and_why_it_is_paused(kubectl: Kubectl) -> None:
    with_node_pod(kubectl, StateRootView((container("default/a/main"), container("default/ab/main"))))
    code, output, wrong = explain("default/a", "--extender", NOWHERE)
    assert code == 0, wrong
    head, gpu, burst, *lines = output.splitlines()
    assert head == "pod default/a: it is bound to node n1"
    assert gpu.endswith(": 60 GiB")
    assert burst.startswith("  container main may burst to 100 GiB of a GPU")
    assert lines == [
        "  container main has 70Gi of 60-100Gi of GPU-1: 10Gi above its guarantee, 8Gi in host memory",
        "  container main is paused for 3m05s: 8.0 of 70.0 GiB are in host memory; waits for its turn",
        "  ! container main: its memory cannot come back: no room (burst.stranded: keep)",
        "  condition tangram.sh/GpuMemoryStranded is true since 2026-01-01T00:00:00Z: no room",
    ]
    assert kubectl.calls[-2:] == [
        f"get pods -A -l {NODE_PODS} --field-selector spec.nodeName=n1 -o json",
        "exec -n gpus tangram-node-x -c arbiter -- tangramctl ps --json",
    ]


def test_the_document_has_the_same(kubectl: Kubectl) -> None:
    with_node_pod(kubectl, StateRootView((container("default/a/main"),)))
    document = json.loads(explain("default/a", "--extender", NOWHERE, "--json")[1])
    assert (document["placed"], document["stage"], document["bursts"]["main"]["mib"]) == (
        True,
        "seen bound",
        100 * 1024,
    )
    (gpu,) = document["containers"][0]["gpus"]
    assert (gpu["guarantee_bytes"], gpu["excess_bytes"], gpu["away_bytes"]) == (60 * GIB, 10 * GIB, 8 * GIB)
    assert document["conditions"] == [CONDITION]


@pytest.mark.parametrize("broken", ["no right to exec", "another version", "another pod", "no kubectl"])
def test_what_cannot_be_read_costs_a_line_on_stderr_and_not_the_answer(
    kubectl: Kubectl, broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_node_pod(kubectl, StateRootView((container("default/a/main"),)))
    words = ["--extender", NOWHERE]
    if broken == "no right to exec":
        (kubectl.folder / "exec").unlink()
    elif broken == "another version":
        kubectl.answer("exec", {"version": 2})
    elif broken == "another pod":
        other = json.loads((kubectl.folder / "get-pod").read_text())
        other["metadata"]["uid"] = "another"
        kubectl.answer("get-pod", other)
    else:
        (tmp_path / "snapshot.json").write_bytes(snapshot_to_json(cluster()))
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        words = ["--snapshot", str(tmp_path / "snapshot.json")]
    code, output, wrong = explain("default/a", *words)
    assert code == 0
    assert output.startswith("pod default/a: it is bound to node n1\n")
    assert "in host memory" not in output
    reported = [line for line in wrong.splitlines() if "what pod default/a uses now is not known" in line]
    assert len(reported) == (broken in ("no right to exec", "another version"))


def test_a_pod_that_does_not_burst_is_not_looked_for_on_its_node(kubectl: Kubectl) -> None:
    plain = held("a", "n1", 0, 60).plain() | {"kind": "Pod"}
    kubectl.answer("get-pod", plain)
    code, output, wrong = explain("default/a", "--extender", NOWHERE)
    assert (code, len(output.splitlines()), "not known" in wrong) == (0, 2, False)
    assert kubectl.calls[-1] == "get pod a -n default -o json"
