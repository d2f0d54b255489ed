"""A container's program on two GPUs, whose kernels use each other's memory: reads one Python expression a line and answers with JSON."""

from __future__ import annotations

import ctypes
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.integration.fake_driver import owner

MIB = owner.MIB
NOT_ENABLED, ALREADY_ENABLED = 705, 704
DEVICES = (0, 1)
KINDS = ("alloc", "alloc", "alloc", "pool", "created")
cuda, ok = owner.cuda, owner.ok


@dataclass
class Piece:
    """Memory with a content: every cell is its number x 2654435761 + seed."""

    at: int
    bytes: int
    device: int
    kind: str
    seed: int = 0
    opened: bool = False
    """Of memory that the program created: the other GPU has access."""
    user: int = -1
    """The GPU whose kernels may not have ended: those of the other one wait for them."""


pieces: list[Piece] = []
enabled: set[tuple[int, int]] = set()
"""A kernel of the first may use what is allocated on the second."""
pool_open: set[int] = set()
"""Pools of these GPUs are open to the other one."""
told = 0
refusals = 0
"""Of allocations: where there is no host pool, a container has its guarantee."""


def begin() -> None:
    """Contexts, kernels, and where they report."""
    global told
    owner.begin()
    for device in reversed(DEVICES):
        owner.on_gpu(device)
    told = owner.pinned(4096)


def other(device: int) -> int:
    return 1 - device


def pool(device: int) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    ok(cuda.cuDeviceGetDefaultMemPool(ctypes.byref(found), device))
    return found


def take(device: int, kind: str, mib: float) -> int:
    """A piece, written by its own GPU: the driver's answer."""
    size, at = int(mib * MIB), ctypes.c_uint64()
    owner.on_gpu(device)
    if kind == "created":
        size = max(1, size // (2 * MIB)) * 2 * MIB
        how, handle = owner.Prop(1, 1, owner.Location(1, device)), ctypes.c_uint64()
        code = cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(how), owner.u64(0))
        if code:
            return int(code)
        at.value = owner.mapped(handle.value, {device: 3}, size // MIB)
    elif kind == "pool":
        code = cuda.cuMemAllocAsync(ctypes.byref(at), ctypes.c_size_t(size), None)
        if code:
            return int(code)
    else:
        code = cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size))
        if code:
            return int(code)
    pieces.append(Piece(at.value, size, device, kind))
    return write(device, pieces[-1], random.randrange(2**32))


