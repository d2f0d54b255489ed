"""Graphs and captures, for expressions of gpu.py."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from gpu_code import deep
from gpu_driver import MIB, cuda
from gpu_structs import AllocNode, Instantiate, Location, PoolProps


def graph(*mib: int, device: int = 0) -> list[int]:
    """A graph with an allocation node and a free node of each size."""
    made, node = c_void_p(), c_void_p()
    rc = cuda.cuGraphCreate(byref(made), 0)
    for size in mib:
        how = AllocNode(pool=PoolProps(type=1, location=Location(1, device)), bytes=size * MIB)
        rc = rc or cuda.cuGraphAddMemAllocNode(byref(node), made, None, c_size_t(0), byref(how))
        rc = rc or cuda.cuGraphAddMemFreeNode(byref(node), made, None, c_size_t(0), c_uint64(how.at))
    return [rc, made.value or 0]


def graph_in_graph(child: int) -> list[int]:
    made, node = c_void_p(), c_void_p()
    rc = cuda.cuGraphCreate(byref(made), 0)
    rc = rc or cuda.cuGraphAddChildGraphNode(byref(node), made, None, c_size_t(0), c_void_p(child))
    return [rc, made.value or 0]


def graph_ready(made: int, way: str = "WithFlags", flags: int = 0) -> list[int]:
    """Instantiates, by one of the driver's functions."""
    exec_ = c_void_p()
    call = getattr(cuda, f"cuGraphInstantiate{way}")
    if way.startswith("WithParams"):
        return [call(byref(exec_), c_void_p(made), byref(Instantiate(flags=flags))), exec_.value or 0]
    if way == "WithFlags":
        return [call(byref(exec_), c_void_p(made), c_uint64(flags)), exec_.value or 0]
    return [call(byref(exec_), c_void_p(made), None, None, c_size_t(0)), exec_.value or 0]


def graph_kinds(made: int) -> list[int]:
    """The CUgraphNodeType of its nodes."""
    count, kind = c_size_t(), c_int()
    rc = cuda.cuGraphGetNodes(c_void_p(made), None, byref(count))
    nodes = (c_void_p * count.value)()
    rc = rc or cuda.cuGraphGetNodes(c_void_p(made), nodes, byref(count))
    kinds = []
    for node in nodes:
        rc = rc or cuda.cuGraphNodeGetType(c_void_p(node), byref(kind))
        kinds.append(kind.value)
    return [rc, *kinds]


def graph_run(exec_: int, stream: int = 0, suffix: str = "") -> list[int]:
    return [getattr(cuda, f"cuGraphLaunch{suffix}")(c_void_p(exec_), c_void_p(stream))]


def graph_end(exec_: int) -> list[int]:
    return [cuda.cuGraphExecDestroy(c_void_p(exec_))]


def graph_trim(device: int = 0) -> list[int]:
    return [cuda.cuDeviceGraphMemTrim(device)]


def capture(stream: int, mode: int = 0) -> list[int]:
    return [cuda.cuStreamBeginCapture_v2(c_void_p(stream), mode)]


def captured(stream: int) -> list[int]:
    made = c_void_p()
    return [cuda.cuStreamEndCapture(c_void_p(stream), byref(made)), made.value or 0]


def deep_graph(local: int) -> list[int]:
    """A kernel of that much local memory, captured and launched as a graph."""
    stream = c_void_p()
    rc = cuda.cuStreamCreate(byref(stream), 1) or capture(stream.value or 0)[0] or deep(local, stream.value or 0)[0]
    made = captured(stream.value or 0)[1]
    return [rc or graph_run(graph_ready(made)[1])[0]]
