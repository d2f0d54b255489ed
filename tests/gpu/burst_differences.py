"""What answers otherwise where memory is elastic: the rows, and the reason of each. Every other row has to be as without bursts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.gpu.kit.results import Known, Results
from tests.gpu.paths import CONTEXTS

KEPT: Final = Known(
    r"^\d{4}",
    "what is freed is kept for the next request: free for this container, and the process's in the driver's records",
)
NO_HANDLE: Final = Known(
    "cuIpcGetMemHandle answered 1$",
    "elastic memory has no IPC handle, because another process's mapping would not move with it",
)
ELASTIC_PATHS: Final = ("sync", "pitch")
"""Paths of `paths` whose memory the library serves from blocks that can be swapped."""
ELASTIC_ROW: Final = "elastic memory, MiB"
COUNTED_ROW: Final = "memory that has addresses, MiB"

EXPECTED: Final[Mapping[tuple[str, str, str], Known]] = {
    **{("paths", path, "given back: free by cuMemGetInfo, MiB"): KEPT for path in ELASTIC_PATHS},
    **{("paths", f"context {way}", "MiB taken again without a free"): KEPT for way in CONTEXTS},
    ("paths", "IPC in one container", "runs to its end"): NO_HANDLE,
}
"""(part, case, check) -> reason. On an H200 by hand, seven rows of kept memory and the one of IPC differed."""


def sum_up(results: Results, part: str) -> None:
    """Rows on how much memory was elastic, and on what was expected to differ."""
    sums = {
        name: sum(float(row.seen) for row in results.rows if row.check == name) for name in (ELASTIC_ROW, COUNTED_ROW)
    }
    seen = {(row.part, row.case, row.check): row.ok for row in results.rows}
    alike = [case for (of, case, check) in EXPECTED if of == part and seen.get((of, case, check), "yes") == "yes"]
    results.part, results.case = part, "all cases"
    for name, mib in sums.items():
        results.fact(f"{name}, all rows together", mib)
    results.fact("rows that differ as expected", sum(row.ok == "differs" for row in results.rows))
    results.fact("cases that may differ and did not", ", ".join(alike))
