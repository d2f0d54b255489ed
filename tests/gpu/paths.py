"""Every way to take GPU memory, against a grant: refused at the limit, not before, and never past it in the driver's own records.

Each case is a container of its own, held to LIMIT_MIB. Its process takes blocks of 256, 32 and 2 MiB until each is refused, so
that it stands at the brim; what it has then is read from outside, by NVML, with its context. Managed memory is requested in
small blocks like the rest: far more than a GPU has free can hang it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tests.gpu.kit import machine as m
from tests.gpu.kit.machine import MIB, Lines, Machine, Watcher
from tests.gpu.kit.results import Results

LIMIT_MIB = 8192
SLACK_MIB = 64
"""How far before the limit a refusal of 2 MiB may come, and how far views may differ. Guessed; the rows show the figure."""
ROOM_MIB = 192
"""Kept beside a context for its growth after its container is full: kernels that are first launched then. The arbiter's default."""
ROOM_SHARE = 16
"""All rooms together are at most this part of the limit. The arbiter's."""
UNNAMED_MIB = 64
"""What the driver takes on a GPU and names no process for. Measured: 5.6 MiB, and up to 45 with eight processes."""
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

    def __init__(self, machine: Machine, watch: Watcher, results: Results) -> None:
        self.machine, self.watch, self.results = machine, watch, results

    def begin(self) -> None:
        self.watch.request("zero")

    def never_past(self, limit_mib: int, *containers: Lines, shared: bool = False, hidden_mib: int = 0) -> None:
        """Rows on the peaks since `begin` of the one container that all are in. `shared`: the driver may count a block twice."""
        peak = self.watch.request("peak", containers[0].key)
        self.results.fact("samples of the driver's records", peak["samples"])
        self.results.check("samples without a figure, or failed", [0, 0], [peak["unknown"], peak["errors"]])
        total = peak["bytes"] / MIB
        if shared:
            self.results.fact("peak summed over processes in the driver's records, MiB", total)
        else:
            self.results.within("peak by process in the driver's records, MiB", 1, limit_mib, total)
            self.results.fact("MiB past the limit", max(0.0, total - limit_mib))
        most = limit_mib + UNNAMED_MIB + hidden_mib
        self.results.at_most("peak of the GPU by cuMemGetInfo outside, MiB", most, self.watch.device_peak() / MIB)

    def at_brim(self, limit_mib: int, *containers: Lines) -> float:
        used = self.watch.now(*containers) / MIB
        self.results.within(
            "in the driver's records at the refusal, MiB",
            limit_mib - SLACK_MIB - room_mib(limit_mib, len(containers)),
            limit_mib,
            used,
        )
        return used

    def view(self, when: str, limit_mib: int, asker: m.Container, *containers: Lines) -> None:
        """cuMemGetInfo inside agrees with NVML outside."""
        free, total = (number / MIB for number in asker.request("info"))
        self.results.check(f"{when}: total by cuMemGetInfo, MiB", float(limit_mib), total)
        of = containers or (asker,)
        left = limit_mib - self.watch.now(*of) / MIB
        least = max(0, left - SLACK_MIB - room_mib(limit_mib, len(of)))
        self.results.within(f"{when}: free by cuMemGetInfo, MiB", least, max(0, left) + SLACK_MIB, free)

    def elastic(self, container: m.Container, path: str = "sync") -> None:
        """With bursts: a row on how much of what a path has is elastic."""
        if self.machine.burst:
            counted = container.request("elastic_bytes", path)
            self.results.fact("elastic memory, MiB", counted["elastic"] / MIB)
            self.results.fact("memory that has addresses, MiB", counted["counted"] / MIB)

    def refusals(self, codes: list[int]) -> None:
        self.results.check("CUresult of each refusal", [OUT_OF_MEMORY] * len(codes), codes)


