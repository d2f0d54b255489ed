"""Every way to take GPU memory, against a grant: refused at the limit, not before, and never past it in the driver's own books.

Each case is a container of its own, held to LIMIT_MIB. Its process takes blocks of 256, 32 and 2 MiB until each is refused, so
that it stands at the brim; what it holds then is read from outside, by NVML, with its context. Managed memory is asked for in
small blocks like the rest: far more than a card has free can hang it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tests.gpu.kit import machine as m
from tests.gpu.kit.book import Book
from tests.gpu.kit.machine import MIB, Lines, Machine, Watcher

LIMIT_MIB = 8192
SLACK_MIB = 64
"""How far before the limit a refusal of 2 MiB may come, and how far views may differ. Guessed; the rows show the figure."""
ROOM_MIB = 192
"""Kept beside a context for its growth after its container is full: kernels that are first launched then. The arbiter's default."""
ROOM_SHARE = 16
"""All rooms together are at most this part of the limit. The arbiter's."""
UNNAMED_MIB = 64
"""What the driver takes on a card and names no process for. Measured: 5.6 MiB, and up to 45 with eight processes."""
LEASE_MIB = LIMIT_MIB // 32
"""What a process may have leased and not used: a block that it imported and does not map can hide in it. The library's."""
BLOCKS = [256 * MIB, 32 * MIB, 2 * MIB]
OUT_OF_MEMORY = 2
PART = "paths"

PATHS = (
    "sync", "pitch", "managed", "async", "async per-thread stream", "pool trimmed", "pool destroyed", "vmm",
    "vmm unmapped handles", "vmm mapped twice", "vmm export and import", "array", "array 3D", "mipmapped array",
    "graph memory node", "captured allocation",
)  # fmt: skip
CONTEXTS = ("primary", "primary, reset", "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4", "green")
BEFORE = ("libc.so.6", "libcuda.so.1", "libdl.so.2", "libc.so.6:libcuda.so.1")
"""In LD_PRELOAD, as tests/integration/shim/test_preload.py has it on the fake driver."""


def room_mib(limit_mib: int, contexts: int) -> float:
    """What may be kept beside so many contexts."""
    return min(ROOM_MIB * contexts, limit_mib / ROOM_SHARE)


class Stage:
    """What a case gets: the machine, its watcher, and a book to write in."""

    def __init__(self, machine: Machine, watch: Watcher, book: Book) -> None:
        self.machine, self.watch, self.book = machine, watch, book

    def begin(self) -> None:
        self.watch.ask("zero")

    def never_past(self, limit_mib: int, *tenants: Lines, shared: bool = False, hidden_mib: int = 0) -> None:
        """Rows on the peaks since `begin` of the one container that all are in. `shared`: the driver may count a block twice."""
        peak = self.watch.ask("peak", tenants[0].key)
        self.book.fact("samples of the driver's books", peak["samples"])
        self.book.check("samples without a figure, or failed", [0, 0], [peak["unknown"], peak["errors"]])
        total = peak["bytes"] / MIB
        if shared:
            self.book.fact("peak summed over processes in the driver's books, MiB", total)
        else:
            self.book.within("peak by process in the driver's books, MiB", 1, limit_mib, total)
            self.book.fact("MiB past the limit", max(0.0, total - limit_mib))
        most = limit_mib + UNNAMED_MIB + hidden_mib
        self.book.at_most("peak of the card by cuMemGetInfo outside, MiB", most, self.watch.device_peak() / MIB)

    def at_brim(self, limit_mib: int, *tenants: Lines) -> float:
        used = self.watch.now(*tenants) / MIB
        self.book.within(
            "in the driver's books at the refusal, MiB",
            limit_mib - SLACK_MIB - room_mib(limit_mib, len(tenants)),
            limit_mib,
            used,
        )
        return used

    def view(self, when: str, limit_mib: int, asker: m.Tenant, *tenants: Lines) -> None:
        """cuMemGetInfo inside agrees with NVML outside."""
        free, total = (number / MIB for number in asker.ask("info"))
        self.book.check(f"{when}: total by cuMemGetInfo, MiB", float(limit_mib), total)
        of = tenants or (asker,)
        left = limit_mib - self.watch.now(*of) / MIB
        least = max(0, left - SLACK_MIB - room_mib(limit_mib, len(of)))
        self.book.within(f"{when}: free by cuMemGetInfo, MiB", least, max(0, left) + SLACK_MIB, free)

    def refusals(self, codes: list[int]) -> None:
        self.book.check("CUresult of each refusal", [OUT_OF_MEMORY] * len(codes), codes)


