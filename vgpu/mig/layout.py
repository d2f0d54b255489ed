"""Where instances of these profiles go, beside those that stay."""

from __future__ import annotations

from collections.abc import Mapping

from vgpu.api.mig import Layout, MigSlot, MigTable, with_slot


def place(table: MigTable, keep: Layout, more: Mapping[str, int]) -> tuple[MigSlot, ...] | None:
    """Slots for so many instances of each profile beside `keep`, the largest first; None where there is no room for all.

    Each begins at the highest slice that lets the rest in, as the driver places them. Every choice is tried: at most some thousand steps, because
    a GPU has at most 7 instances. A profile that the table lacks has no room.
    """
    if any(profile not in table.by_name for profile in more):
        return None
    ordered = sorted(more, key=lambda name: (-table.by_name[name].memory, -table.by_name[name].compute, name))
    wanted = [profile for profile in ordered for _ in range(more[profile])]
    return _place(table, keep, wanted, None)


def _place(table: MigTable, layout: Layout, wanted: list[str], before: MigSlot | None) -> tuple[MigSlot, ...] | None:
    if not wanted:
        return ()
    profile, *rest = wanted
    for slot in reversed(table.free_slots(layout, profile)):
        if before is not None and before.profile == profile and slot.start > before.start:
            continue  # the same set in another order
        found = _place(table, with_slot(layout, slot), rest, slot)
        if found is not None:
            return (slot, *found)
    return None
