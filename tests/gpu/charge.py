"""What a process is charged beside what the GPU loses, for sizes from 1 byte to 3 MiB + 1 and counts from 1 to 1,000.

Each case is a container of its own. Charged is what is gone by cuMemGetInfo in the container; lost is what NVML outside counts for
it. Both are differences within the process, so its context is in neither. After 10,000 random allocations and frees the two are
compared once a second has passed, by which the arbiter has read NVML.
"""

from __future__ import annotations

from pathlib import Path

from tests.gpu.guard import status, stays
from tests.gpu.kit.machine import MIB, Container, Machine, Watcher
from tests.gpu.kit.results import Results

LIMIT_MIB = 16384
PAGE = 2 * MIB
OVER = 0.02
"""So much more than was lost may be charged, and one page. Specified."""
PART = "charge"
SIZES = (1, 512, 4096, 65537, 300_000, 700_000, MIB + 1, PAGE - 1, PAGE, PAGE + 1, 3 * MIB, 3 * MIB + 1)
COUNTS = (1, 10, 100, 1000)
PATHS = ("sync", "pitch", "array", "array 3D", "mipmapped array", "vmm", "async", "managed")
"""Managed memory is charged when it is requested and lost when it is touched; a pool is charged as it reserves."""
EXACT = ("sync", "pitch", "array", "array 3D", "mipmapped array")
CASES = (*PATHS, "random", "compressed modules", "libraries", "contexts beside managed memory")
MODULES = Path(__file__).parents[1] / "modules"
MODULE_MIB = 3072
LIBRARY_MIB = 3072
TWO_CONTEXTS_MIB = 2048
"""More than they take, and less than they and another library."""
OUT_OF_MEMORY = 2
MANAGED = 64 * MIB
"""Sixteen times: more than a further context takes."""
SETTLED_S = 5.0
"""Longer than a bound stands for what it was held for: it is settled a second after the call, by the next reading."""
SOON_S = 1.0
"""Specified: NVML's figure of the process is charged by then."""


def _figures(watch: Watcher, container: Container) -> tuple[int, int]:
    """What is free inside, what is used outside. Bytes."""
    return int(container.request("info")[0]), watch.now(container)


def _sequence(machine: Machine, watch: Watcher, results: Results, path: str) -> None:
    container = machine.container(machine.grant(LIMIT_MIB))
    for size in SIZES:
        for count in COUNTS:
            if size * count > LIMIT_MIB * MIB // 4:
                continue
            free_before, used_before = _figures(watch, container)
            codes = container.request("take", path, size, count)
            free_after, used_after = _figures(watch, container)
            charged, lost = free_before - free_after, used_after - used_before
            name = f"{count} x {size} B"
            results.fact(f"{name}: taken", codes.count(0))
            if path in EXACT:
                results.within(
                    f"{name}: charged, MiB", (lost - PAGE) / MIB, (lost * (1 + OVER) + PAGE) / MIB, charged / MIB
                )
            else:
                results.fact(f"{name}: charged, MiB", charged / MIB)
            results.fact(f"{name}: lost, MiB", lost / MIB)
            container.request("give", path)
    container.end()


def _random(machine: Machine, watch: Watcher, results: Results) -> None:
    """What is held at the end is held by nothing but linear memory."""
    container = machine.container(machine.grant(LIMIT_MIB))
    free_before, used_before = _figures(watch, container)
    results.fact("steps", container.request("scatter", 1, 10_000, 3 * MIB + 1, 2_000))
    free_after, used_after = _figures(watch, container)
    charged, lost = free_before - free_after, used_after - used_before
    results.within("charged, MiB", lost * (1 - OVER) / MIB - 32, lost * (1 + OVER) / MIB + 32, charged / MIB)
    results.fact("lost, MiB", lost / MIB)

    def is_charged() -> bool:
        free, used = _figures(watch, container)
        return free_before - free >= used - used_before - PAGE

    took_s = machine.wait_for(is_charged, "all that is lost to be charged", 5)
    results.at_most("seconds until no more than a page is missing", SOON_S, round(took_s, 2))
    container.end()


