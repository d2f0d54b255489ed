"""Nodes and pods of a simulation, read from CSV text. It knows columns and ranges, and not what is done with them.

Columns by name, in any order; others are passed over. The openb trace's own files are read as they are.

    nodes   sn or name, gpu (GPUs), model, and optionally cpu_milli, memory_mib (of the host), gpu_mib (of a GPU)
    pods    name, num_gpu (GPUs), gpu_milli (thousandths) or gpu_mib of each, in each line one of the two, and optionally
            cpu_milli, memory_mib, gpu_core (percent of each GPU), gpu_spec (models joined by |)

A pod with gpu_milli needs nodes without gpu_mib, whose GPUs then have 1,000 units each; a resource that
a host does not name is unlimited there.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vgpu.api.errors import TangramError
from vgpu.api.inventory import MOST_GPUS_OF_A_NODE, Gpu, Inventory
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import FULL_CORE_PERCENT, MOST_GPUS, GpuRequest, PodRequest

THOUSAND: Final = 1000
ENDLESS: Final = 2**30
"""CPU or memory of a host that does not name them."""


class BadWorkload(TangramError):
    """A CSV file cannot be read; the text names file, line and column."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node."""

    name: str
    cpu_milli: int
    memory_mib: int
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Job:
    """A pod. Its request is falsy where it requests no GPU."""

    name: str
    cpu_milli: int
    memory_mib: int
    request: PodRequest

    @property
    def gpu_mib(self) -> int:
        """Over all its GPUs."""
        return sum(part.gpus * part.mib for part in self.request.containers)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line, for errors that name it."""

    file: str
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def number(self, column: str, low: int, high: int, default: int | None = None) -> int:
        text = self.text(column)
        if not text and default is not None:
            return default
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise self.error(column, f"is {text[:40]!r}: it must be a whole number from {low} to {high}")
        return int(text)

    def error(self, column: str, sentence: str) -> BadWorkload:
        return BadWorkload(f"{self.file}: line {self.line}, column {column} {sentence}")


def read_nodes(text: str, file: str) -> list[Host]:
    """Raises BadWorkload. `file` is only named."""
    hosts, seen = [], set()
    for row in _rows(text, file, (("sn", "name"), ("gpu",), ("model",))):
        column = "sn" if "sn" in row.cells else "name"
        name, model = row.cells[column], row.cells["model"]
        if not name or name in seen:
            raise row.error(column, f"is {name[:80]!r}: it must be a name, and of no other line")
        seen.add(name)
        mib = row.number("gpu_mib", 1, LARGEST_GPU_MIB, THOUSAND)
        gpus = tuple(
            Gpu(f"{name}/{index}", index, model, mib) for index in range(row.number("gpu", 0, MOST_GPUS_OF_A_NODE))
        )
        hosts.append(
            Host(
                name, row.number("cpu_milli", 0, ENDLESS, ENDLESS), row.number("memory_mib", 0, ENDLESS, ENDLESS),
                Inventory(gpus, unit_mib=1),
            )
        )  # fmt: skip
    if not any(host.inventory.gpus for host in hosts):
        raise BadWorkload(f"{file}: no node has a GPU: there must be one at least")
    return hosts


def read_pods(text: str, file: str, policy: str) -> list[Job]:
    """Raises BadWorkload. Every pod requests `policy`."""
    jobs = []
    for row in _rows(text, file, (("name",), ("num_gpu",), ("gpu_milli", "gpu_mib"))):
        cpu, memory = row.number("cpu_milli", 0, ENDLESS, 0), row.number("memory_mib", 0, ENDLESS, 0)
        gpus = row.number("num_gpu", 0, MOST_GPUS)
        models = frozenset(row.cells.get("gpu_spec", "").split("|")) - {""}
        containers: tuple[GpuRequest, ...] = ()
        if gpus:
            mib, core = _of_each_gpu(row), row.number("gpu_core", 0, FULL_CORE_PERCENT, 0)
            containers = (GpuRequest("main", "share", gpus, units=gpus * mib, mib=mib, core_percent=core),)
        request = PodRequest(containers, policy=policy, models=models, cpu_milli=cpu)
        jobs.append(Job(row.cells["name"], cpu, memory, request))
    if not any(job.gpu_mib for job in jobs):
        raise BadWorkload(f"{file}: no pod requests a GPU: there must be one at least")
    return jobs


def _of_each_gpu(row: _Row) -> int:
    """MiB, or thousandths. An empty cell counts as if its column were not there."""
    mib, milli = row.text("gpu_mib"), row.text("gpu_milli")
    if mib and milli:
        raise BadWorkload(
            f"{row.file}: line {row.line}, columns gpu_mib and gpu_milli are {mib[:40]!r} and {milli[:40]!r}: one of the two must be empty"
        )
    if milli or "gpu_mib" not in row.cells:
        return row.number("gpu_milli", 1, THOUSAND)
    return row.number("gpu_mib", 1, LARGEST_GPU_MIB)


def _rows(text: str, file: str, wanted: Sequence[tuple[str, ...]]) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if not any(header):
            columns = ", ".join(" or ".join(names) for names in wanted)
            raise BadWorkload(f"{file} has no header line: line 1 must name the columns {columns}")
        for names in wanted:
            if not set(names) & set(header):
                raise BadWorkload(
                    f"{file}: line 1 has no column {' or '.join(names)}: it names {', '.join(header)[:200]}"
                )
        for column in filter(None, header):
            if header.count(column) > 1:
                raise BadWorkload(
                    f"{file}: line 1, column {column}: it is named {header.count(column)} times: it must be named once"
                )
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise BadWorkload(
                    f"{file}: line {reader.line_num}, column {header[min(len(cells), len(header) - 1)]}: the line has {len(cells)} cells: it must have {len(header)}"
                )
            yield _Row(file, reader.line_num, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise BadWorkload(f"{file}: line {reader.line_num}: {error}") from None
