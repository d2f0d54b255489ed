"""A cluster that `tangramctl explain` is run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tangramctl.__main__ import app
from tangramctl.cluster import snapshot_of
from tests.builders import PodBuilder, gpu, node, pod, share
from vgpu.api.contract import GPUS_ENV
from vgpu.api.names import DEFAULT
from vgpu.api.request import PodRequest, pod_request
from vgpu.scheduling.snapshot import Snapshot, snapshot_to_json


def cluster() -> Snapshot:
    """n1: GPUs with 20 and 30 GiB free; n2: 40 GiB free and 10 %; small: one GPU of 16 GiB; plain: no GPU."""
    nodes = [node("n1").with_gpus(2), node("n2").with_gpus(1), node("small").with_gpus(1, mib=16_384), node("plain")]
    pods = [held("a", "n1", 0, 60), held("b", "n1", 1, 50), held("c", "n2", 0, 40, core=90)]
    return snapshot_of([one.plain() for one in nodes], [one.plain() for one in pods], DEFAULT)


def held(name: str, at: str, row: int, gib: int, core: int = 0) -> PodBuilder:
    asking = pod(name).asking(mib=gib * 1024, core=core).on(at)
    return asking.assigned(share(gpu(row, node=at), gib * 1024, core)).with_phase("Running")


def request_of(built: PodBuilder) -> PodRequest:
    return pod_request(built.plain())


def admitted(built: PodBuilder) -> bytes:
    """The pod as the API has it, with the variable that the webhook gives containers that request a GPU."""
    document = built.plain()
    for container in document["spec"]["containers"]:
        container["env"] = [{"name": GPUS_ENV}]
    return json.dumps(document).encode()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "snapshot.json").write_bytes(snapshot_to_json(cluster()))
    (tmp_path / "pod.json").write_bytes(admitted(pod("p").asking(mib=35 * 1024)))
    (tmp_path / "fits.json").write_bytes(admitted(pod("p").asking(mib=8192)))
    (tmp_path / "plain.json").write_bytes(admitted(pod("p")))
    (tmp_path / "bad.json").write_bytes(admitted(pod("p").asking(core=30)))
    (tmp_path / "list.json").write_text("[]")
    return tmp_path


def explain(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["explain", "pod", *words])
    return done.exit_code, done.stdout, done.stderr


def of_files(files: Path, name: str) -> list[str]:
    return ["--snapshot", str(files / "snapshot.json"), "--pod", str(files / name)]
