"""The attack suite's table: each row names something that exists, and the page shows it as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.e2e.attacks import stage
from tests.e2e.attacks.attack import LIMIT_MIB, Attack, Outcome, Where
from tests.e2e.attacks.table import FAMILIES, staged
from vgpu.api.enforcement import Reason

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations/security.md"
ROWS = [attack for family in FAMILIES.values() for attack in family]


def test_every_attack_has_a_name_of_its_own_that_a_pod_may_have() -> None:
    names = [attack.name for attack in ROWS]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name)] == []


@pytest.mark.parametrize("attack", ROWS, ids=lambda attack: attack.name)
def test_an_attack_is_made_in_one_way_and_names_how_it_is_seen(attack: Attack) -> None:
    ways = [
        bool(attack.test),
        bool(attack.script),
        attack.act is not None,
        attack.pod is not None and not attack.script,
    ]
    assert sum(ways) == 1
    assert attack.does.endswith(".")
    assert attack.levels
    assert (attack.outcome is Outcome.REPORTED and not attack.test) == (
        attack.reason in list(Reason) and bool(attack.reason)
    )
    assert attack.where is Where.CLUSTER or attack.test


@pytest.mark.parametrize("attack", [attack for attack in ROWS if attack.test], ids=lambda attack: attack.name)
def test_a_test_that_shows_an_attack_elsewhere_exists(attack: Attack) -> None:
    path, _, name = attack.test.partition("::")
    functions = [
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert name in functions


@pytest.mark.parametrize("attack", [attack for attack in ROWS if attack.script], ids=lambda attack: attack.name)
def test_the_script_of_an_attack_is_a_program(attack: Attack) -> None:
    ast.parse(stage.HEAD + attack.script)


def test_all_attackers_of_a_cluster_fit_on_its_gpus_at_once() -> None:
    """Of 160 units, the neighbours have 16, and 60 are reserved for what attackers allocate beyond their limits."""
    made = stage.pods((attack, level) for attack, level in staged() if attack.script)
    pods = {(level, thing["metadata"]["name"]): thing for (_, level), (thing, _) in made.items()}
    requested = [
        int(one["resources"]["limits"].get("tangram.sh/gpu-mem", 0))
        for thing in pods.values()
        for one in thing["spec"]["containers"]
    ]
    assert set(requested) <= {0, LIMIT_MIB // 1024, 2}
    assert sum(requested) <= 84


def test_the_page_names_no_row_that_is_not_in_the_table() -> None:
    """hack/verify-reference checks the tables themselves."""
    open_part = PAGE.read_text().partition("## What stays open")[2].partition("## Attacks")[0]
    named = re.findall(r"`([a-z]+(?:-[a-z]+)+)`", open_part)
    names = {attack.name for attack in ROWS} | {str(reason) for reason in Reason} | {"cap-unreported"}
    assert set(named) <= names
