"""What a process may answer to an order. Everything else is a BadDocument, which ends its connection. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vgpu.api.errors import BadDocument
from vgpu.memory.swap_slots import GRAIN_BYTES
from vgpu.protocol.copier import BLOCK_LIMIT_BYTES
from vgpu.protocol.messages import Block, Blocks, Unmapped


def check_named(message: Blocks, *, asked_bytes: int, before: Collection[int], known: Collection[int]) -> None:
    """Blocks that are to leave, of the smallest size as many as fit. Raises BadDocument."""
    named, most = len(before) + len(message.blocks), max(1, -(-asked_bytes // GRAIN_BYTES))
    if named > most:
        raise BadDocument(f"BLOCKS names {named} blocks: {asked_bytes} bytes are in {most} at most")
    ids = [block.id for block in message.blocks]
    again = next((id_ for at, id_ in enumerate(ids) if id_ in known or id_ in before or id_ in ids[:at]), None)
    if again is not None:
        raise BadDocument(f"BLOCKS names block {again}, which is chosen or away")
    for block in message.blocks:
        _check_size(block)


def check_needed(named_bytes: int, least_bytes: int, asked_bytes: int) -> None:
    """All blocks of an answer until now, of which the smallest has `least_bytes`: none could be left out, because the room in the host pool that it takes may be
    another container's. Raises BadDocument."""
    if named_bytes - least_bytes >= asked_bytes:
        raise BadDocument(
            f"BLOCKS names {named_bytes} bytes: for {asked_bytes}, a block of {least_bytes} could be left out"
        )


def check_made(message: Blocks, asked: Sequence[int], sizes: Mapping[int, int], named_before: Collection[int]) -> None:
    """Blocks that were made: some of the ordered ones, in their order, as large as they were. Raises BadDocument."""
    rest = iter(id_ for id_ in asked if id_ not in named_before)
    for block in message.blocks:
        if block.id not in rest:  # consumes it up to the block: so the order counts
            raise BadDocument(f"BLOCKS names block {block.id}: it was not ordered, or not in this order")
        if block.bytes != sizes[block.id]:
            raise BadDocument(f"BLOCKS has {block.bytes} bytes for block {block.id}: it has {sizes[block.id]}")


def check_unmapped(message: Unmapped, asked: Collection[int]) -> None:
    """Blocks that were unmapped: some of the ordered ones. Raises BadDocument."""
    ids = set(message.ids)
    if len(ids) < len(message.ids) or not ids <= set(asked):
        raise BadDocument("UNMAPPED names a block twice, or one that was not ordered")


def check_descriptors(count: int, fds: int, *, short: bool) -> bool:
    """Whether each block has its descriptor. False: the arbiter had no room for all (`short`). Raises BadDocument."""
    if fds == count:
        return True
    if short and fds < count:
        return False
    raise BadDocument(f"BLOCKS of {count} blocks with {fds} descriptors")


def _check_size(block: Block) -> None:
    if not 0 < block.bytes <= BLOCK_LIMIT_BYTES or block.bytes % GRAIN_BYTES:
        raise BadDocument(f"BLOCKS names a block of {block.bytes} bytes: it must be a multiple of {GRAIN_BYTES}")
