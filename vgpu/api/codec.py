"""The three documents that Tangram's components exchange, to text and back.

    inventory    node annotation, JSON     deviceplugin -> extender
    assignment   pod annotation, JSON      extender -> deviceplugin, people
    grant        file, lines of text       deviceplugin -> library (C), arbiter

Each carries a version. A reader rejects what is newer than itself and what it cannot read in full, with the reason: a document
that is half understood grants nothing and frees nothing. Only the inventory may carry fields that a reader does not know, since
facts can be added without changing what the others mean. The grant is lines rather than JSON because a C library reads it
inside users' processes, where a hundred lines of strict parser are easier to trust than a JSON library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.grant import AssignedGpu, Assignment, Grant, GrantGpu
from vgpu.api.inventory import (
    MOST_CONDITIONS,
    MOST_GPUS_OF_A_NODE,
    MOST_ORPHANS,
    NORMAL,
    AccessMode,
    Gpu,
    Inventory,
    Orphan,
)
from vgpu.api.mig_device import slot_of_device
from vgpu.api.names import CLASSES, DEFAULT, DEFAULT_OVER_LIMIT_ACTION, LEVELS, OVER_LIMIT_ACTIONS, Kind
from vgpu.api.quantity import LARGEST_GPU_MIB, MEMORY_UNITS_MIB
from vgpu.api.request import FULL_CORE_PERCENT
from vgpu.api.uuids import kind_of_uuid

VERSION: Final = 1
GRANT_BYTES_LIMIT: Final = 64 * 1024
LARGEST_START: Final = 99
"""Memory slice of a MIG instance. Specified with the name of a slot."""
LARGEST_INDEX: Final = 255
"""Of a GPU or minor number. NVIDIA's driver makes at most 256 device nodes."""

_Word = TypeVar("_Word", bound=str)
_GPU = re.compile(r"card (\S+) mib=(0|[1-9][0-9]{0,9}) core_percent=(0|[1-9][0-9]{0,2})\Z")
_WORD = re.compile(r"[!-~]{1,253}\Z")
"""A value on a line of a grant: every Kubernetes name is such a one. Anything else could forge a line."""
_POD = re.compile(r"pod ([!-.0-~]{1,63})/([!-.0-~]{1,253})\Z")


@dataclass(frozen=True, slots=True)
class _GpuFields(Gpu):
    """Those of `Gpu`, and one of the document."""

    fit: bool = False
    """It is healthy and withdrawn. An extender of an earlier version knows no withdrawals, so for it `healthy` is false: it gives the GPU to no pod."""

    def gpu(self) -> Gpu:
        """What is meant."""
        plain = Gpu(**{one.name: getattr(self, one.name) for one in fields(Gpu)})
        return replace(plain, healthy=True) if self.fit else plain


class _InventoryFields(msgspec.Struct, rename={"gpus": "cards"}):
    """Those of `Inventory`, by their names in the document: version 1 names them `cards`."""

    gpus: tuple[_GpuFields, ...]
    unit_mib: int = 1024
    access: AccessMode = "cdi"
    driver: str = ""
    orphans: tuple[Orphan, ...] = ()
    cuda: str = ""
    driver_root: str = ""
    driver_place: str = ""


class _InventoryDocument(msgspec.Struct):
    v: int
    inventory: _InventoryFields


