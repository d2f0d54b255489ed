"""Two GPUs in one process: what the driver answers for plain memory, and that elastic memory answers the same, also after it was swapped out.

The driver is asked first, without the library; a container that may burst on both GPUs then has to answer the same. Rows of `DIFFERS` are those in which
elastic memory is known to need access where plain memory needs none. Each kernel that may fail has a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from tests.gpu.kit import burst
from tests.gpu.kit.machine import MIB, Container, Machine, machine
from tests.gpu.kit.results import NotRun, Results

PART: Final = "peers"
ILLEGAL_ADDRESS: Final = 700
COPIES: Final = (
    "cuMemcpy",
    "cuMemcpyDtoD",
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyPeer",
    "cuMemcpy2D",
    "cuMemcpy2DUnaligned",
    "cuMemcpy2DAsync",
    "cuMemcpy3D",
    "cuMemcpy3DAsync",
    "a graph of cuMemcpyAsync",
)
HOST: Final = (
    "cuMemcpyHtoD",
    "cuMemcpy from the host",
    "cuMemcpy2D from the host",
    "cuMemcpyDtoH",
    "cuMemcpyHtoDAsync",
    "cuMemsetD8",
)
DIFFERS: Final = {
    r"^a graph of": "nodes of graphs need access",
    r"^(cuMemcpyHtoDAsync|cuMemsetD8)": "in a stream of another GPU it needs access",
}
"""Row -> why, where elastic memory may answer otherwise."""
CODES: Final = {
    "disabled before": 705, "flags 1": 1, "its own context": 217, "no context": 201, "enabled": 0, "a second time": 704, "disabled": 0,
    "disabled again": 705, "another context of that device": 0,
}  # fmt: skip
"""cuda.h; the last one follows from it. Measured against it, two H200 with driver 580.159.04: a context's access to itself is not supported (217)."""
GUARANTEE_MIB, FAKE_GUARANTEE_MIB = 1280, 64
"""Of a container that takes turns: as bench/memory_swap/swap_node.py has it."""
BLOCK_MIB, FAKE_BLOCK_MIB = 4096, 192
"""Of elastic memory on each GPU: two containers with one each do not fit beside the ballast, whatever their contexts take."""
SPARE_MIB, FAKE_SPARE_MIB = 640, 20
"""Beyond what one of two containers needs."""
POOL_MIB: Final = 8192
FAKE_POOL_MIB: Final = 512
FAKE_OPTIONS: Final = "memory_mib=1024 context_mib=16"


def _begun(here: Machine, results: Results, *, elastic: bool, both: bool = True) -> Container:
    """A process with contexts on two GPUs. NotRun if they cannot access each other and that is needed, or it has no elastic memory."""
    if not elastic:
        made = here.container(way="")
    else:
        guarantee = FAKE_GUARANTEE_MIB if here.fake else GUARANTEE_MIB
        made = here.container(
            here.grant(guarantee, burst_mib=guarantee + 4 * (FAKE_BLOCK_MIB if here.fake else BLOCK_MIB), gpus=2),
            way="",
        )
    can = made.request("peers_begin")
    if both and can != [1, 1]:
        raise NotRun(f"cuDeviceCanAccessPeer answers {can}")
    if elastic:
        Machine.wait_for(
            lambda: made.request("peers_elastic", made.request("peers_take", 1, "plain", 2 * MIB)), "elastic memory", 20
        )
    return made


def _compare(
    here: Machine,
    results: Results,
    row: str,
    request: Callable[[Container], Any],
    wanted: Any = None,
    *,
    both: bool = True,
) -> None:
    """The driver's answer, which is `wanted` where that is not None, and that of elastic memory."""
    native = _begun(here, results, elastic=False, both=both)
    seen = request(native)
    native.kill()
    if wanted is None:
        results.fact(f"the driver: {row}", seen)
    else:
        results.check(f"the driver: {row}", wanted, seen)
    container = _begun(here, results, elastic=True, both=both)
    ours = request(container)
    container.kill()
    why = next((text for pattern, text in DIFFERS.items() if re.search(pattern, row)), "")
    if why and ours != seen:
        results.fact(f"elastic: {row}", f"{ours}: {why}")
    else:
        results.check(f"elastic: {row}", seen, ours)


def case_codes(here: Machine, results: Results) -> None:
    """Error codes of enabling and disabling."""
    native, container = _begun(here, results, elastic=False), _begun(here, results, elastic=True)
    ours = container.request("peers_codes")
    for row, seen in native.request("peers_codes").items():
        results.check(f"the driver: {row}", CODES[row], seen)
        results.check(f"elastic: {row}", seen, ours[row])


def _with_access(one: Container, *, before: bool) -> list[int]:
    """A kernel of GPU 0 on memory of GPU 1, which was allocated before or after access was enabled: CUresult, wrong cells."""
    at = one.request("peers_take", 1, "plain") if before else 0
    code = one.request("peers_enable", 0)
    at = at or one.request("peers_take", 1, "plain")
    code = code or one.request("peers_kernel", 0, at)
    return [code, one.request("peers_wrong", 1, at, 7)]


def _without(one: Container, kind: str, *, first: bool) -> int:
    """The same kernel, after access was taken away again (`first`: it was there), or never was."""
    at = one.request("peers_take", 1, kind)
    if first:
        one.request("peers_enable", 0)
        one.request("peers_kernel", 0, at)
        one.request("peers_disable", 0)
    return int(one.request("peers_kernel", 0, at))


