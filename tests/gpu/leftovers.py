"""What the driver leaves of one process's data in the memory that the next one gets, by every path that can be read.

A process without the library fills most of the GPU with a word and exits, is killed, or frees and stays. Another then takes a
block by each path, all held at once so that each is other memory, and counts the word before it writes anything. The same is
asked within one process, whose own data the driver may hand back, with and without `clear yes` in its grant.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu.kit.machine import MIB, Container, Machine, Watcher
from tests.gpu.kit.results import Results

PART = "leftovers"
WORD = 0x7A3C5E91
READABLE = (
    "sync", "pitch", "managed, unwritten", "async", "async per-thread stream", "pool trimmed", "vmm", "vmm unmapped handles",
    "array", "graph memory node",
)  # fmt: skip
CLEARED = ("sync", "vmm", "async", "pool trimmed")
"""cuMemAlloc, cuMemCreate, the default pool, a pool of its own."""
LEAVE_MIB = 6144
"""Of the GPU, for the contexts: what the reader then takes is at least partly what the writer had."""

OWN_MIB = 32768
"""Grant of a process that reads its own."""


def _sizes(machine: Machine) -> tuple[int, int]:
    """(MiB the writer fills at most, MiB of each block read). The fake driver keeps data in the machine's own memory."""
    return (1024, 64) if machine.fake else (1 << 20, 1024)


def _written(machine: Machine, writer: Container) -> int:
    """Fills the GPU; MiB."""
    most, _ = _sizes(machine)
    free_mib = writer.request("info")[0] // MIB - LEAVE_MIB
    block = min(64 if machine.fake else 1024, max(free_mib, 2))
    writer.request("fill", "sync", [block * MIB], min(most, free_mib) * MIB)
    return int(writer.request("write", "sync", WORD)) // MIB


def _read(machine: Machine, results: Results, reader: Container, wanted: int | None) -> None:
    """One row a path: bytes of the word. `wanted` None: a fact."""
    size = _sizes(machine)[1] * MIB
    for path in READABLE:
        seen = reader.request("count_word", path, size, WORD)
        text = f"{path}: bytes of the word in {size // MIB} MiB"
        if wanted is None:
            results.fact(text, seen["pattern_bytes"])
        else:
            results.check(text, wanted, seen["pattern_bytes"])
        results.fact(f"{path}: bytes that are not zero", seen["nonzero_bytes"])


def _other_process(machine: Machine, results: Results, ending: str) -> None:
    writer, reader = machine.container(), machine.container()
    results.fact("MiB written", _written(machine, writer))
    if ending == "exits":
        writer.end()
    elif ending == "is killed":
        writer.kill()
    else:
        writer.request("give", "sync")
    _read(machine, results, reader, 0)


def _same_process(machine: Machine, results: Results, key: str, wanted: int | None) -> None:
    container = machine.container(key)
    size = _sizes(machine)[1] * MIB
    for path in ("sync", "async", "pool trimmed"):
        container.request("fill", path, [size], 4 * size)
        container.request("write", path, WORD)
        if path == "sync":
            own = container.request("count_held", "sync", WORD)
            results.check("control: bytes of the word in a block it wrote itself", size, own["pattern_bytes"])
        container.request("give", path, path != "pool trimmed")
    _read(machine, results, container, wanted)


def _clearing(machine: Machine, results: Results, path: str, ending: str) -> None:
    """A process fills 4 GiB by one allocator and ends; the next one takes the whole GPU by it and counts the word in all of it."""
    written = (256 if machine.fake else 4096) * MIB
    block = (64 if machine.fake else 1024) * MIB
    writer = machine.container()
    writer.request("fill", path, [block], written)
    results.check("control: bytes written", written, writer.request("write", path, WORD))
    results.check(
        "control: bytes of the word that its process finds",
        written,
        writer.request("count_all", path, WORD, not machine.fake),
    )
    if ending == "is killed":
        writer.kill()
    else:
        writer.end()
    reader = machine.container()
    most = 512 * MIB if machine.fake else reader.request("info")[0] - LEAVE_MIB // 4 * MIB
    taken = reader.request("fill", path, [block, 32 * MIB], most)["taken"]
    results.fact("MiB of the GPU read", taken // MIB)
    seen = reader.request("count_all", path, WORD, not machine.fake)
    results.check("bytes of the word in them", 0, seen)


CASES: dict[str, Callable[[Machine, Results], None]] = {
    "the writer exits": lambda machine, results: _other_process(machine, results, "exits"),
    "the writer is killed": lambda machine, results: _other_process(machine, results, "is killed"),
    "the writer frees and stays": lambda machine, results: _other_process(machine, results, "frees and stays"),
    "within one process": lambda machine, results: _same_process(machine, results, "", None),
    "within one process, clear no": lambda machine, results: _same_process(
        machine, results, machine.grant(OWN_MIB, "clear no"), None
    ),
    "within one process, clear yes": lambda machine, results: _same_process(
        machine, results, machine.grant(OWN_MIB, "clear yes"), 0
    ),
    **{
        f"the whole GPU by {path}, the writer {ending}": lambda machine, results, path=path, ending=ending: _clearing(
            machine, results, path, ending
        )
        for path in CLEARED
        for ending in ("ends", "is killed")
    },
}


def run_case(machine: Machine, watch: Watcher, results: Results, name: str) -> None:
    """Between containers nothing may be left; within a process only `clear yes` promises that."""
    with results.one(PART, name):
        CASES[name](machine, results)
    machine.end_containers(keep=(watch.lines,))
