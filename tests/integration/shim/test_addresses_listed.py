"""Every function of cuda.h that takes an address of device memory waits for memory that is away, or is listed with the reason why it need not."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from tests.integration.shim.test_streams_listed import parameters, reported
from tests.integration.shim.test_symbols import HEADERS, ROOT

TAKES_ADDRESS = re.compile(
    r"\bCUdeviceptr(_v1)? (?!\*)|\bvoid \*(globalAddress|ptr|at)\b|\bconst CUDA_(RESOURCE_DESC|MEMCPY|MEMSET|BATCH_MEM_OP)|\bCUgraphNodeParams \*"
)
"""By value, by the two names that the header has for addresses as pointers, or in a structure."""
NO_WAIT = {
    "cuMemAlloc*": "returns an address",
    "cuMemFree*": "the library ends the request itself, away or not",
    "cuIpc*MemHandle*": "the library answers for its own memory, and waits where that leaves the process",
    "cuMemRetainAllocationHandle": "the library answers",
    "cuMemMap": "the library answers, and waits where the driver is called",
    "cuMemUnmap": "the library answers; of memory that is away the records are changed",
    "cuMemSetAccess": "the library answers; of memory that is away the records are changed",
    "cuMemGetAccess": "the library answers for memory that is away, or waits",
    "cuMemAddressFree": "the library answers: error 1 for memory that is away",
    "cuMemAddressReserve": "an address that is wished for, where nothing is",
    "cuMemGetAddressRange_v2": "the library answers",
    "cuMemGetAddressRange": "an address of 32 bits, which no memory of the library has",
    "cuTexRefSetAddress": "an address of 32 bits, which no memory of the library has",
    "cuTexRefSetAddress2D": "an address of 32 bits, which no memory of the library has",
    "cuPointer*Attribute*": "the library answers, and waits before it asks the driver (attributes.c)",
    "cuMemGetHandleForAddressRange": "waits (attributes.c)",
    "cuMulticastBindAddr*": "the library makes the memory resident, for which it waits",
    "cuLogicalEndpointBindAddr": "the library makes the memory resident, for which it waits",
    "cuMemAdvise*": "of managed memory and of the host's; error 1 for any other (specified: cuda.h), away or not",
    "cuMemRangeGetAttribute*": "of managed memory and of the host's; error 1 for any other (specified: cuda.h), away or not",
    "cuMemGetLocationInfo": "of managed memory and of the host's; error 1 for any other (specified: cuda.h), away or not",
    "cuStreamAttachMemAsync*": "of managed memory and of the host's; error 1 for any other (specified: cuda.h), away or not",
    "cuMemPoolExportPointer": "pools that can be exported are the driver's; error 1 for any other memory, away or not",
    "cuGraphAddMemFreeNode": "memory of graphs, which is the driver's",
    "cuSurfObjectCreate": "only of arrays, which are the driver's, or of blocks that are resident (specified: cuda.h)",
    "cuUserObjectCreate": "an address of the host",
    "cuParamSetv": "an address of the host",
    "cuGraph*NodeGetParams": "returns an address",
    "cuGraphNodeGetParams": "returns an address",
}
"""By shell pattern."""


@cache
def waits() -> set[str]:
    listed = re.findall(r"^AWAITS\((\w+),", (ROOT / "shim/src/gputime/addresses.def").read_text(), re.MULTILINE)
    graphs = re.findall(
        r"^(?:UPDATE|INSTANTIATE)\((\w+),", (ROOT / "shim/src/memory/graph.c").read_text(), re.MULTILINE
    )
    return {*listed, *graphs}


def unaccounted(functions: dict[str, str]) -> list[str]:
    takes = {name for name, text in functions.items() if TAKES_ADDRESS.search(text)}
    return sorted(
        name for name in takes - reported() - waits() if not any(fnmatchcase(name, pattern) for pattern in NO_WAIT)
    )


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.parts[-3])
def test_every_function_that_takes_an_address_waits_or_is_listed(header: Path) -> None:
    assert unaccounted(parameters(header)) == []
    assert waits() <= set(parameters(header))


@pytest.mark.parametrize(
    ("name", "text"),
    [("cuMemDoubt", "CUdeviceptr at, size_t bytes"), ("cuGraphAddNode_v4", "CUgraph graph, CUgraphNodeParams *how")],
)
def test_a_function_of_a_newer_header_is_noticed(name: str, text: str) -> None:
    assert unaccounted({name: text}) == [name]


@pytest.mark.parametrize("pattern", NO_WAIT)
def test_a_reason_is_for_a_function_that_exists_and_does_not_wait(pattern: str) -> None:
    named = {name for header in HEADERS for name in parameters(header) if fnmatchcase(name, pattern)}
    assert named
    assert not named & waits()
