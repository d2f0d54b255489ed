"""Who gives way: compared with a search of all choices."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from vgpu.memory.swap.victims import Bytes, choose

GPUS = ("0", "1")
sizes = st.dictionaries(st.sampled_from(GPUS), st.integers(1, 6), min_size=1)


def best(short: Bytes, candidates: list[tuple[str, Bytes]]) -> tuple[int, ...] | None:
    """The obvious way: of all sets that can move enough, the one that spares the most valuable containers. 1 = gives way; most valuable first."""
    enough = [
        chosen
        for chosen in product((0, 1), repeat=len(candidates))
        if all(
            sum(can.get(gpu, 0) for (_, can), gives in zip(reversed(candidates), chosen, strict=True) if gives) >= least
            for gpu, least in short.items()
        )
    ]
    return min(enough, default=None)


@given(sizes, st.lists(sizes, max_size=6))
def test_the_most_valuable_stay_and_the_fewest_bytes_move(short: Bytes, each: list[Bytes]) -> None:
    candidates = [(f"c{number}", can) for number, can in enumerate(each)]
    chosen, wanted = choose(short, candidates), best(short, candidates)
    if chosen is None or wanted is None:
        assert chosen is None
        assert wanted is None
        return
    assert tuple(int(name in chosen) for name, _ in reversed(candidates)) == wanted
    for gpu in GPUS:
        assert sum(gives.get(gpu, 0) for gives in chosen.values()) == short.get(gpu, 0)
    for name, gives in chosen.items():
        assert gives
        assert all(0 < moves <= dict(candidates)[name][gpu] for gpu, moves in gives.items())


def test_a_small_one_stays_where_the_next_must_give_way_anyway() -> None:
    assert choose({"0": 10}, [("small", {"0": 1}), ("large", {"0": 10})]) == {"large": {"0": 10}}
