"""The file of MIG layouts, in the format of NVIDIA's mig-parted: read strictly, each error with its line.

    version: v1
    mig-configs:
      balanced:
        - device-filter: ["0x233010DE"]     PCI device IDs; optional
          devices: all                      or a list of indices
          mig-enabled: true
          mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}

It decides which layout a GPU has by the file. Whether the GPU can have it is `vgpu.mig.plan`'s to decide. What differs from mig-parted: keys that it
does not know, keys that stand twice, and two entries for one GPU are errors; compute instances smaller than their GPU instance are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import yaml

from vgpu.api.errors import TangramError
from vgpu.api.mig import MOST_INSTANCES, MigTable, is_profile, nvidia_form, resource_form
from vgpu.api.mig_tables import MODELS, known_profiles
from vgpu.mig.layout import place

LARGEST_BYTES: Final = 256 * 1024
"""Of a file. Guessed: NVIDIA's own, for every model, has 10 KiB."""
MOST_INDEX: Final = 63
"""Of a GPU in `devices`: a node has at most 64. Specified with the inventory."""
VERSION: Final = "v1"

_DEVICE_ID = re.compile(r"0x[0-9a-fA-F]{8}\Z")
_INTEGER = "tag:yaml.org,2002:int"
_BOOLEAN = "tag:yaml.org,2002:bool"
_STRING = "tag:yaml.org,2002:str"
T = TypeVar("T")


class BadMigFile(TangramError):
    """The file cannot be read or applied. The text begins with its name and the line."""


@dataclass(frozen=True, slots=True)
class MigEntry:
    """What some GPUs of a node should have."""

    line: int
    device_ids: tuple[str, ...]
    """PCI device IDs in lower case; empty = every model."""
    indices: tuple[int, ...] | None
    """None = every GPU."""
    mig: bool
    counts: Mapping[str, int]
    """Profile, as a resource has it -> instances."""

    def covers(self, index: int, device_id: str) -> bool:
        """Is it for the GPU with this index and PCI device ID (`0x233010de`)?"""
        return (self.indices is None or index in self.indices) and (
            not self.device_ids or device_id.lower() in self.device_ids
        )


@dataclass(frozen=True, slots=True)
class MigConfig:
    """One named layout of a node."""

    where: str
    """The file's name, for errors."""
    name: str
    line: int
    entries: tuple[MigEntry, ...]

    def of_gpus(self, gpus: Mapping[int, str]) -> dict[int, MigEntry]:
        """Index -> entry, for the GPUs that it speaks of. `gpus`: index -> PCI device ID. Raises BadMigFile."""
        found: dict[int, MigEntry] = {}
        for entry in self.entries:
            for index in entry.indices or ():
                if index not in gpus:
                    raise BadMigFile(f"{self.where}:{entry.line}: devices has GPU {index}, this node has {_list(gpus)}")
            for index, device_id in gpus.items():
                if not entry.covers(index, device_id):
                    continue
                if index in found:
                    raise BadMigFile(
                        f"{self.where}:{entry.line}: GPU {index} has two entries in {self.name!r}, the other is in line {found[index].line}: it must have one"
                    )
                found[index] = entry
        return found


@dataclass(frozen=True, slots=True)
class MigFile:
    """All layouts of a file, by name."""

    where: str
    configs: Mapping[str, MigConfig]

    def named(self, name: str) -> MigConfig:
        """Raises BadMigFile, with the names that there are."""
        if name not in self.configs:
            raise BadMigFile(f"{self.where}: mig-configs has no {name[:80]!r}, must be one of {_list(self.configs)}")
        return self.configs[name]


def read(text: str, where: str, more_profiles: Collection[str] = (), tables: Iterable[MigTable] = ()) -> MigFile:
    """The file's layouts. `where`: its name, for errors. `more_profiles`, `tables`: of drivers that are there, beside those of `mig_tables`.

    Raises BadMigFile, which names the line: YAML that cannot be read, unknown keys and profiles, layouts that no model of GPU can have.
    """
    return _Reader(where, {*known_profiles(), *more_profiles}, (*tables, *(model.table for model in MODELS))).file(text)


