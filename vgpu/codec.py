"""The three documents that Tangram's parts hand each other, to text and back.

    inventory    node annotation, JSON     deviceplugin -> extender
    assignment   pod annotation, JSON      extender -> deviceplugin, people
    grant        file, lines of text       deviceplugin -> library (C), arbiter

Each carries a version. A reader refuses what is newer than itself and what it cannot read in full, and says why: a document
that is half understood grants nothing and frees nothing. The grant is lines rather than JSON because a C library reads it
inside other people's processes, where a hundred lines of strict parser are easier to trust than a JSON library.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from vgpu.errors import BadDocument, NewerVersion
from vgpu.grant import Assignment, Grant, GrantCard, Slice
from vgpu.inventory import Inventory
from vgpu.names import CLASSES, LEVELS
from vgpu.request import FULL_CORE_PERCENT

VERSION: Final = 1
GRANT_BYTES_LIMIT: Final = 64 * 1024
GRANT_CARDS_LIMIT: Final = 64
LARGEST_MIB: Final = 2**31 - 1
"""2 PiB: the fleet counts MiB in int32."""

_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_CARD = re.compile(r"card (\S+) mib=([0-9]{1,10}) core_percent=([0-9]{1,3})\Z")


class _InventoryDocument(msgspec.Struct, forbid_unknown_fields=False):
    v: int
    inventory: Inventory


class _SliceDocument(msgspec.Struct, omit_defaults=True):
    uuid: str
    index: int
    mib: int
    core: int = 0
    kind: str = "share"
    profile: str = ""


class _AssignmentDocument(msgspec.Struct, omit_defaults=True, rename={"klass": "class"}):
    v: int
    containers: dict[str, list[_SliceDocument]]
    klass: str
    level: int
    init: list[str] = []


class _Version(msgspec.Struct):
    v: int


def inventory_to_json(inventory: Inventory) -> str:
    """The node annotation."""
    return msgspec.json.encode(_InventoryDocument(VERSION, inventory)).decode()


def inventory_from_json(text: str) -> Inventory:
    """Raises BadDocument; NewerVersion when a newer plugin wrote it."""
    document: _InventoryDocument = _decode(text, _InventoryDocument, "inventory")
    seen: set[str] = set()
    for card in document.inventory.cards:
        for uuid in (card.uuid, *(instance.uuid for instance in card.instances)):
            if uuid in seen:
                raise BadDocument(f"inventory names {uuid} twice: each card and MIG instance stands in it once")
            seen.add(uuid)
        if not 0 <= card.mib <= LARGEST_MIB:
            raise BadDocument(f"inventory: card {card.uuid} has {card.mib} MiB: it must be 0 to {LARGEST_MIB}")
    return document.inventory


def assignment_to_json(assignment: Assignment) -> str:
    """The pod annotation."""
    containers = {
        name: [_SliceDocument(s.uuid, s.index, s.mib, s.core_percent, s.kind, s.profile) for s in slices]
        for name, slices in assignment.containers.items()
    }
    document = _AssignmentDocument(VERSION, containers, assignment.klass, assignment.level, sorted(assignment.init))
    return msgspec.json.encode(document).decode()


def assignment_from_json(text: str) -> Assignment:
    """Raises BadDocument; NewerVersion when a newer extender wrote it."""
    document: _AssignmentDocument = _decode(text, _AssignmentDocument, "assignment")
    return Assignment(
        {name: tuple(_slice(name, piece) for piece in pieces) for name, pieces in document.containers.items()},
        init=frozenset(document.init),
        klass=_known("assignment", "class", document.klass, CLASSES),
        level=_within("assignment", "level", document.level, LEVELS.start, LEVELS.stop - 1),
    )


def _slice(container: str, piece: _SliceDocument) -> Slice:
    where = f"assignment of container {container}"
    if piece.kind not in ("share", "whole", "mig"):
        raise BadDocument(f"{where}: kind is {piece.kind!r}: it must be one of share, whole, mig")
    return Slice(
        uuid=_uuid(where, piece.uuid),
        index=_within(where, "index", piece.index, 0, 255),
        mib=_within(where, "mib", piece.mib, 0, LARGEST_MIB),
        core_percent=_within(where, "core", piece.core, 0, FULL_CORE_PERCENT),
        kind=piece.kind,  # type: ignore[arg-type]
        profile=piece.profile,
    )


def grant_to_text(grant: Grant) -> str:
    """The grant file, as the library reads it."""
    head = [
        f"tangram-grant {VERSION}", f"pod {grant.namespace}/{grant.pod}", f"uid {grant.uid}",
        f"container {grant.container}", f"class {grant.klass}", f"level {grant.level}",
    ]  # fmt: skip
    cards = [f"card {card.uuid} mib={card.mib} core_percent={card.core_percent}" for card in grant.cards]
    return "\n".join([*head, *cards, "end", ""])


def grant_from_text(text: str) -> Grant:
    """Raises BadDocument that names the line, what it holds and what was expected."""
    if len(text) > GRANT_BYTES_LIMIT:
        raise BadDocument(f"grant has {len(text)} characters: at most {GRANT_BYTES_LIMIT} are read")
    lines = text.split("\n")
    version = _field(lines, 0, "tangram-grant")
    if version != str(VERSION):
        raise NewerVersion(f"grant is of version {version!r}: this Tangram reads version {VERSION}")
    namespace, slash, pod = _field(lines, 1, "pod").partition("/")
    if not (namespace and slash and pod):
        raise BadDocument(f"grant line 2: found {lines[1][:80]!r}, expected 'pod <namespace>/<name>'")
    klass = _known("grant line 5", "class", _field(lines, 4, "class"), CLASSES)
    level = _known("grant line 6", "level", _field(lines, 5, "level"), tuple(str(level) for level in LEVELS))
    return Grant(
        namespace, pod, _field(lines, 2, "uid"), _field(lines, 3, "container"), _cards(lines), klass, int(level)
    )


def _cards(lines: list[str]) -> tuple[GrantCard, ...]:
    cards: dict[str, GrantCard] = {}
    for number, line in enumerate(lines[6:], 7):
        if line == "end":
            if lines[number:] != [""]:
                raise BadDocument(f"grant line {number + 1}: found text after 'end'")
            return tuple(cards.values())
        found = _CARD.match(line)
        if not found:
            raise BadDocument(
                f"grant line {number}: found {line[:80]!r}, expected 'card <uuid> mib=<n> core_percent=<0-100>' or 'end'"
            )
        where = f"grant line {number}"
        uuid = _uuid(where, found[1])
        if uuid in cards or len(cards) == GRANT_CARDS_LIMIT:
            raise BadDocument(f"{where}: card {uuid} stands twice, or there are more than {GRANT_CARDS_LIMIT} cards")
        mib = _within(where, "mib", int(found[2]), 0, LARGEST_MIB)
        cards[uuid] = GrantCard(uuid, mib, _within(where, "core_percent", int(found[3]), 0, FULL_CORE_PERCENT))
    raise BadDocument(f"grant ends after line {len(lines)} without 'end': it was cut off")


def _field(lines: list[str], at: int, key: str) -> str:
    line = lines[at] if at < len(lines) else ""
    found, _, value = line.partition(" ")
    if found != key or not value:
        raise BadDocument(f"grant line {at + 1}: found {line[:80]!r}, expected '{key} <value>'")
    return value


def _decode(text: str, kind: type[Any], what: str) -> Any:
    try:
        version = msgspec.json.decode(text, type=_Version).v
        if version > VERSION:
            raise NewerVersion(f"{what} is of version {version}: this Tangram reads up to version {VERSION}")
        if version < 1:
            raise BadDocument(f"{what} is of version {version}: versions are 1 to {VERSION}")
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"{what} cannot be read: {error}") from None


def _uuid(where: str, value: str) -> str:
    if not _UUID.match(value):
        raise BadDocument(f"{where}: {value[:80]!r} is no GPU or MIG UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")
    return value


def _within(where: str, what: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise BadDocument(f"{where}: {what} is {value}: it must be {least} to {most}")
    return value


def _known(where: str, what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise BadDocument(f"{where}: {what} is {value[:80]!r}: it must be one of {', '.join(allowed)}")
    return value
