"""What the driver leaves of one process's data in the memory that the next one gets, by every path that can be read.

A process without the library fills most of the card with a word and exits, is killed, or frees and stays. Another then takes a
block by each path, all held at once so that each is other memory, and counts the word before it writes anything. The same is
asked within one process, whose own data the driver may hand back, with and without `clear yes` in its grant.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu.kit.book import Book
from tests.gpu.kit.machine import MIB, Machine, Tenant, Watcher

PART = "leftovers"
WORD = 0x7A3C5E91
READABLE = (
    "sync", "pitch", "managed, unwritten", "async", "async per-thread stream", "pool trimmed", "vmm", "vmm unmapped handles",
    "array", "graph memory node",
)  # fmt: skip
LEAVE_MIB = 6144
"""Of the card, for the contexts: what the reader then takes is at least partly what the writer had."""

OWN_MIB = 32768
"""Grant of a process that reads its own."""


def _sizes(machine: Machine) -> tuple[int, int]:
    """(MiB the writer fills at most, MiB of each block read). The fake driver keeps data in the machine's own memory."""
    return (1024, 64) if machine.fake else (1 << 20, 1024)


def _written(machine: Machine, writer: Tenant) -> int:
    """Fills the card; MiB."""
    most, _ = _sizes(machine)
    room = writer.ask("info")[0] // MIB - LEAVE_MIB
    block = min(64 if machine.fake else 1024, max(room, 2))
    writer.ask("fill", "sync", [block * MIB], min(most, room) * MIB)
    return int(writer.ask("write", "sync", WORD)) // MIB


def _read(machine: Machine, book: Book, reader: Tenant, wanted: int | None) -> None:
    """One row a path: bytes of the word. `wanted` None: a fact."""
    size = _sizes(machine)[1] * MIB
    for path in READABLE:
        seen = reader.ask("count_word", path, size, WORD)
        text = f"{path}: bytes of the word in {size // MIB} MiB"
        if wanted is None:
            book.fact(text, seen["pattern_bytes"])
        else:
            book.check(text, wanted, seen["pattern_bytes"])
        book.fact(f"{path}: bytes that are not zero", seen["nonzero_bytes"])


def _other_process(machine: Machine, book: Book, ending: str) -> None:
    writer, reader = machine.tenant(), machine.tenant()
    book.fact("MiB written", _written(machine, writer))
    if ending == "exits":
        writer.end()
    elif ending == "is killed":
        writer.kill()
    else:
        writer.ask("give", "sync")
    _read(machine, book, reader, 0)


def _same_process(machine: Machine, book: Book, key: str, wanted: int | None) -> None:
    tenant = machine.tenant(key)
    size = _sizes(machine)[1] * MIB
    for path in ("sync", "async", "pool trimmed"):
        tenant.ask("fill", path, [size], 4 * size)
        tenant.ask("write", path, WORD)
        if path == "sync":
            own = tenant.ask("count_held", "sync", WORD)
            book.check("control: bytes of the word in a block it wrote itself", size, own["pattern_bytes"])
        tenant.ask("give", path, path != "pool trimmed")
    _read(machine, book, tenant, wanted)


CASES: dict[str, Callable[[Machine, Book], None]] = {
    "the writer exits": lambda machine, book: _other_process(machine, book, "exits"),
    "the writer is killed": lambda machine, book: _other_process(machine, book, "is killed"),
    "the writer frees and stays": lambda machine, book: _other_process(machine, book, "frees and stays"),
    "within one process": lambda machine, book: _same_process(machine, book, "", None),
    "within one process, clear no": lambda machine, book: _same_process(
        machine, book, machine.grant(OWN_MIB, "clear no"), None
    ),
    "within one process, clear yes": lambda machine, book: _same_process(
        machine, book, machine.grant(OWN_MIB, "clear yes"), 0
    ),
}


def run_case(machine: Machine, watch: Watcher, book: Book, name: str) -> None:
    """Between tenants nothing may be left; within a process only `clear yes` promises that."""
    with book.one(PART, name):
        CASES[name](machine, book)
    machine.end_tenants(keep=(watch.lines,))