class _AssignedGpuDocument(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    uuid: str
    index: int
    mib: int
    core: int = 0
    kind: Kind = "share"
    profile: str = ""
    limit: int = 0


class _AssignmentDocument(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, rename={"service_class": "class"}
):
    v: int
    containers: dict[str, list[_AssignedGpuDocument]]
    service_class: str
    level: int
    init: list[str] = []


class _Version(msgspec.Struct):
    v: int


def inventory_to_json(inventory: Inventory) -> str:
    """The node annotation. Raises BadDocument when there are more orphans than a reader takes."""
    _within("inventory", "number of orphans", len(inventory.orphans), 0, MOST_ORPHANS)
    document = msgspec.to_builtins(_InventoryDocument(VERSION, _fields(inventory)))
    for gpu in document["inventory"]["cards"]:
        for later in ("conditions", "arch", "mig_capable", "on_demand", "coherent", "fit"):
            if not gpu[later]:  # then the text is as earlier versions wrote it
                del gpu[later]
        if gpu["heat"] == NORMAL:  # likewise
            del gpu["heat"]
        for instance in gpu["instances"]:
            if instance["start"] < 0:  # likewise
                del instance["start"]
    for later in ("orphans", "cuda", "driver_root", "driver_place"):
        if not document["inventory"][later]:  # likewise
            del document["inventory"][later]
    for gpu in (gpu for orphan in document["inventory"].get("orphans", ()) for gpu in orphan["held"]):
        if not gpu["limit_mib"]:  # likewise
            del gpu["limit_mib"]
    return msgspec.json.encode(document).decode()


def _fields(inventory: Inventory) -> _InventoryFields:
    gpus = []
    for gpu in inventory.gpus:
        fit = gpu.healthy and bool(gpu.withdrawn)
        plain = {one.name: getattr(gpu, one.name) for one in fields(Gpu)}
        gpus.append(_GpuFields(**plain | {"healthy": gpu.healthy and not fit}, fit=fit))
    return _InventoryFields(
        tuple(gpus),
        inventory.unit_mib,
        inventory.access,
        inventory.driver,
        inventory.orphans,
        inventory.cuda,
        inventory.driver_root,
        inventory.driver_place,
    )


def inventory_from_json(text: str) -> Inventory:
    """Raises BadDocument; NewerVersion when a newer plugin wrote it."""
    document: _InventoryDocument = _decode(text, _InventoryDocument, "inventory")
    read = document.inventory
    gpus = tuple(one.gpu() for one in read.gpus)
    inventory = Inventory(
        gpus, read.unit_mib, read.access, read.driver, read.orphans, read.cuda, read.driver_root, read.driver_place
    )
    units = tuple(MEMORY_UNITS_MIB.values())
    if inventory.unit_mib not in units:
        known = ", ".join(str(unit) for unit in units)
        raise BadDocument(f"inventory: unit_mib is {inventory.unit_mib}: it must be one of {known}")
    _within("inventory", "number of GPUs", len(inventory.gpus), 0, MOST_GPUS_OF_A_NODE)
    for gpu in inventory.gpus:
        _check_gpu(gpu)
    _once("index", [gpu.index for gpu in inventory.gpus])
    _once("UUID", [uuid for gpu in inventory.gpus for uuid in (gpu.uuid, *(i.uuid for i in gpu.instances))])
    _within("inventory", "number of orphans", len(inventory.orphans), 0, MOST_ORPHANS)
    _once("orphan", [orphan.uid for orphan in inventory.orphans])
    for orphan in inventory.orphans:
        _check_orphan(orphan)
    return inventory


def _check_orphan(orphan: Orphan) -> None:
    where = f"inventory: orphan {orphan.key[:80]}"
    for what, value in (("uid", orphan.uid), ("namespace", orphan.namespace), ("pod", orphan.pod)):
        if not _WORD.match(value):
            raise BadDocument(f"{where}: {what} is {value[:80]!r}: it must be 1 to 253 visible characters")
    _within(where, "number of GPUs", len(orphan.held), 1, MOST_GPUS_OF_A_NODE)
    for gpu in orphan.held:
        check_assigned_gpu(where, gpu)


def check_assigned_gpu(where: str, gpu: AssignedGpu) -> AssignedGpu:
    """The AssignedGpu, when every field is in range. Raises BadDocument that names `where`, the field, its value and the range."""
    slot = None
    if gpu.kind == "mig":
        _profile(where, gpu.profile)
        slot = slot_of_device(gpu.uuid)
    elif gpu.profile:
        raise BadDocument(f"{where}: profile is {gpu.profile!r}: it must be empty for kind {gpu.kind}")
    if slot is None:
        _uuid(where, gpu.uuid, "MIG" if gpu.kind == "mig" else "GPU")
    elif slot[1].profile != gpu.profile:
        raise BadDocument(f"{where}: profile is {gpu.profile!r}: it must be that of its slot, {gpu.uuid}")
    _within(where, "index", gpu.index, 0, LARGEST_INDEX)
    _within(where, "mib", gpu.mib, 0, LARGEST_GPU_MIB)
    _within(where, "core", gpu.core_percent, 0, FULL_CORE_PERCENT)
    if gpu.limit_mib and (gpu.kind != "share" or not 0 < gpu.mib < gpu.limit_mib <= LARGEST_GPU_MIB):
        least = f"more than mib, {gpu.mib}, and at most {LARGEST_GPU_MIB}" if gpu.kind == "share" else "left out"
        raise BadDocument(f"{where}: limit is {gpu.limit_mib}: for kind {gpu.kind} it must be {least}")
    return gpu


def _check_gpu(gpu: Gpu) -> None:
    where = f"inventory: gpu {_uuid('inventory', gpu.uuid, 'GPU')}"
    _within(where, "index", gpu.index, 0, LARGEST_INDEX)
    _within(where, "mib", gpu.mib, 0, LARGEST_GPU_MIB)
    _within(where, "minor", gpu.minor, 0, LARGEST_INDEX)
    _within(where, "number of conditions", len(gpu.conditions), 0, MOST_CONDITIONS)
    if gpu.instances and not gpu.mig:
        raise BadDocument(f"{where} has {len(gpu.instances)} MIG instances: it must have 0 while its MIG mode is off")
    if gpu.on_demand and not gpu.mig:
        raise BadDocument(f"{where} makes MIG instances on demand: it must not while its MIG mode is off")
    for instance in gpu.instances:
        _within(f"{where}: instance {instance.uuid}", "start", instance.start, -1, LARGEST_START)
        _uuid(where, instance.uuid, "MIG")
        _within(f"{where}: instance {instance.uuid}", "mib", instance.mib, 0, LARGEST_GPU_MIB)
        _profile(f"{where}: instance {instance.uuid}", instance.profile)


def _once(what: str, values: list[Any]) -> None:
    twice = sorted(value for value in set(values) if values.count(value) > 1)
    if twice:
        raise BadDocument(f"inventory names {what} {twice[0]} twice: each stands in it once")


def assignment_to_json(assignment: Assignment) -> str:
    """The pod annotation."""
    containers = {
        name: [
            _AssignedGpuDocument(s.uuid, s.index, s.mib, s.core_percent, s.kind, s.profile, s.limit_mib) for s in gpus
        ]
        for name, gpus in assignment.containers.items()
    }
    document = _AssignmentDocument(
        VERSION, containers, assignment.service_class, assignment.level, sorted(assignment.init)
    )
    return msgspec.json.encode(document).decode()


def assignment_from_json(text: str) -> Assignment:
    """Raises BadDocument; NewerVersion when a newer extender wrote it."""
    document: _AssignmentDocument = _decode(text, _AssignmentDocument, "assignment")
    unknown = set(document.init) - set(document.containers)
    if unknown:
        raise BadDocument(f"assignment: init names {min(unknown)!r}: it must be one of its containers")
    return Assignment(
        {name: _assigned_gpus(name, gpus) for name, gpus in document.containers.items()},
        init=frozenset(document.init),
        service_class=_known("assignment", "class", document.service_class, CLASSES),
        level=_within("assignment", "level", document.level, LEVELS.start, LEVELS.stop - 1),
    )


def _assigned_gpus(container: str, gpus: list[_AssignedGpuDocument]) -> tuple[AssignedGpu, ...]:
    where = f"assignment of container {container}"
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise BadDocument(f"{where}: a GPU stands twice among its {len(gpus)}: each must be another one")
    return tuple(_assigned_gpu(where, gpu) for gpu in gpus)


def _assigned_gpu(where: str, gpu: _AssignedGpuDocument) -> AssignedGpu:
    return check_assigned_gpu(
        where, AssignedGpu(gpu.uuid, gpu.index, gpu.mib, gpu.core, gpu.kind, gpu.profile, gpu.limit)
    )


def grant_to_text(grant: Grant) -> str:
    """The grant file, as the library reads it.

    Raises BadDocument when the library would refuse it: a name with a line break in it, a GPU twice.
    """
    head = [
        f"tangram-grant {VERSION}", f"pod {grant.namespace}/{grant.pod}", f"uid {grant.uid}",
        f"container {grant.container}", f"class {grant.service_class}", f"level {grant.level}",
    ]  # fmt: skip
    if grant.over_limit_action != DEFAULT_OVER_LIMIT_ACTION:
        head.append(f"guard {grant.over_limit_action}")
    if grant.clear:
        head.append("clear yes")
    gpus = [f"card {gpu.uuid} mib={gpu.mib} core_percent={gpu.core_percent}" for gpu in grant.gpus]
    text = "\n".join([*head, *gpus, "end", ""])
    grant_from_text(text)
    return text


def grant_from_text(text: str) -> Grant:
    """Raises BadDocument that names the line, its text and what was expected."""
    if len(text) > GRANT_BYTES_LIMIT:
        raise BadDocument(f"grant has {len(text)} characters: at most {GRANT_BYTES_LIMIT} are read")
    lines = text.split("\n")
    check_version(lines, "grant")
    whose = lines[1] if len(lines) > 1 else ""
    pod = _POD.match(whose)
    if not pod:
        raise BadDocument(f"grant line 2: found {whose[:80]!r}, expected 'pod <namespace>/<name>'")
    service_class = _known("grant line 5", "class", field_of_line(lines, 4, "class", "grant"), CLASSES)
    level = _known(
        "grant line 6", "level", field_of_line(lines, 5, "level", "grant"), tuple(str(level) for level in LEVELS)
    )
    over_limit_action, at = _optional(lines, 6, "guard", OVER_LIMIT_ACTIONS, DEFAULT_OVER_LIMIT_ACTION)
    clear, at = _optional(lines, at, "clear", ("yes", "no"), "no")
    uid, container, gpus = (
        field_of_line(lines, 2, "uid", "grant"),
        field_of_line(lines, 3, "container", "grant"),
        gpu_lines(lines, at, "grant"),
    )
    return Grant(pod[1], pod[2], uid, container, gpus, service_class, int(level), over_limit_action, clear == "yes")


def _optional(lines: list[str], at: int, key: str, allowed: tuple[_Word, ...], default: _Word) -> tuple[_Word, int]:
    """The value of a line that may be left out, and where the next line is."""
    if not (at < len(lines) and lines[at].startswith(f"{key} ")):
        return default, at
    return _known(f"grant line {at + 1}", key, field_of_line(lines, at, key, "grant"), allowed), at + 1


def check_version(lines: list[str], what: str) -> None:
    """The first line of a file of lines is `tangram-<what> <version>`, of a version that is read. Raises BadDocument, NewerVersion."""
    version = field_of_line(lines, 0, f"tangram-{what}", what)
    if version != str(VERSION):
        newer = re.match(r"[1-9][0-9]{0,9}\Z", version)
        raise (NewerVersion if newer else BadDocument)(
            f"{what} is of version {version[:80]!r}: this Tangram reads version {VERSION}"
        )


def gpu_lines(lines: list[str], at: int, what: str) -> tuple[GrantGpu, ...]:
    """Limits on each GPU, a line each, from line `at` (0 = the first) to `end`, which ends the document. `what` names the document in an error.

    Raises BadDocument.
    """
    gpus: dict[str, GrantGpu] = {}
    for number, line in enumerate(lines[at:], at + 1):
        if line == "end":
            if not lines[number:]:
                raise BadDocument(f"{what} line {number}: 'end' has no line break after it: it was cut off")
            if lines[number:] != [""]:
                raise BadDocument(f"{what} line {number + 1}: found text after 'end'")
            if not gpus:
                raise BadDocument(f"{what} line {number}: found 'end' after 0 GPUs: it has 1 to {MOST_GPUS_OF_A_NODE}")
            return tuple(gpus.values())
        found = _GPU.match(line)
        if not found:
            raise BadDocument(
                f"{what} line {number}: found {line[:80]!r}, expected 'card <uuid> mib=<n> core_percent=<0-100>' or 'end'"
            )
        where = f"{what} line {number}"
        uuid = _uuid(where, found[1], "GPU")
        if uuid in gpus:
            raise BadDocument(f"{where}: GPU {uuid} stands twice: each must be another one")
        _within(where, "number of GPUs", len(gpus) + 1, 1, MOST_GPUS_OF_A_NODE)
        mib = _within(where, "mib", int(found[2]), 1, LARGEST_GPU_MIB)
        gpus[uuid] = GrantGpu(uuid, mib, _within(where, "core_percent", int(found[3]), 0, FULL_CORE_PERCENT))
    raise BadDocument(f"{what} ends after line {len(lines)} without 'end': it was cut off")


def field_of_line(lines: list[str], at: int, key: str, what: str) -> str:
    """The value on a line `key value`; `what` names the document in an error. Raises BadDocument."""
    line = lines[at] if at < len(lines) else ""
    found, _, value = line.partition(" ")
    if found != key or not _WORD.match(value):
        raise BadDocument(f"{what} line {at + 1}: found {line[:80]!r}, expected '{key} <value>'")
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
        raise BadDocument(f"{what} cannot be read: {str(error)[:300]}") from None


def _uuid(where: str, value: str, of: str) -> str:
    if kind_of_uuid(value) != of:
        raise BadDocument(f"{where}: {value[:80]!r} is no {of} UUID ({of}-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")
    return value


def _profile(where: str, value: str) -> None:
    if DEFAULT.mig_profile(DEFAULT.mig(value)) != value:
        raise BadDocument(f"{where}: profile is {value[:80]!r}: it must be a MIG profile such as 1g.10gb")


def _within(where: str, what: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise BadDocument(f"{where}: {what} is {value}: it must be {least} to {most}")
    return value


def _known(where: str, what: str, value: str, allowed: tuple[_Word, ...]) -> _Word:
    for one in allowed:
        if value == one:
            return one
    raise BadDocument(f"{where}: {what} is {value[:80]!r}: it must be one of {', '.join(allowed)}")