def case_path(stage: Stage, path: str) -> None:
    """Fill, be refused, give back, take again."""
    tenant = stage.machine.tenant(stage.machine.grant(LIMIT_MIB))
    stage.view("at the start", LIMIT_MIB, tenant)
    for turn in ("first", "second"):
        filled = tenant.ask("fill", path, BLOCKS, (LIMIT_MIB + 1024) * MIB)
        stage.book.fact(f"{turn} fill, MiB", filled["taken"] // MIB)
        stage.refusals(filled["codes"])
        if path == "managed":  # it is charged when it is asked for, and in the driver's books when it is touched there
            least = LIMIT_MIB - SLACK_MIB - room_mib(LIMIT_MIB, 1)
            book, context = stage.book, stage.watch.now(tenant) / MIB
            book.within("asked for, and the context, MiB", least, LIMIT_MIB, filled["taken"] / MIB + context)
        else:
            stage.at_brim(LIMIT_MIB, tenant)
            stage.view(f"{turn} brim", LIMIT_MIB, tenant)
        tenant.ask("give", path)
    stage.view("given back", LIMIT_MIB, tenant)
    stage.never_past(LIMIT_MIB, tenant)
    stage.book.check("cuMemFree, cuMemFreeAsync of unknown pointers", [1, 1], tenant.ask("free_unknown"))


def case_context(stage: Stage, way: str) -> None:
    """The context counts, and ending it frees what it held."""
    tenant = stage.machine.tenant(stage.machine.grant(LIMIT_MIB), way)
    used = stage.watch.now(tenant) / MIB
    stage.book.fact("the context in the driver's books, MiB", used)
    first = tenant.ask("fill", "sync", BLOCKS)
    stage.refusals(first["codes"])
    stage.at_brim(LIMIT_MIB, tenant)
    tenant.ask("end_context")
    stage.book.check("a new context after its end", 0, tenant.ask("start", way))
    left = LIMIT_MIB - stage.watch.now(tenant) / MIB
    stage.book.fact("left after its end, MiB", left)
    second = tenant.ask("fill", "sync", BLOCKS)
    low, high = max(0.0, left - SLACK_MIB - room_mib(LIMIT_MIB, 1)), max(0.0, left)
    stage.book.within("MiB taken again without a free", low, high, second["taken"] / MIB)
    stage.never_past(LIMIT_MIB, tenant)


def case_pool_keeps(stage: Stage) -> None:
    """What a pool keeps is not free, until it is trimmed: by the program, or by the library when it needs room."""
    tenant = stage.machine.tenant(stage.machine.grant(LIMIT_MIB))
    left = tenant.ask("info")[0] / MIB
    tenant.ask("fill", "pool trimmed", [256 * MIB], LIMIT_MIB * MIB // 2)
    tenant.ask("give", "pool trimmed", False)
    kept = tenant.ask("pool_reserved", "pool trimmed") / MIB
    stage.book.fact("reserved by the pool after all was freed, MiB", kept)
    stage.view("kept", LIMIT_MIB, tenant)
    filled = tenant.ask("fill", "sync", BLOCKS)
    stage.refusals(filled["codes"])
    stage.at_brim(LIMIT_MIB, tenant)
    tenant.ask("settle", "pool trimmed")
    more = tenant.ask("fill", "sync", BLOCKS)
    both = (filled["taken"] + more["taken"]) / MIB
    stage.book.within(
        "MiB to be had, if need be after a trim", left - SLACK_MIB - room_mib(LIMIT_MIB, 1), left + SLACK_MIB, both
    )
    stage.never_past(LIMIT_MIB, tenant)


def case_mixed(stage: Stage) -> None:
    """All paths at once, in random order, in three processes of one container."""
    key = stage.machine.grant(LIMIT_MIB)
    tenants = [stage.machine.tenant(key) for _ in range(3)]
    for seed, tenant in enumerate(tenants):
        tenant.send("churn", seed, 400, 512)
    counts = [tenant.finish("churn") for tenant in tenants]
    for name in ("taken", "refused"):
        stage.book.check(name, "> 0", sum(count[name] for count in counts), sum(count[name] for count in counts) > 0)
    stage.book.check("answered otherwise", 0, sum(count["other"] for count in counts))
    stage.never_past(LIMIT_MIB, *tenants)


def case_racers(stage: Stage) -> None:
    """Eight processes race for the last MiB."""
    key = stage.machine.grant(LIMIT_MIB)
    tenants = [stage.machine.tenant(key) for _ in range(8)]
    for tenant in tenants:
        tenant.send("fill", "sync", [32 * MIB, 2 * MIB])
    stage.refusals([code for tenant in tenants for code in tenant.finish("fill")["codes"]])
    stage.at_brim(LIMIT_MIB, *tenants)
    stage.never_past(LIMIT_MIB, *tenants)


def case_killed(stage: Stage) -> None:
    """kill -9 of a process that holds everything: a sibling has it."""
    key = stage.machine.grant(LIMIT_MIB)
    sibling, victim = stage.machine.tenant(key), stage.machine.tenant(key)
    victim.ask("fill", "sync", BLOCKS)
    refused = sibling.ask("take", "sync", 256 * MIB)
    stage.book.check("the sibling before", [OUT_OF_MEMORY], refused)
    stage.never_past(LIMIT_MIB, sibling, victim)
    victim.kill()
    took = m.Machine.wait_for(lambda: sibling.ask("take", "sync", 256 * MIB) == [0], "256 MiB for the sibling", 20)
    stage.book.at_most("seconds until the sibling has 256 MiB", 3.0, round(took, 3))
    sibling.ask("fill", "sync", BLOCKS)
    stage.at_brim(LIMIT_MIB, sibling)


def case_ipc(stage: Stage) -> None:
    """A block opened by a second process of the container."""
    key = stage.machine.grant(LIMIT_MIB)
    owner, user = stage.machine.tenant(key), stage.machine.tenant(key)
    owner.ask("fill", "sync", [2048 * MIB], 2048 * MIB)
    before = user.ask("info")[0]
    stage.book.check("cuIpcOpenMemHandle", 0, user.ask("ipc_open", owner.ask("ipc_get")))
    cost = (before - user.ask("info")[0]) / MIB
    stage.book.fact("MiB charged for a block of 2048 opened beside its owner", cost)
    user.ask("fill", "sync", BLOCKS)
    stage.never_past(LIMIT_MIB, owner, user, shared=True)
    stage.book.check("cuIpcCloseMemHandle", 0, user.ask("ipc_close"))


def case_shared_handle(stage: Stage, maps: bool) -> None:
    """A VMM block passed by descriptor to a second process of the container, and held by it alone in the end."""
    key = stage.machine.grant(LIMIT_MIB)
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(ours)
        stack.enter_context(theirs)
        owner = stage.machine.tenant(key, fds=(ours.fileno(),))
        user = stage.machine.tenant(key, fds=(theirs.fileno(),))
        owner.ask("export_fd", ours.fileno(), 2048 * MIB)
        before = user.ask("info")[0]
        stage.book.check("CUresult of the import", 0, user.ask("import_fd", theirs.fileno(), 2048 * MIB, maps))
    stage.book.fact("MiB charged for a block of 2048 imported beside its owner", (before - user.ask("info")[0]) // MIB)
    owner.ask("release_shared")
    user.ask("fill", "sync", BLOCKS)
    stage.never_past(LIMIT_MIB, owner, user, shared=True, hidden_mib=0 if maps else LEASE_MIB)
    user.ask("release_shared")
    took = m.Machine.wait_for(lambda: user.ask("take", "sync", 256 * MIB) == [0], "room after the last release", 20)
    stage.book.at_most("seconds until there is room after the last release", 5.0, round(took, 3))
    more = 256 + user.ask("fill", "sync", BLOCKS)["taken"] / MIB
    stage.book.within(
        "MiB to be had after the last release", 2048 - SLACK_MIB - room_mib(LIMIT_MIB, 2), 2048 + SLACK_MIB, more
    )


def case_too_small(stage: Stage) -> None:
    """A context that does not fit in its container is refused, once it is known what one takes."""
    known = stage.machine.tenant(stage.machine.grant(LIMIT_MIB))
    context = stage.watch.now(known) / MIB
    small = stage.machine.tenant(stage.machine.grant(64), way="")
    code = small.ask("start", "primary")
    used = stage.watch.now(small) / MIB
    stage.book.check(f"a context of {context:.0f} MiB in a container of 64", OUT_OF_MEMORY, code)
    stage.book.at_most("in the driver's books, MiB", 64, used)


def case_route(stage: Stage, route: str, before: str = "") -> None:
    """A C program that reaches the driver by this route: 9 x 1 GiB by each of five paths, fewer than 8 fit beside a context.

    `before` is what LD_PRELOAD names before the library, as the image of a container may.
    """
    key = stage.machine.grant(LIMIT_MIB)
    preload = ":".join(filter(None, (before, stage.machine.preload)))
    program = stage.machine.probe(route)
    for path in ("alloc", "async", "pool", "create", "managed"):
        lines = ["use 0", *[f"{path} {1024 * MIB} 0"] * 9, "info", "total 0", "free 123456"]
        said = stage.machine.output([str(program)], key, "\n".join(lines) + "\n", LD_PRELOAD=preload).splitlines()
        codes = [int(line.split()[0]) for line in said[:10]]
        stage.book.check(f"{path}: CUresults", [0] * 8 + [OUT_OF_MEMORY] * 2, codes)
        stage.book.check(f"{path}: cuMemGetInfo total, bytes", str(LIMIT_MIB * MIB), said[10].split()[2])
        stage.book.check(f"{path}: cuDeviceTotalMem, bytes", f"0 {LIMIT_MIB * MIB}", said[11])
        stage.book.check(f"{path}: cuMemFree of an unknown pointer", "1", said[12])


def cases() -> Iterator[tuple[str, Callable[[Stage], None]]]:
    """(name, what to do), likeliest to matter first."""
    for path in PATHS:
        yield path, lambda stage, path=path: case_path(stage, path)  # type: ignore[misc]
    for way in CONTEXTS:
        yield f"context {way}", lambda stage, way=way: case_context(stage, way)  # type: ignore[misc]
    for route in ("direct", "dlsym", "procaddr"):
        yield f"route {route}", lambda stage, route=route: case_route(stage, route)  # type: ignore[misc]
    for before in BEFORE:
        yield f"{before} named before the library", lambda stage, before=before: case_route(stage, "dlsym", before)  # type: ignore[misc]
    yield "a pool keeps what is freed", case_pool_keeps
    yield "eight processes race", case_racers
    yield "killed while it holds all", case_killed
    yield "all paths mixed", case_mixed
    yield "IPC in one container", case_ipc
    yield "shareable handle, mapped", lambda stage: case_shared_handle(stage, maps=True)
    yield "shareable handle, never mapped", lambda stage: case_shared_handle(stage, maps=False)
    yield "a container smaller than a context", case_too_small


def run_case(machine: Machine, watch: Watcher, book: Book, name: str, case: Callable[[Stage], None]) -> None:
    stage = Stage(machine, watch, book)
    with book.one(PART, name):
        stage.begin()
        case(stage)
    machine.end_tenants(keep=(watch.lines,))
    gone = [pid for pid in watch.ask("now")["processes"] if int(pid) != watch.lines.pid]
    if gone:
        machine.wait_for(
            lambda: len(watch.ask("now")["processes"]) <= 1, f"processes {gone} to leave the card after {name}", 15
        )