def give(piece: Piece) -> None:
    wait()
    pieces.remove(piece)
    owner.on_gpu(piece.device)
    if piece.kind == "created":
        ok(owner.unmap(piece.at, piece.bytes // MIB))
    else:
        ok(cuda.cuMemFree_v2(owner.u64(piece.at)))


def wait() -> None:
    for device in DEVICES:
        owner.on_gpu(device)
        ok(cuda.cuCtxSynchronize())
    for piece in pieces:
        piece.user = -1


def may(device: int, piece: Piece) -> bool:
    """Whether a kernel of that GPU may use it."""
    if device == piece.device:
        return True
    if piece.kind == "alloc":
        return (device, piece.device) in enabled
    return piece.opened if piece.kind == "created" else piece.device in pool_open


def use(device: int, piece: Piece) -> None:
    """The next kernel is that GPU's."""
    if piece.user not in (-1, device):
        wait()
    piece.user = device
    owner.on_gpu(device)


def write(device: int, piece: Piece, seed: int) -> int:
    use(device, piece)
    piece.seed = seed
    return owner.launch("write", piece.at, piece.bytes, seed, 500) or owner.done()


def add(device: int, piece: Piece, us: int = 2000) -> None:
    """Not waited for: a swap may come in its middle."""
    use(device, piece)
    ok(owner.launch("add", piece.at, piece.bytes, 3, us))
    piece.seed = (piece.seed + 3) % 2**32


def wrong(device: int, piece: Piece) -> int:
    """Cells, counted by a kernel of that GPU."""
    use(device, piece)
    owner.put(told, 0)
    ok(owner.launch("compare", piece.at, piece.bytes, piece.seed, told))
    ok(owner.done())
    return owner.cell(told)


def all_wrong() -> int:
    """Of everything, by every GPU that may use it."""
    wait()
    return sum(wrong(device, piece) for piece in pieces for device in DEVICES if may(device, piece))


def enable(device: int) -> int:
    """Of kernels of that GPU, to what is allocated on the other."""
    owner.on_gpu(device)
    code = owner.enable(other(device))
    assert code == (ALREADY_ENABLED if (device, other(device)) in enabled else 0), code
    enabled.add((device, other(device)))
    return code


def disable(device: int) -> int:
    wait()
    owner.on_gpu(device)
    code = owner.disable(other(device))
    assert code == (0 if (device, other(device)) in enabled else NOT_ENABLED), code
    enabled.discard((device, other(device)))
    return code


def open_pool(device: int, *, opened: bool) -> None:
    wait()
    ok(owner.open_pool(pool(device), other(device), 3 * opened))
    (pool_open.add if opened else pool_open.discard)(device)


def open_created(piece: Piece, *, opened: bool) -> None:
    wait()
    ok(owner.open_to(piece.at, {other(piece.device): 3 * opened}, piece.bytes // MIB))
    piece.opened = opened


def copy(one: Piece, from_: Piece) -> None:
    """As long as the shorter; in the default stream of the source's GPU, also without access, but of memory of pools and what the program created."""
    wait()
    owner.on_gpu(from_.device)
    size = min(one.bytes, from_.bytes)
    if all(may(from_.device, piece) or piece.kind == "alloc" for piece in (one, from_)):
        ok(owner.copy_now(one.at, from_.at, size))
    else:
        ok(owner.copy_peer(one.at, one.device, from_.at, from_.device, size))
    if size == one.bytes:
        one.seed = from_.seed
    else:
        write(one.device, one, one.seed)


def trust(device: int, piece: Piece) -> None:
    """A kernel that must fail would end this program: so the driver is asked instead."""
    flags, location = ctypes.c_ulonglong(), owner.Location(1, device)
    ok(cuda.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(location), owner.u64(piece.at)))
    assert (flags.value != 0) == may(device, piece), (device, piece, flags.value)


def step(dice: random.Random, most_mib: int) -> None:
    global refusals
    device, what = dice.choice(DEVICES), dice.random()
    held = sum(piece.bytes for piece in pieces if piece.device == device) // MIB
    piece = dice.choice(pieces) if pieces else None
    if piece is None or (what < 0.25 and held < most_mib):
        refusals += take(device, dice.choice(KINDS), dice.choice((0.3, 1, 2, 5, 12, 30))) != 0
    elif what < 0.3 and held > most_mib // 2:
        give(piece)
    elif what < 0.65:
        add(device if may(device, piece) else piece.device, piece, dice.choice((0, 500, 5000)))
    elif what < 0.75:
        wait()
        user = device if may(device, piece) else piece.device
        assert wrong(user, piece) == 0, (user, piece)
    elif what < 0.8:
        copy(piece, dice.choice(pieces))
    elif what < 0.9:
        (enable if dice.random() < 0.6 else disable)(device)
    elif what < 0.95:
        open_pool(device, opened=dice.random() < 0.6)
    elif piece.kind == "created":
        open_created(piece, opened=dice.random() < 0.6)


def work(steps: int, seed: int, most_mib: int) -> int:
    """Random steps, and then everything compared: wrong cells."""
    dice = random.Random(seed)
    for _ in range(steps):
        step(dice, most_mib)
    return all_wrong()


def is_elastic(at: int) -> bool:
    return bool(owner.attribute(at, 7)[1] >> 62)


if __name__ == "__main__":
    begin()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)
