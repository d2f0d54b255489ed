"""Which containers give way when a GPU is short: as few bytes as are short, and the fewest of the most valuable containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Bytes = dict[str, int]
"""GPU -> bytes."""


def choose(short: Mapping[str, int], candidates: Sequence[tuple[str, Bytes]]) -> dict[str, Bytes] | None:
    """Container -> what it moves out of each GPU, or None if all together have not enough.

    `short`: GPU -> missing bytes, above 0. `candidates`: (container, what it can move), the one that is to give way first at the front.
    Exactly what is missing moves. From the back of the list on, each container stays whose part the containers before it can move:
    no other choice spares the last one that this choice does not spare.
    """
    total = {gpu: sum(can.get(gpu, 0) for _, can in candidates) for gpu in short}
    if any(total[gpu] < missing for gpu, missing in short.items()):
        return None
    needed = []
    for name, can in reversed(candidates):
        if all(total[gpu] - can.get(gpu, 0) >= missing for gpu, missing in short.items()):
            total = {gpu: left - can.get(gpu, 0) for gpu, left in total.items()}
        else:
            needed.append((name, can))
    left, chosen = dict(short), {}
    for name, can in reversed(needed):
        chosen[name] = {gpu: moves for gpu, missing in left.items() if (moves := min(missing, can.get(gpu, 0)))}
        for gpu, moves in chosen[name].items():
            left[gpu] -= moves
    return chosen