def case_path(stage: Stage, path: str) -> None:
    """Fill, be refused, give back, take again."""
    container = stage.machine.container(stage.machine.grant(LIMIT_MIB))
    stage.view("at the start", LIMIT_MIB, container)
    for which in ("first", "second"):
        filled = container.request("fill", path, BLOCKS, (LIMIT_MIB + 1024) * MIB)
        stage.results.fact(f"{which} fill, MiB", filled["taken"] // MIB)
        stage.refusals(filled["codes"])
        if (
            path == "managed"
        ):  # it is charged when it is requested, and in the driver's records when it is touched there
            least = LIMIT_MIB - SLACK_MIB - room_mib(LIMIT_MIB, 1)
            results, context = stage.results, stage.watch.now(container) / MIB
            results.within("requested, and the context, MiB", least, LIMIT_MIB, filled["taken"] / MIB + context)
        else:
            stage.at_brim(LIMIT_MIB, container)
            stage.view(f"{which} brim", LIMIT_MIB, container)
        stage.elastic(container, path)
        container.request("give", path)
    stage.view("given back", LIMIT_MIB, container)
    stage.never_past(LIMIT_MIB, container)
    stage.results.check("cuMemFree, cuMemFreeAsync of unknown pointers", [1, 1], container.request("free_unknown"))


def case_context(stage: Stage, way: str) -> None:
    """The context counts, and ending it frees what it held."""
    container = stage.machine.container(stage.machine.grant(LIMIT_MIB), way)
    used = stage.watch.now(container) / MIB
    stage.results.fact("the context in the driver's records, MiB", used)
    first = container.request("fill", "sync", BLOCKS)
    stage.refusals(first["codes"])
    stage.at_brim(LIMIT_MIB, container)
    stage.elastic(container)
    container.request("end_context")
    stage.results.check("a new context after its end", 0, container.request("start", way))
    left = LIMIT_MIB - stage.watch.now(container) / MIB
    stage.results.fact("left after its end, MiB", left)
    second = container.request("fill", "sync", BLOCKS)
    low, high = max(0.0, left - SLACK_MIB - room_mib(LIMIT_MIB, 1)), max(0.0, left)
    stage.results.within("MiB taken again without a free", low, high, second["taken"] / MIB)
    stage.never_past(LIMIT_MIB, container)


def case_pool_keeps(stage: Stage) -> None:
    """What a pool keeps is not free, until it is trimmed: by the program, or by the library when it needs memory."""
    container = stage.machine.container(stage.machine.grant(LIMIT_MIB))
    left = container.request("info")[0] / MIB
    container.request("fill", "pool trimmed", [256 * MIB], LIMIT_MIB * MIB // 2)
    container.request("give", "pool trimmed", False)
    kept = container.request("pool_reserved", "pool trimmed") / MIB
    stage.results.fact("reserved by the pool after all was freed, MiB", kept)
    stage.view("kept", LIMIT_MIB, container)
    filled = container.request("fill", "sync", BLOCKS)
    stage.refusals(filled["codes"])
    stage.at_brim(LIMIT_MIB, container)
    container.request("settle", "pool trimmed")
    more = container.request("fill", "sync", BLOCKS)
    both = (filled["taken"] + more["taken"]) / MIB
    stage.results.within(
        "MiB to be had, if need be after a trim", left - SLACK_MIB - room_mib(LIMIT_MIB, 1), left + SLACK_MIB, both
    )
    stage.never_past(LIMIT_MIB, container)


def case_mixed(stage: Stage) -> None:
    """All paths at once, in random order, in three processes of one container."""
    key = stage.machine.grant(LIMIT_MIB)
    containers = [stage.machine.container(key) for _ in range(3)]
    for seed, container in enumerate(containers):
        container.send("churn", seed, 400, 512)
    counts = [container.finish("churn") for container in containers]
    for name in ("taken", "refused"):
        stage.results.check(name, "> 0", sum(count[name] for count in counts), sum(count[name] for count in counts) > 0)
    stage.results.check("answered otherwise", 0, sum(count["other"] for count in counts))
    stage.never_past(LIMIT_MIB, *containers)


def case_racers(stage: Stage) -> None:
    """Eight processes race for the last MiB."""
    key = stage.machine.grant(LIMIT_MIB)
    containers = [stage.machine.container(key) for _ in range(8)]
    for container in containers:
        container.send("fill", "sync", [32 * MIB, 2 * MIB])
    stage.refusals([code for container in containers for code in container.finish("fill")["codes"]])
    stage.at_brim(LIMIT_MIB, *containers)
    stage.never_past(LIMIT_MIB, *containers)


def case_killed(stage: Stage) -> None:
    """kill -9 of a process that has everything: a sibling has it."""
    key = stage.machine.grant(LIMIT_MIB)
    sibling, victim = stage.machine.container(key), stage.machine.container(key)
    victim.request("fill", "sync", BLOCKS)
    refused = sibling.request("take", "sync", 256 * MIB)
    stage.results.check("the sibling before", [OUT_OF_MEMORY], refused)
    stage.never_past(LIMIT_MIB, sibling, victim)
    victim.kill()
    took = m.Machine.wait_for(lambda: sibling.request("take", "sync", 256 * MIB) == [0], "256 MiB for the sibling", 20)
    stage.results.at_most("seconds until the sibling has 256 MiB", 3.0, round(took, 3))
    sibling.request("fill", "sync", BLOCKS)
    stage.at_brim(LIMIT_MIB, sibling)
    stage.elastic(sibling)


def case_ipc(stage: Stage) -> None:
    """A block opened by a second process of the container."""
    key = stage.machine.grant(LIMIT_MIB)
    owner, user = stage.machine.container(key), stage.machine.container(key)
    owner.request("fill", "sync", [2048 * MIB], 2048 * MIB)
    before = user.request("info")[0]
    stage.results.check("cuIpcOpenMemHandle", 0, user.request("ipc_open", owner.request("ipc_get")))
    cost = (before - user.request("info")[0]) / MIB
    stage.results.fact("MiB charged for a block of 2048 opened beside its owner", cost)
    user.request("fill", "sync", BLOCKS)
    stage.never_past(LIMIT_MIB, owner, user, shared=True)
    stage.results.check("cuIpcCloseMemHandle", 0, user.request("ipc_close"))


def case_shared_handle(stage: Stage, maps: bool) -> None:
    """A VMM block passed by descriptor to a second process of the container, and held by it alone in the end."""
    key = stage.machine.grant(LIMIT_MIB)
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(ours)
        stack.enter_context(theirs)
        owner = stage.machine.container(key, fds=(ours.fileno(),))
        user = stage.machine.container(key, fds=(theirs.fileno(),))
        owner.request("export_fd", ours.fileno(), 2048 * MIB)
        before = user.request("info")[0]
        stage.results.check("CUresult of the import", 0, user.request("import_fd", theirs.fileno(), 2048 * MIB, maps))
    stage.results.fact(
        "MiB charged for a block of 2048 imported beside its owner", (before - user.request("info")[0]) // MIB
    )
    owner.request("release_shared")
    user.request("fill", "sync", BLOCKS)
    stage.never_past(LIMIT_MIB, owner, user, shared=True, hidden_mib=0 if maps else LEASE_MIB)
    user.request("release_shared")
    took = m.Machine.wait_for(
        lambda: user.request("take", "sync", 256 * MIB) == [0], "free memory after the last release", 20
    )
    stage.results.at_most("seconds until there is room after the last release", 5.0, round(took, 3))
    more = 256 + user.request("fill", "sync", BLOCKS)["taken"] / MIB
    stage.results.within(
        "MiB to be had after the last release", 2048 - SLACK_MIB - room_mib(LIMIT_MIB, 2), 2048 + SLACK_MIB, more
    )


def case_too_small(stage: Stage) -> None:
    """A context that does not fit in its container is refused, once it is known what one takes."""
    known = stage.machine.container(stage.machine.grant(LIMIT_MIB))
    context = stage.watch.now(known) / MIB
    small = stage.machine.container(stage.machine.grant(64), way="")
    code = small.request("start", "primary")
    used = stage.watch.now(small) / MIB
    stage.results.check(f"a context of {context:.0f} MiB in a container of 64", OUT_OF_MEMORY, code)
    stage.results.at_most("in the driver's records, MiB", 64, used)


def case_route(stage: Stage, route: str, before: str = "") -> None:
    """A C program that reaches the driver by this route: 9 x 1 GiB by each of five paths, fewer than 8 fit beside a context.

    `before` is what LD_PRELOAD names before the library, as the image of a container may.
    """
    key = stage.machine.grant(LIMIT_MIB)
    preload = ":".join(filter(None, (before, stage.machine.preload)))
    program = stage.machine.probe(route)
    for path in ("alloc", "async", "pool", "create", "managed"):
        lines = ["use 0", *[f"{path} {1024 * MIB} 0"] * 9, "info", "total 0", "free 123456"]
        output = stage.machine.output([str(program)], key, "\n".join(lines) + "\n", LD_PRELOAD=preload).splitlines()
        codes = [int(line.split()[0]) for line in output[:10]]
        stage.results.check(f"{path}: CUresults", [0] * 8 + [OUT_OF_MEMORY] * 2, codes)
        stage.results.check(f"{path}: cuMemGetInfo total, bytes", str(LIMIT_MIB * MIB), output[10].split()[2])
        stage.results.check(f"{path}: cuDeviceTotalMem, bytes", f"0 {LIMIT_MIB * MIB}", output[11])
        stage.results.check(f"{path}: cuMemFree of an unknown pointer", "1", output[12])


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
    yield "killed while it has all", case_killed
    yield "all paths mixed", case_mixed
    yield "IPC in one container", case_ipc
    yield "shareable handle, mapped", lambda stage: case_shared_handle(stage, maps=True)
    yield "shareable handle, never mapped", lambda stage: case_shared_handle(stage, maps=False)
    yield "a container smaller than a context", case_too_small


def run_case(machine: Machine, watch: Watcher, results: Results, name: str, case: Callable[[Stage], None]) -> None:
    stage = Stage(machine, watch, results)
    with results.one(PART, name):
        stage.begin()
        case(stage)
    machine.end_containers(keep=(watch.lines,))
    stay = {watch.lines.pid, *machine.served_by}

    def others() -> list[int]:
        return [pid for pid in map(int, watch.request("now")["processes"]) if pid not in stay]

    if gone := others():
        machine.wait_for(lambda: not others(), f"processes {gone} to leave the GPU after {name}", 15)