class _Reader:
    def __init__(self, where: str, profiles: Collection[str], tables: tuple[MigTable, ...]) -> None:
        self._where, self._profiles, self._tables = where, profiles, tables

    def file(self, text: str) -> MigFile:
        if len(text.encode(errors="replace")) > LARGEST_BYTES:
            raise BadMigFile(f"{self._where}: the file has more than {LARGEST_BYTES} bytes")
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise BadMigFile(f"{self._where}:{line}: this is no YAML: {error.problem}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise BadMigFile(f"{self._where}:1: this is no YAML: {str(error)[:200]}") from None
        if root is None:
            raise BadMigFile(f"{self._where}:1: the file is empty, must have version and mig-configs")
        parts = self._mapping(root, "the file", ("version", "mig-configs"), needed=("version", "mig-configs"))
        version = self._scalar(parts["version"], "version")
        if version != VERSION:
            raise self._bad(parts["version"], f"version is {version[:40]!r}, must be {VERSION}")
        configs = {name: self._config(name, node) for name, node in self._items(parts["mig-configs"], "mig-configs")}
        if not configs:
            raise self._bad(parts["mig-configs"], "mig-configs is empty, must have a layout")
        return MigFile(self._where, configs)

    def _config(self, name: str, node: yaml.Node) -> MigConfig:
        entries = tuple(self._entry(one) for one in self._sequence(node, f"layout {name[:80]!r}"))
        if not entries:
            raise self._bad(node, f"layout {name[:80]!r} is empty, must have an entry")
        return MigConfig(self._where, name, _line(node), entries)

    def _entry(self, node: yaml.Node) -> MigEntry:
        known = ("device-filter", "devices", "mig-enabled", "mig-devices")
        parts = self._mapping(node, "an entry", known, needed=("devices", "mig-enabled"))
        mig = self._boolean(parts["mig-enabled"], "mig-enabled")
        counts = self._counts(parts["mig-devices"]) if "mig-devices" in parts else {}
        if counts and not mig:
            raise self._bad(
                parts["mig-devices"], "mig-devices has instances, and mig-enabled is false: it must be true"
            )
        filters = self._filters(parts["device-filter"]) if "device-filter" in parts else ()
        return MigEntry(_line(node), filters, self._devices(parts["devices"]), mig, counts)

    def _filters(self, node: yaml.Node) -> tuple[str, ...]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found = []
        for one in nodes:
            text = self._scalar(one, "device-filter")
            if not _DEVICE_ID.match(text):
                raise self._bad(one, f"device-filter has {text[:40]!r}, must be a PCI device ID such as 0x233010DE")
            found.append(text.lower())
        if not found:
            raise self._bad(node, "device-filter is empty, must have a PCI device ID")
        return tuple(found)

    def _devices(self, node: yaml.Node) -> tuple[int, ...] | None:
        if isinstance(node, yaml.ScalarNode):
            if node.value != "all":
                raise self._bad(node, f"devices is {node.value[:40]!r}, must be all, or a list of indices")
            return None
        found = []
        for one in self._sequence(node, "devices"):
            index = self._number(one, "devices", MOST_INDEX)
            if index in found:
                raise self._bad(one, f"devices has GPU {index} twice")
            found.append(index)
        return tuple(found)

    def _counts(self, node: yaml.Node) -> dict[str, int]:
        counts: dict[str, int] = {}
        for text, value, line in self._pairs(node, "mig-devices"):
            counts[self._profile(text, line)] = self._number(
                value, f"mig-devices has {text}: the number", MOST_INSTANCES
            )
        counts = {profile: count for profile, count in counts.items() if count}
        tables = [table for table in self._tables if counts.keys() <= table.by_name.keys()]
        named_only = any(counts.keys() <= set(model.other_names) for model in MODELS)
        if counts and not named_only and not any(place(table, (), counts) is not None for table in tables):
            what = ", ".join(f"{count} x {nvidia_form(profile)}" for profile, count in counts.items())
            why = "do not fit together on it" if tables else "belong to different models"
            raise self._bad(node, f"no GPU can have mig-devices {what}: these profiles {why}")
        return counts

    def _profile(self, text: str, line: int) -> str:
        profile = resource_form(text)
        if re.match(r"[0-9]+c\.", text):
            raise BadMigFile(
                f"{self._where}:{line}: profile {text[:40]!r} is a compute instance smaller than its GPU instance: Tangram creates one as large as that, write {text.partition('c.')[2][:40]!r}"
            )
        if not is_profile(profile) or nvidia_form(profile) != text:
            raise BadMigFile(
                f"{self._where}:{line}: profile is {text[:40]!r}, must be one as NVIDIA writes it, such as 1g.10gb+me"
            )
        if profile not in self._profiles:
            raise BadMigFile(
                f"{self._where}:{line}: no GPU is known that has the profile {text!r} (docs/reference/mig-profiles.md lists those that are)"
            )
        return profile

    def _mapping(
        self, node: yaml.Node, what: str, known: tuple[str, ...], needed: tuple[str, ...]
    ) -> dict[str, yaml.Node]:
        found: dict[str, yaml.Node] = {}
        for key, value, line in self._pairs(node, what):
            if key not in known:
                raise BadMigFile(f"{self._where}:{line}: {what} has {key[:40]!r}, must be one of {_list(known)}")
            found[key] = value
        for key in needed:
            if key not in found:
                raise self._bad(node, f"{what} has no {key}")
        return found

    def _items(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node]]:
        return ((key, value) for key, value, _ in self._pairs(node, what))

    def _pairs(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, int]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._bad(node, f"{what} is no mapping")
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            key, line = self._scalar(key_node, f"a key of {what}"), _line(key_node)
            if key in seen:
                raise BadMigFile(
                    f"{self._where}:{line}: {what} has {key[:40]!r} twice, the other is in line {seen[key]}"
                )
            seen[key] = line
            yield key, value, line

    def _sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._bad(node, f"{what} is no list")
        return list(node.value)

    def _scalar(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._bad(node, f"{what} is no single value")
        return str(node.value)

    def _boolean(self, node: yaml.Node, what: str) -> bool:
        text = self._scalar(node, what)
        if node.tag != _BOOLEAN or text.lower() not in ("true", "false"):
            raise self._bad(node, f"{what} is {text[:40]!r}, must be true or false")
        return text.lower() == "true"

    def _number(self, node: yaml.Node, what: str, most: int) -> int:
        text = self._scalar(node, what)
        if node.tag != _INTEGER or not re.fullmatch(r"[0-9]{1,4}", text) or int(text) > most:
            raise self._bad(node, f"{what} is {text[:40]!r}, must be a number from 0 to {most}")
        return int(text)

    def _bad(self, node: yaml.Node, text: str) -> BadMigFile:
        return BadMigFile(f"{self._where}:{_line(node)}: {text}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _list(names: Iterable[object]) -> str:
    return ", ".join(map(str, list(names)[:40])) or "none"
