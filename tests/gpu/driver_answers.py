"""The tables of docs/development/elastic-memory.md, asked of the driver again: what it answers about plain, mapped and elastic memory.

Plain and mapped memory is that of a process without the library, elastic memory that of one whose container may burst. Where the library gives
elastic memory an answer of its own, the row wants the one that the page has. A row that the fake driver does not model is `not run` there.
"""

from __future__ import annotations

import re
from typing import Any, Final

from tests.gpu import pool_answers
from tests.gpu.kit import burst
from tests.gpu.kit.machine import MIB, Container, Machine
from tests.gpu.kit.results import NotRun, Results

PART = "answers"
GUARANTEE_MIB = 8192
ELASTIC = 1 << 62
PAGE = 2 * MIB
MODES: Final[dict[str, int | None]] = {"no capture": None, "global": 0, "thread-local": 1, "relaxed": 2}

Answer = tuple[int, bool, bool]
"""(CUresult, waits for other work, the capture ends)"""
WAITS, REFUSED, BROKEN = (0, True, False), (1, False, False), (900, False, True)
BESIDE_WORK: Final[dict[str, dict[str, Answer]]] = {
    "cuMemFree": {"no capture": WAITS, "global": BROKEN, "thread-local": BROKEN, "relaxed": WAITS},
    "cuCtxSynchronize": {"no capture": WAITS, "global": BROKEN, "thread-local": BROKEN, "relaxed": BROKEN},
    "cuMemFree of an unknown pointer": {"no capture": REFUSED, "global": BROKEN, "thread-local": BROKEN, "relaxed": REFUSED},
}  # fmt: skip
"""Of plain memory; elastic memory is freed alike."""
ANY: Final = "any"
SAME_FOR_ALL: Final = {
    "MEMORY_TYPE": 2, "DEVICE_ORDINAL": 0, "IS_MANAGED": 0, "MAPPED": 1, "ACCESS_FLAGS": 3, "MEMPOOL_HANDLE": 0, "SYNC_MEMOPS": 0,
}  # fmt: skip
BY_KIND: Final[dict[str, tuple[int, int, int]]] = {
    "ALLOWED_HANDLE_TYPES": (0, 1, 0),
    "IS_LEGACY_CUDA_IPC_CAPABLE": (1, 0, 1),
    "IS_GPU_DIRECT_RDMA_CAPABLE": (1, 0, 0),
    "IS_HW_DECOMPRESS_CAPABLE": (1, 0, 0),
}
"""Of plain, mapped and elastic memory."""
KINDS: Final = ("plain", "mapped", "elastic")
CALLS: Final[dict[str, tuple[int, int, int]]] = {
    "cuMemRetainAllocationHandle": (1, 0, 1),
    "cuIpcGetMemHandle": (0, 1, 0),
    "setting SYNC_MEMOPS": (0, 801, 801),
}
"""CUresults."""
FAKE_LACKS: Final = {
    r"(, global|, thread-local|cuCtxSynchronize, relaxed): ": "it breaks no capture",
    r"cuMemFree of an unknown pointer, .*: waits": "it waits before it looks for the pointer",
    r"plain .* without a current context": "it frees memory only in a context",
    r"(plain|mapped) .*(MEMORY_BLOCK_ID|IS_GPU_DIRECT_RDMA_CAPABLE|IS_HW_DECOMPRESS_CAPABLE)": "it has no such attribute",
}
"""Rows, as "case: check", that the fake driver does not model, and why."""


def _container(machine: Machine, kind: str) -> Container:
    """A process that has memory of that kind. NotRun if it has no elastic memory here."""
    if kind != "elastic":
        return machine.container()
    above = burst.ABOVE_MIB if burst.served() else 0
    key = machine.grant(GUARANTEE_MIB, burst_mib=GUARANTEE_MIB + above)
    made = machine.container(key, CUDA_VISIBLE_DEVICES="0")
    made.request("take", "sync", 4 * MIB)
    if not made.request("elastic_bytes", "sync")["elastic"]:
        raise NotRun(f"this process has no elastic memory: {made.errors()}")
    made.request("give", "sync")
    return made


class Rows:
    """The rows of one case."""

    def __init__(self, machine: Machine, results: Results) -> None:
        self.machine, self.results = machine, results

    def check(self, check: str, wanted: object, seen: object, ok: bool | None = None) -> None:
        row = f"{self.results.case}: {check}"
        lacks = [why for pattern, why in FAKE_LACKS.items() if self.machine.fake and re.search(pattern, row)]
        if lacks and not (seen == wanted if ok is None else ok):
            self.results.not_run(check, f"the fake driver answers {seen}: {lacks[0]}")
        else:
            self.results.check(check, wanted, seen, ok)