def _modules(machine: Machine, watch: Watcher, results: Results) -> None:
    """Variables that only the unpacked image shows are held before they are loaded."""
    for packing in ("lz4", "zstd"):
        path = str(MODULES / f"large-{packing}.fatbin")
        tight, wide = (machine.container(machine.grant(mib)) for mib in (MODULE_MIB, LIMIT_MIB))
        _, used_before = _figures(watch, tight)
        results.check(f"{packing}: refused beyond the limit", OUT_OF_MEMORY, tight.request("load", path))
        results.at_most(f"{packing}: lost by the refused, MiB", 0, (watch.now(tight) - used_before) / MIB)
        if machine.fake:
            results.not_run(f"{packing}: charged", "the fake driver gives a compressed module no memory")
            continue
        free_before, used_before = _figures(watch, wide)
        results.check(f"{packing}: loaded within the limit", 0, wide.request("load", path))
        free_after, used_after = _figures(watch, wide)
        lost = (used_after - used_before) / MIB
        results.fact(f"{packing}: lost, MiB", lost)
        results.within(f"{packing}: charged, MiB", lost - 2, lost * (1 + OVER) + 2, (free_before - free_after) / MIB)
        machine.end_containers(keep=(watch.lines,))


def _libraries(machine: Machine, watch: Watcher, results: Results) -> None:
    """Variables of a library come to each context that uses it."""
    container = machine.container(machine.grant(LIMIT_MIB))
    results.check("loaded", 0, container.request("library", LIBRARY_MIB))
    for context in ("first", "second"):
        free_before, used_before = _figures(watch, container)
        results.check(f"{context} context: used", 0, container.request("launch_kernel"))
        free_after, used_after = _figures(watch, container)
        results.fact(f"{context} context: lost, MiB", (used_after - used_before) / MIB)
        results.fact(f"{context} context: charged, MiB", (free_before - free_after) / MIB)
        if context == "first":
            results.check("a further context", 0, container.request("further_context"))
    container.end()
    tight = machine.container(machine.grant(TWO_CONTEXTS_MIB + LIBRARY_MIB))
    codes = [tight.request(*words) for words in (("library", LIBRARY_MIB), ("launch_kernel",), ("further_context",))]
    results.check("one within the limit", [0, 0, 0], codes)
    used_before = watch.now(tight)
    results.check("refused in the second context", OUT_OF_MEMORY, tight.request("launch_kernel"))
    results.at_most("lost by the refused, MiB", 2, (watch.now(tight) - used_before) / MIB)
    tight.end()


def _beside_managed(machine: Machine, watch: Watcher, results: Results) -> None:
    """NVML lists managed memory for no process. A context that is made beside it is charged all the same, when its bound is settled too."""
    container = machine.container(machine.grant(LIMIT_MIB))

    def contexts() -> int:
        return int(status(machine, container.key)["cards"][0]["context_bytes"])

    def stated() -> int:
        (process,) = status(machine, container.key)["processes"]
        return int(process["cards"][0]["managed_bytes"])

    used_before, contexts_before = watch.now(container), contexts()
    results.check("managed memory: taken", 16, container.request("take", "managed", MANAGED, 16).count(0))
    results.at_most("managed memory: listed, MiB", 0, (watch.now(container) - used_before) / MIB)
    machine.wait_for(lambda: stated() == 16 * MANAGED, "the process to state its managed memory", 5)
    results.check("a further context: made", 0, container.request("further_context"))
    grown = watch.now(container) - used_before
    results.fact("a further context: listed, MiB", grown / MIB)
    is_charged = stays(lambda: contexts() >= contexts_before + grown - PAGE, SETTLED_S)
    results.check(f"a further context: charged for {SETTLED_S:g} s", True, is_charged)
    charged = (contexts() - contexts_before) / MIB
    results.within("a further context: charged in the end, MiB", grown / MIB - 2, grown / MIB + 2, charged)
    container.end()


def run_case(machine: Machine, watch: Watcher, results: Results, name: str) -> None:
    """One row or more of the CSV."""
    others = {
        "random": _random, "compressed modules": _modules, "libraries": _libraries,
        "contexts beside managed memory": _beside_managed,
    }  # fmt: skip
    with results.one(PART, name):
        if name in others:
            others[name](machine, watch, results)
        else:
            _sequence(machine, watch, results, name)
    machine.end_containers(keep=(watch.lines,))
