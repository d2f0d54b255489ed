"""`tangramctl simulate` as a process: what people and programs read, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import Gpu, Inventory
from vgpu.scheduling.snapshot import NodeRecord, PodRecord, Snapshot, snapshot_to_json

ROOT = Path(__file__).parents[3]
GPUS = [f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in range(2)]


def simulate(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tangramctl", "simulate", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def files(tmp_path: Path) -> list[str | Path]:
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\na,8000,1000,2,T4\nb,8000,1000,2,P100\n")
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\nx,100,1,1,500,\ny,100,1,1,250,T4\n")
    return ["--nodes", nodes, "--pods", pods]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Node full has a GPU that is taken by three quarters, node sick takes no pods."""
    inventories = [Inventory((Gpu(uuid, 0, "t4", 16384),)) for uuid in GPUS]
    held = Assignment({"main": (AssignedGpu(GPUS[0], 0, 12288, 50),)})
    nodes = (
        NodeRecord("full", inventories[0]),
        NodeRecord("roomy", inventories[1]),
        NodeRecord("sick", None, "its inventory cannot be read"),
    )
    pods = (PodRecord("u1", "default/p", "full", "seen bound", held),)
    path = tmp_path / "snapshot.json"
    path.write_bytes(snapshot_to_json(Snapshot("tangram.sh", 1024, nodes, pods)))
    return path


