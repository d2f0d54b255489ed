"""On fleets where some pods can use few nodes, these still fit there."""

from __future__ import annotations

import pytest

from bench.placement.pools import FIRST_SEED, SCENES, percent, run


@pytest.mark.parametrize(
    ("scene", "least"), [("label", 80), ("taint", 95), ("MIG instances", 95), ("shares beside MIG instances", 99)]
)
def test_restricted_pods_fit_where_without_it_they_do_not(scene: str, least: float) -> None:
    placed = {learns: run(SCENES[scene](), FIRST_SEED, learns=learns) for learns in (True, False)}
    restricted = {learns: percent([one for one in placed[learns] if one[0].restricted]) for learns in placed}
    assert restricted[True] >= least > restricted[False] + 10
    assert percent(placed[True]) >= percent(placed[False]) + 1, "and no other pod is left out for it"
