"""docs/reference/extender.md documents what the extender answers: no more, no less."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from extender import reasons
from extender.settings import Settings
from tests.builders import gpu, pod, share
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Inventory
from vgpu.scheduling import placement
from vgpu.scheduling.demand.request_distribution import Typical
from vgpu.scheduling.reservations import STAGES
from vgpu.scheduling.snapshot import (
    POD_STAGES,
    Free,
    NodeRecord,
    PodRecord,
    Snapshot,
    StartingSize,
    nth_constraints,
    snapshot_to_json,
)

PAGE = (Path(__file__).parents[3] / "docs/reference/extender.md").read_text()


def table(head: str) -> list[list[str]]:
    """The cells of the table under a heading row that begins so."""
    found = re.search(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found, head
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in found[1].splitlines()]


def constants(module: object) -> set[str]:
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def test_every_reason_stands_on_the_page_with_whether_eviction_helps() -> None:
    reported = {row[0].strip("| "): row[1] for row in table("reason")}
    known = constants(placement) | constants(reasons)
    assert reported == {reason: "no" if reason in reasons.NO_EVICTION_HELPS else "yes" for reason in known}


def test_every_stage_and_how_long_it_lasts_stands_on_the_page() -> None:
    rows = {row[0].strip("`| "): row[2] for row in table("stage")}
    assert tuple(rows) == POD_STAGES
    assert set(POD_STAGES) - STAGES.keys() == {"seen bound", "orphaned"}
    for stage, rule in STAGES.items():
        assert (f"{rule.life_s:g} s" in rows[stage]) is (rule.lapse in ("time", "received")), stage
    assert "list" in rows["bound"]


def test_the_addresses_are_the_defaults() -> None:
    ports = [row[0].strip("`| ") for row in table("address")]
    fields = Settings.model_fields
    assert ports == [f"{fields[f'{at}host'].default}:{fields[f'{at}port'].default}" for at in ("", "metrics_")]


def test_every_field_of_a_snapshot_stands_on_the_page() -> None:
    one = gpu(0)
    holding = pod("a").asking(mib=1024).assigned(share(one, 1024)).build()
    text = holding.metadata.annotation("tangram.sh/assignment")
    assert text
    record = PodRecord("u", "default/a", "n", "bound", Assignment({}), (StartingSize("r", 1, frozenset({one.uuid})),))
    nodes = (NodeRecord("n", Inventory((one,)), "x", (Free(one.uuid, 1, 1),), 1, (0,)),)
    distribution = ((Typical(1, 1024, 10, 1000, ("m",), (("1g.10gb", 1),), nth_constraints(0)), 3),)
    document = msgspec.json.decode(snapshot_to_json(Snapshot("tangram.sh", 1024, nodes, (record,), distribution, 1.5)))
    reported = {row[0].strip("`| ").removesuffix("[]"): row[1] for row in table("field")}
    plain = {key for key, value in document.items() if not isinstance(value, list)}
    assert set(reported) == plain | {"mix"} | {
        f"{many}[].{key}" for many in ("nodes", "pods") for key in document[many][0]
    }
    for field, inner in (("nodes[].free", nodes[0].free[0]), ("pods[].starting", record.starting[0])):
        assert all(f"`{name}`" in reported[field] for name in inner.__slots__)
    assert all(f"`{name}`" in reported["mix"] for name in document["mix"][0])