def test_a_document_for_programs_has_means_over_the_seeds_and_the_curve(files: list[str | Path]) -> None:
    done = simulate(*files, "--policy", "fragmentation", "--seeds", "42:45", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["policy"] == "fragmentation"
    assert found["seeds"] == [42, 43, 44]
    assert len(found["allocation_at_100_by_seed"]) == 3
    assert 90 <= found["allocation_at_100"] <= found["allocation_at_130"] <= 100
    assert [point[0] for point in found["curve"]] == list(range(1, 131))
    assert found["curve"][99][1] == found["allocation_at_100"]


def test_seeds_replayed_at_once_give_what_they_give_one_by_one(files: list[str | Path]) -> None:
    alone, together = (json.loads(simulate(*files, "--json", "--jobs", jobs).stdout) for jobs in ("1", "2"))
    assert alone | {"seconds": 0} == together | {"seconds": 0}


def test_a_person_sees_a_table_and_a_picture(files: list[str | Path], tmp_path: Path) -> None:
    done = simulate(*files, "--seeds", "1", "--plot", tmp_path / "curve.svg")
    assert "arrived  allocated  fragmented" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("allocated: used by the pods placed; fragmented: idle")
    picture = ElementTree.fromstring((tmp_path / "curve.svg").read_text())
    assert picture.tag.endswith("svg")
    assert [each.text for each in picture.iter() if each.text in ("allocated", "fragmented")]


@pytest.mark.parametrize(
    ("count", "warning"),
    [
        (0, ""),
        (3, "tangramctl: 3 of 4 pods fit no node, not even an empty one: big0, big1, big2\n"),
        (5, "tangramctl: 5 of 6 pods fit no node, not even an empty one: big0, big1, big2 and 2 more\n"),
    ],
)
def test_pods_that_no_node_could_ever_take_are_named(files: list[str | Path], count: int, warning: str) -> None:
    large = "".join(f"big{number},100,1,3,500,\n" for number in range(count))
    Path(files[3]).write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\nx,100,1,1,500,\n{large}")
    done = simulate(*files, "--seeds", "1", "--json")
    assert (done.returncode, done.stderr) == (0, warning)
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--policy", "best"],
            "--policy is 'best': it must be one of binpack, spread, fragmentation, topology, cool, scheduler",
        ),
        (["--seeds", "5:5"], "--seeds is '5:5', which is 0 seeds"),
        (["--seeds", "x"], "--seeds is 'x'"),
        (["--arrive", "0"], "--arrive is 0.0: it must be above 0"),
        (["--pods", "/nowhere"], "--pods /nowhere: No such file"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_a_sentence(
    files: list[str | Path], words: list[str], error: str
) -> None:
    done = simulate(*files, *words)
    assert done.returncode == 2
    assert error in done.stderr


def test_a_malformed_line_is_named_with_its_column(files: list[str | Path]) -> None:
    Path(files[3]).write_text("name,num_gpu,gpu_milli\nx,1,500\ny,1,lots\n")
    done = simulate(*files)
    assert done.returncode == 2
    assert "pods.csv: line 3, column gpu_milli is 'lots'" in done.stderr


def test_a_column_that_is_named_twice_is_refused(files: list[str | Path]) -> None:
    Path(files[3]).write_text("name,num_gpu,gpu_milli,num_gpu,,\nx,1,500,2,,\n")
    done = simulate(*files)
    assert done.returncode == 2
    assert "pods.csv: line 1, column num_gpu: it is named 2 times: it must be named once" in done.stderr
    Path(files[3]).write_text("name,num_gpu,gpu_milli,,\nx,1,500,,\n")
    assert simulate(*files).returncode == 0


def test_a_snapshot_shows_where_a_pod_fits_and_why_not_elsewhere(snapshot: Path) -> None:
    done = simulate("--snapshot", snapshot, "--gpu-mem", "8Gi", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["fits"], found["node"], found["gpus"]) == (True, "roomy", [GPUS[1]])
    assert found["why_not"] == {
        "full": "no single GPU has enough free gpu-mem and gpu-core",
        "sick": "its inventory cannot be read",
    }


def test_a_pod_that_fits_nowhere_ends_with_3_and_the_reason_of_each_node(snapshot: Path) -> None:
    done = simulate("--snapshot", snapshot, "--gpu-mem", "20Gi")
    assert done.returncode == 3
    assert done.stdout.startswith("does not fit\n")
    assert (
        "  roomy: no GPU of the node is large enough or of an allowed model (20 GiB requested, the largest allowed there has 16 GiB)\n"
        in done.stdout
    )
    assert "  sick: its inventory cannot be read\n" in done.stdout


def test_a_snapshot_of_a_newer_version_is_refused(snapshot: Path) -> None:
    snapshot.write_text(re.sub(r'"v":\d', '"v":9', snapshot.read_text(), count=1))
    done = simulate("--snapshot", snapshot, "--gpu-mem", "8Gi")
    assert done.returncode == 2
    assert "of version 9: this Tangram reads versions 1 to 5" in done.stderr


def test_a_snapshot_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    done = simulate("--snapshot", tmp_path / "nope", "--gpu-mem", "8Gi")
    assert (done.returncode, done.stderr) == (
        2,
        f"tangramctl: --snapshot {tmp_path}/nope: No such file or directory\n",
    )


def test_a_snapshot_and_a_workload_are_two_questions(snapshot: Path, files: list[str | Path]) -> None:
    assert "--snapshot needs --gpu-mem" in simulate("--snapshot", snapshot).stderr
    assert "--nodes and --pods" in simulate(*files[:2]).stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["SNAPSHOT", "--seeds", "42:52", "--plot", "x.svg"], "--snapshot cannot stand with --seeds, --plot: "),
        (["SNAPSHOT", "--arrive", "1.3", "--jobs", "1"], "--snapshot cannot stand with --arrive, --jobs: "),
        (["SNAPSHOT", "FILES"], "--snapshot cannot stand with --nodes, --pods: "),
        (
            ["FILES", "--gpu-mem", "8Gi", "--gpu-core", "0"],
            "--nodes and --pods cannot stand with --gpu-mem, --gpu-core: ",
        ),
        (
            ["FILES", "--gpu-count", "1", "--gpu-model", ""],
            "--nodes and --pods cannot stand with --gpu-count, --gpu-model: ",
        ),
    ],
)
def test_options_of_the_other_question_are_named_and_not_passed_over(
    snapshot: Path, files: list[str | Path], words: list[str], error: str
) -> None:
    meant: dict[str, list[str | Path]] = {"SNAPSHOT": ["--snapshot", snapshot, "--gpu-mem", "8Gi"], "FILES": files}
    done = simulate(*(word for each in words for word in meant.get(each, [each])))
    assert (done.returncode, done.stderr.startswith(f"tangramctl: {error}")) == (2, True), done.stderr