def case_beside_work(rows: Rows, kind: str) -> None:
    """Frees and waits beside work, in a capture of each mode and in none."""
    container = _container(rows.machine, kind)
    for what, modes in BESIDE_WORK.items():
        for mode, (code, waits, ends) in modes.items():
            seen = container.request("beside_work", what, MODES[mode])
            rows.check(f"{what}, {mode}: CUresult", code, seen["code"])
            rows.check(f"{what}, {mode}: waits", waits, seen["waits"])
            rows.check(f"{what}, {mode}: the capture ends", ends, seen["ends"])
            rows.check(f"{what}, {mode}: freed", what == "cuMemFree" and code == 0, seen["freed"])
            rows.results.fact(f"{what}, {mode}: ms", seen["took_ms"])
    for mode in ("global", "thread-local", "relaxed"):
        seen = container.request("beside_work", "cuMemAlloc", MODES[mode])
        broken = kind == "plain" and mode != "relaxed"
        rows.check(f"cuMemAlloc, {mode}: CUresult", 900 if broken else 0, seen["code"])
        rows.check(f"cuMemAlloc, {mode}: the capture ends", broken, seen["ends"])
    seen = container.request("free_async")
    rows.check("cuMemFreeAsync: CUresult", 0, seen["code"])
    rows.check("cuMemFreeAsync: returns before the work before it", True, seen["before"])
    rows.check("cuMemFreeAsync: freed", True, seen["freed"])
    rows.check("cuMemFree without a current context", 0, container.request("free_without_context"))


def _wanted(kind: str, made: dict[str, int], context: int) -> dict[str, tuple[int, object]]:
    """Attribute -> (CUresult, value) of an allocation."""
    column = KINDS.index(kind)
    of_pages = {"MAPPING_BASE_ADDR": made["at"], "MAPPING_SIZE": made["bytes"]} if kind == "mapped" else {}
    values: dict[str, object] = {
        "CONTEXT": 0 if kind == "mapped" else context,
        "DEVICE_POINTER": made["at"] + 10,
        "RANGE_START_ADDR": made["at"],
        "RANGE_SIZE": made["bytes"],
        "BUFFER_ID": ANY,
        "MEMORY_BLOCK_ID": ANY,
        **SAME_FOR_ALL,
        **of_pages,
        **{name: three[column] for name, three in BY_KIND.items()},
    }
    return {name: (0, value) for name, value in values.items()} | {"HOST_POINTER": (1, ANY)}


def case_attributes(rows: Rows, kind: str) -> None:
    """Attributes of a pointer into an allocation, and calls about it."""
    container = _container(rows.machine, kind)
    made, other = (container.request("new", kind) for _ in range(2))
    seen = container.request("attributes", made["at"] + 10)
    others = container.request("attributes", other["at"] + 10)
    for name, (code, value) in _wanted(kind, made, container.request("context")).items():
        rows.check(f"{name}: CUresult", code, seen[name][0])
        if value != ANY:
            rows.check(name, value, seen[name][1])
    for name in ("BUFFER_ID", "MEMORY_BLOCK_ID"):
        rows.check(f"{name}: unique", True, seen[name][1] != others[name][1])
        rows.check(f"{name}: bit 62 is set", kind == "elastic", bool(seen[name][1] & ELASTIC))
    if kind != "mapped":
        _in_pages(rows, made, seen)
    _calls(rows, container, kind, made)


def _in_pages(rows: Rows, made: dict[str, int], seen: dict[str, list[int]]) -> None:
    """MAPPING_BASE_ADDR and MAPPING_SIZE are whole pages with the allocation in them."""
    base, size = (seen[name][1] for name in ("MAPPING_BASE_ADDR", "MAPPING_SIZE"))
    whole = base % PAGE == 0 and size % PAGE == 0
    around = base <= made["at"] and made["at"] + made["bytes"] <= base + size
    rows.check("MAPPING_BASE_ADDR, MAPPING_SIZE", "pages around the allocation", f"{base:#x}, {size}", whole and around)


def _calls(rows: Rows, container: Container, kind: str, made: dict[str, int]) -> None:
    answers: dict[str, Any] = container.request("calls", made["at"])
    rows.check("cuMemGetAddressRange", [0, made["at"], made["bytes"]], answers["cuMemGetAddressRange"])
    for name, codes in CALLS.items():
        rows.check(name, codes[KINDS.index(kind)], answers[name][0])


def case_pools(rows: Rows, kind: str) -> None:
    """Stream-ordered memory: the driver's, and elastic."""
    native = rows.machine.container()
    pool_answers.case_pools(rows.results, native, lambda: _container(rows.machine, kind), fake=rows.machine.fake)


CASES: Final = {
    **{f"attributes of {kind} memory": (case_attributes, kind) for kind in KINDS},
    **{f"{kind} memory beside work": (case_beside_work, kind) for kind in ("plain", "elastic")},
    "stream-ordered memory": (case_pools, "elastic"),
}


def run_case(machine: Machine, results: Results, name: str) -> None:
    """Rows of the CSV."""
    case, kind = CASES[name]
    with results.one(PART, name):
        case(Rows(machine, results), kind)
    machine.end_containers()