def case_kernels(here: Machine, results: Results) -> None:
    """A kernel of one GPU on the other's memory."""
    _compare(here, results, "memory from before access was enabled", lambda one: _with_access(one, before=True), [0, 0])
    _compare(here, results, "memory from after it", lambda one: _with_access(one, before=False), [0, 0])
    _compare(
        here, results, "access was never enabled", lambda one: _without(one, "plain", first=False), ILLEGAL_ADDRESS
    )
    _compare(here, results, "access was disabled", lambda one: _without(one, "plain", first=True), ILLEGAL_ADDRESS)


def _own_access(one: Container, kind: str, flags: list[int]) -> list[int]:
    """Memory with an access of its own: CUresults of setting it, one after the other, and then of a kernel of GPU 0 on memory of GPU 1."""
    at = one.request("peers_take", 1, kind)
    call = (
        (lambda flag: one.request("peers_set_pool", 1, 0, flag))
        if kind == "pool"
        else (lambda flag: one.request("peers_set", at, 0, flag))
    )
    return [*map(call, flags), one.request("peers_kernel", 0, at)]


def case_own_access(here: Machine, results: Results) -> None:
    """Memory of pools, and of cuMemCreate."""
    for kind in ("pool", "created"):
        _compare(here, results, f"{kind}: opened", lambda one, kind=kind: _own_access(one, kind, [3]), [0, 0])
        _compare(
            here,
            results,
            f"{kind}: opened and closed",
            lambda one, kind=kind: _own_access(one, kind, [3, 0]),
            [0, 0, ILLEGAL_ADDRESS],
        )
        _compare(
            here,
            results,
            f"{kind}: enabled by cuCtxEnablePeerAccess alone",
            lambda one, kind=kind: one.request("peers_enable", 0) or _without(one, kind, first=False),
        )


def case_copies(here: Machine, results: Results) -> None:
    """Copies without peer access: of plain memory; and, as facts, what the driver does with mapped memory, for which elastic memory stands."""
    for name in COPIES:
        for device in (0, 1):
            _compare(
                here,
                results,
                f"{name}, device {device} is current",
                lambda one, name=name, device=device: one.request("peers_copy", name, device, "plain"),
                both=False,
            )
            native = _begun(here, results, elastic=False, both=False)
            results.fact(
                f"the driver, mapped memory: {name}, device {device} is current",
                native.request("peers_copy", name, device, "created"),
            )
            native.kill()
    for name in HOST:
        _compare(
            here,
            results,
            f"{name}, to a device that is not current",
            lambda one, name=name: one.request("peers_host", name, "plain"),
            both=False,
        )


def case_swap(here: Machine, results: Results) -> None:
    """Two containers that do not fit beside a ballast: each has memory on both GPUs, and kernels of each GPU use the other's."""
    if not here.swaps:
        raise NotRun("the arbiter serves no bursts")
    block, guarantee, spare = (
        (FAKE_BLOCK_MIB, FAKE_GUARANTEE_MIB, FAKE_SPARE_MIB) if here.fake else (BLOCK_MIB, GUARANTEE_MIB, SPARE_MIB)
    )
    outside = here.container(way="")
    outside.request("peers_begin")
    free = [outside.request("peers_free", device) // MIB for device in (0, 1)]
    outside.end()
    room = block + 2 * guarantee + spare
    ballast = here.container(here.grant(min(free) - room, gpus=2), way="")
    ballast.request("peers_begin")
    for device in (0, 1):
        results.fact(f"ballast on GPU {device}, MiB", ballast.request("peers_fill", device, 16 * MIB) // MIB)
    pair = [_begun(here, results, elastic=True) for _ in range(2)]
    places: list[list[int]] = []
    for number, one in enumerate(pair):
        for device in (0, 1):
            results.check(
                f"container {number}: access of GPU {device} to the other", 0, one.request("peers_enable", device)
            )
        places.append([one.request("peers_take", device, "plain", block * MIB) for device in (0, 1)])
    for round_ in range(4):
        for number, one in enumerate(pair):
            for device in (0, 1):
                at, seed = places[number][1 - device], 100 * round_ + number
                code = one.request("peers_kernel", device, at, seed, block * MIB)
                wrong = one.request("peers_wrong", 1 - device, at, seed, block * MIB) if code == 0 else -1
                results.check(
                    f"round {round_}, container {number}: a kernel of GPU {device} on the other's memory",
                    [0, 0],
                    [code, wrong],
                )
    swaps = (here.folder / "arbiter.log").read_bytes().count(b'"event": "swap out"')
    results.check("orders to swap out", "some", swaps, swaps > 0)


CASES: Final = {
    "error codes": case_codes,
    "kernels": case_kernels,
    "access of its own": case_own_access,
    "copies": case_copies,
    "after a swap": case_swap,
}


def run(fake: bool, results: Results, until: Callable[[], bool]) -> int:
    """All cases, on a machine of their own with a copier for each GPU; how many rows are `no`."""
    pool_mib = (FAKE_POOL_MIB if fake else POOL_MIB) * burst.served()
    with machine(fake, pool_mib, fake_options=FAKE_OPTIONS, gpus=2) as here:
        with results.one(PART, "machine"):
            for what, value in here.describe().items():
                results.fact(what, value)
            results.fact("GPUs", len(here.uuids))
        if len(here.uuids) >= 2:
            here.start_arbiter()
            here.wait_for_nvml()
        for name, case in CASES.items():
            with results.one(PART, name):
                if until():
                    raise NotRun("no time left in the budget")
                if len(here.uuids) < 2:
                    raise NotRun("this machine has one GPU")
                case(here, results)
            here.end_containers()
    counts = {ok: sum(row.ok == ok for row in results.rows) for ok in ("yes", "no", "differs", "not run")}
    print(f"{PART}: {counts}", flush=True)
    return counts["no"]
