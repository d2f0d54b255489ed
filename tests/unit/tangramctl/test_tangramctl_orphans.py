"""What `explain` shows of pods that were deleted by force and whose processes run on."""

from __future__ import annotations

import json
from pathlib import Path

from tangramctl.cluster import snapshot_of
from tests.builders import gpu, node, pod, share
from tests.unit.tangramctl.explained import admitted, explain, files, of_files
from vgpu.api.codec import inventory_to_json
from vgpu.api.inventory import Inventory, Orphan
from vgpu.api.names import DEFAULT
from vgpu.scheduling.snapshot import Snapshot, snapshot_to_json

__all__ = ["files"]


def with_orphan(name: str) -> Snapshot:
    """The cluster, where a pod of this name was deleted by force and runs on."""
    held = Orphan("uid-gone", "default", name, (share(gpu(0, node="n2"), 30 * 1024, 5),))
    n2 = Inventory((gpu(0, node="n2"),), orphans=(held,))
    return snapshot_of([node("n2").with_text(inventory_to_json(n2)).plain()], [], DEFAULT)


def test_used_capacity_that_only_a_pod_deleted_by_force_explains_is_attributed_to_it(files: Path) -> None:
    (files / "snapshot.json").write_bytes(snapshot_to_json(with_orphan("gone")))
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=60 * 1024)))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert code == 3
    assert (
        "pod default/gone was deleted by force, and its processes still run: they keep GPU 0 (30 GiB and 5 %) of node n2"
        in output
    )
    _, output, _ = explain("default/p", *of_files(files, "pod.json"), "--json")
    (orphan,) = json.loads(output)["orphans"]
    assert (orphan["pod"], orphan["node"], [gpu["mib"] for gpu in orphan["gpus"]]) == (
        "default/gone",
        "n2",
        [30 * 1024],
    )


def test_one_that_the_api_has_lost_is_shown_to_run_on_and_its_successor_is_explained(files: Path) -> None:
    (files / "snapshot.json").write_bytes(snapshot_to_json(with_orphan("p")))
    code, output, _ = explain("default/p", *of_files(files, "none.json"))
    assert (code, output.splitlines()[0]) == (
        0,
        "pod default/p: it was deleted by force, and its processes still run on node n2",
    )
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=60 * 1024)))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert (code, output.startswith("pod default/p requests 60 GiB of one GPU and fits no node")) == (3, True)
