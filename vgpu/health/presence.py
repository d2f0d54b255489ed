"""Which GPUs are in the machine after a probe: those that NVML describes, and those that it does not and that are there all the same.

A GPU that fell off the bus answers no call, and a session of NVML that began later does not list it at all. Its pods still run, so it stays in the
inventory, unhealthy. A GPU that was taken out of the machine leaves the inventory. What tells them apart is the list of GPUs that the kernel driver is
bound to (`on_bus`): a GPU that fell off the bus stays in it, and one that was taken out does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vgpu.api.inventory import Gpu

REOPEN_AFTER_S: Final = (3.0, 30.0)
"""After a probe that misses a GPU which is on the bus, NVML is opened anew, at most so often: the kernel driver binds a GPU some time before NVML lists it.
Guessed. A GPU that the driver cannot initialise must not cost the others a session again and again."""
REOPEN_EVERY_S: Final = 3600.0
"""After those. Guessed: no GPU that became well again is out of use for good."""


@dataclass(frozen=True, slots=True)
class Presence:
    """The result of a probe."""

    gpus: tuple[Gpu, ...]
    """By index. Those that NVML does not describe stand as they were before, unhealthy."""
    kept: frozenset[str]
    """UUIDs of those."""


def bus_address(text: str) -> str:
    """NVML writes the domain of a PCI address with eight digits and sysfs with four: the form that both have in common, in lower case."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if rest else text.lower()


def present(
    last: Iterable[Gpu], described: Sequence[Gpu], *, silent: int, reopened: bool, on_bus: Collection[str] | None
) -> Presence:
    """The GPUs of the machine. `last`: of the probe before. `described`: by NVML now. `silent`: how many more NVML lists, and cannot describe.

    `reopened`: this session of NVML began after the last probe. `on_bus`: PCI addresses of GPUs that the driver is bound to; None = unknown. Then a GPU
    that NVML does not describe stays until a new session lists all that there are.
    """
    uuids = {gpu.uuid for gpu in described}
    taken = {bus_address(gpu.pci) for gpu in described if gpu.pci}
    addresses = None if on_bus is None else {bus_address(one) for one in on_bus}

    def is_there(gpu: Gpu) -> bool:
        if addresses is None or not gpu.pci:
            return silent > 0 or not reopened
        address = bus_address(gpu.pci)
        return address in addresses and address not in taken

    kept = [replace(gpu, healthy=False) for gpu in last if gpu.uuid not in uuids and is_there(gpu)]
    return Presence(_renumbered(described, kept), frozenset(gpu.uuid for gpu in kept))


def missing(described: Iterable[Gpu], on_bus: Collection[str] | None) -> frozenset[str]:
    """PCI addresses that the driver is bound to and where NVML describes no GPU."""
    if on_bus is None:
        return frozenset()
    return frozenset(bus_address(one) for one in on_bus) - {bus_address(gpu.pci) for gpu in described}


def _renumbered(described: Sequence[Gpu], kept: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """NVML numbers the GPUs that it lists from 0 on. One that it does not list keeps its index if that is free, else it has the first free one: no reader
    takes an inventory in which two GPUs have one index."""
    used = {gpu.index for gpu in described}
    gpus = list(described)
    for gpu in kept:
        index = gpu.index if gpu.index not in used else next(at for at in range(len(used) + 1) if at not in used)
        used.add(index)
        gpus.append(gpu if index == gpu.index else replace(gpu, index=index))
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


class LateGpus:
    """GPUs that are on the bus and that NVML does not list, and when NVML is opened anew for them. Times are of a clock that never goes back."""

    def __init__(self) -> None:
        self._missing: frozenset[str] = frozenset()
        self._tries = 0
        self._probed_s = 0.0

    def probed(self, missing: frozenset[str], at_s: float) -> None:
        """A probe misses these. Others than before count anew."""
        if missing != self._missing:
            self._missing, self._tries = missing, 0
        self._probed_s = at_s

    def reopen(self, at_s: float) -> str:
        """Why NVML must be opened anew now; empty when it must not. Counts as a try."""
        pause_s = REOPEN_AFTER_S[self._tries] if self._tries < len(REOPEN_AFTER_S) else REOPEN_EVERY_S
        if not self._missing or at_s - self._probed_s < pause_s:
            return ""
        self._tries += 1
        self._probed_s = at_s
        return f"NVML does not list the GPU at {', '.join(sorted(self._missing))}, which the driver is bound to"
