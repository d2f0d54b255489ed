"""Stream-ordered memory, the driver's and elastic: the rows of `answers` on pools.

The driver is asked first, without the library; a container that may burst then has to answer the same. So no row has a figure of this page, but for the rows
of `DOCUMENTED`, which are wanted of the driver too. `DIFFERS` are the rows in which elastic memory is known to be otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from tests.gpu.kit.machine import Container
from tests.gpu.kit.results import Results

CALLS: Final = ("pool_figures", "pool_reserves", "pool_reuse", "pool_pointer", "pool_beside_work")
DOCUMENTED: Final[dict[str, Any]] = {
    "default of attribute 1": 1,
    "default of attribute 2": 1,
    "default of attribute 3": 1,
    "default of attribute 4": 0,
    "used high, reset": 5242980,
    "reserved after a synchronisation": 0,
    "the work had not ended": True,
    "in the same stream at once": True,
    "in another stream while it has work": False,
    "in another stream when it has ended": True,
}
"""cuda.h: attributes of pools. The reset high is what is used then: 5 MiB and 100 bytes (H200, driver 580)."""
DIFFERS: Final = {
    r"reserved, MiB|reserved after cuMemFree, MiB": "the driver's pools grow by 32 MiB, and these by what is needed",
    r"cuMemFree, (no capture|relaxed)$": "it waits for the work of the context, as for other memory",
    r"in a stream that waits for an event behind the free": "events of the program are not followed: the memory is returned again when the free has happened",
    r"IS_GPU_DIRECT_RDMA_CAPABLE|IS_HW_DECOMPRESS_CAPABLE|SYNC_MEMOPS": "memory that can be swapped has not that property",
}
"""Row -> why, where elastic memory answers otherwise."""
FAKE_DIFFERS: Final = {
    r"in the same stream at once|in another stream when it has ended": "its pools return no address again",
    r"used while the free is behind work": "it counts what is freed until the stream is there",
    r"used high, reset|used after it|used after a synch": "its figures of such a row follow the stream",
    r"cuMemFree without a current context": "it frees memory only in a context",
    r"cuMemFree, (global|thread-local)|cuMemFreeAsync in a capture": "it breaks no capture",
}
"""Row -> why, where the fake driver does not model the real one."""


def _why(row: str, known: dict[str, str]) -> str:
    return next((why for pattern, why in known.items() if re.search(pattern, row)), "")


def case_pools(results: Results, native: Container, container: Callable[[], Container], *, fake: bool) -> None:
    """Rows of the driver, then of elastic memory. `container` makes the one that may burst, or raises NotRun."""
    wanted = {name: native.request(name) for name in CALLS}
    for name, rows in wanted.items():
        for row, seen in rows.items():
            lacks = _why(row, FAKE_DIFFERS) if fake else ""
            if row not in DOCUMENTED:
                results.fact(f"the driver, {name}: {row}", str(seen))
            elif lacks and seen != DOCUMENTED[row]:
                results.not_run(f"the driver, {name}: {row}", f"the fake driver answers {seen}: {lacks}")
            else:
                results.check(f"the driver, {name}: {row}", DOCUMENTED[row], seen)
    ours = container()
    for name, rows in wanted.items():
        for row, seen in ours.request(name).items():
            why = _why(row, DIFFERS) or (_why(row, FAKE_DIFFERS) if fake else "")
            if why and seen != rows[row]:
                results.fact(f"elastic, {name}: {row}", f"{seen}, the driver {rows[row]}: {why}")
            else:
                results.check(f"elastic, {name}: {row}", rows[row], seen)
