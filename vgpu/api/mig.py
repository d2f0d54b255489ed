"""MIG profiles and placements: what may stand beside what on one GPU.

A GPU in MIG mode is a row of memory slices. An instance occupies consecutive ones from a start that its profile allows, and takes compute
slices and media engines of the GPU's. `mig_tables` has the tables of NVIDIA's models; a driver reports its own (`nvml.mig`).
This module decides whether an instance fits; it does not choose one.

Names are those of resources: `1g.10gb.me`. NVIDIA's tools write `1g.10gb+me`.

Units and shapes
    memory, start   memory slices of the GPU: 8 on most, 12 on an RTX PRO 6000
    mask            bit s: memory slice s is occupied
    layout          slots sorted by start; the empty tuple is an empty GPU
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

_NAME = re.compile(r"([1-9][0-9]*)g\.[1-9][0-9]*gb(?:\.me(?:\.all)?|\.gfx|-me)?\Z")
MOST_INSTANCES: Final = 7
"""Of one GPU. Specified by NVIDIA."""


def is_profile(name: str) -> bool:
    """Is this spelled as the profile of a GPU instance, in a resource's form?"""
    return _NAME.match(name) is not None


def resource_form(nvidia: str) -> str:
    """`1g.10gb+me` as a resource name may have it: `1g.10gb.me`."""
    return nvidia.replace("+", ".")


def nvidia_form(profile: str) -> str:
    """`1g.10gb.me` as NVIDIA's tools write it: `1g.10gb+me`."""
    head, gb, suffix = profile.partition("gb")
    return head + gb + re.sub(r"\A\.", "+", suffix)


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One kind of GPU instance of one model."""

    name: str
    number: int
    """That nvidia-smi and NVML give it on this model."""
    compute: int
    """Compute slices."""
    memory: int
    """Memory slices."""
    starts: tuple[int, ...]
    """Memory slices at which an instance may begin, ascending."""
    decoders: int = 0
    """Video decoders (NVDEC)."""
    flow_engines: int = 0
    """Optical flow accelerators (OFA). A GPU has one: so one `+me` instance."""

    def mask(self, start: int) -> int:
        """Memory slices of an instance at this start."""
        return ((1 << self.memory) - 1) << start


@dataclass(frozen=True, slots=True, order=True)
class MigSlot:
    """Where an instance is, or could be."""

    start: int
    profile: str


Layout = tuple[MigSlot, ...]


@dataclass(frozen=True)
class MigTable:
    """The profiles of one model of GPU. What it has in all is what its largest profile has."""

    profiles: tuple[MigProfile, ...]
    memory: int
    """Memory slices."""
    compute: int
    decoders: int
    flow_engines: int

    @classmethod
    def of(cls, profiles: Iterable[MigProfile]) -> MigTable:
        """The table of these profiles."""
        known = tuple(profiles)
        return cls(
            known,
            memory=max((profile.starts[-1] + profile.memory for profile in known), default=0),
            compute=max((profile.compute for profile in known), default=0),
            decoders=max((profile.decoders for profile in known), default=0),
            flow_engines=max((profile.flow_engines for profile in known), default=0),
        )

    @cached_property
    def by_name(self) -> dict[str, MigProfile]:
        """Profile name -> profile."""
        return {profile.name: profile for profile in self.profiles}

    def slots(self, profile: str) -> tuple[MigSlot, ...]:
        """Every place of this profile on an empty GPU, by start. Raises KeyError for a profile that the model does not have."""
        return tuple(MigSlot(start, profile) for start in self.by_name[profile].starts)

    def possible(self, layout: Iterable[MigSlot]) -> bool:
        """Can these instances exist together? False also for a profile or a start that the model does not have."""
        occupied = compute = decoders = flow_engines = 0
        for slot in layout:
            profile = self.by_name.get(slot.profile)
            if profile is None or slot.start not in profile.starts:
                return False
            mask = profile.mask(slot.start)
            if occupied & mask:
                return False
            occupied |= mask
            compute += profile.compute
            decoders += profile.decoders
            flow_engines += profile.flow_engines
        return compute <= self.compute and decoders <= self.decoders and flow_engines <= self.flow_engines

    def fits(self, layout: Layout, slot: MigSlot) -> bool:
        """May this instance be created beside those of a possible layout?"""
        return self.possible((*layout, slot))

    def free_slots(self, layout: Layout, profile: str) -> tuple[MigSlot, ...]:
        """Where an instance of this profile may be created beside a possible layout, by start."""
        return _free_slots(self, layout, profile)

    def room(self, layout: Layout, profile: str) -> int:
        """How many instances of this profile may still be created, if no others are.

        Two places of one profile never overlap on any model, so the places count, and what they take of the GPU bounds them.
        """
        return _room(self, layout, profile)

    @cached_property
    def _hash(self) -> int:
        return hash(self.profiles)

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=65536)
def _free_slots(table: MigTable, layout: Layout, profile: str) -> tuple[MigSlot, ...]:
    wanted = table.by_name[profile]
    of = [table.by_name[slot.profile] for slot in layout]
    if (
        sum(one.compute for one in of) + wanted.compute > table.compute
        or sum(one.decoders for one in of) + wanted.decoders > table.decoders
        or sum(one.flow_engines for one in of) + wanted.flow_engines > table.flow_engines
    ):
        return ()
    occupied = 0
    for slot, one in zip(layout, of, strict=True):
        occupied |= one.mask(slot.start)
    return tuple(MigSlot(start, profile) for start in wanted.starts if not occupied & wanted.mask(start))


@lru_cache(maxsize=65536)
def _room(table: MigTable, layout: Layout, profile: str) -> int:
    most = 0
    beside: Layout = layout
    for slot in table.free_slots(layout, profile):
        if not table.fits(beside, slot):
            break
        beside, most = (*beside, slot), most + 1
    return most


def with_slot(layout: Layout, slot: MigSlot) -> Layout:
    """The layout with one more instance."""
    return tuple(sorted((*layout, slot)))


def without_slot(layout: Layout, slot: MigSlot) -> Layout:
    """The layout with one less. Raises ValueError where it is not there."""
    left = list(layout)
    left.remove(slot)
    return tuple(left)
