"""Graphs of explicit kernel nodes, for a worker: `__import__('kernels').updated(...)`."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_uint, c_void_p

from gpu_driver import cuda
from gpu_graphs import graph_ready, graph_run


class KernelNode(ctypes.Structure):
    _fields_ = [
        ("func", c_void_p),
        ("dims", c_uint * 7),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    ]


def function(local: int) -> int:
    made, found = c_void_p(), c_void_p()
    image = f"//fake deep us=0 local={local}\n.visible .entry deep() {{ ret; }}\n".encode()
    rc = cuda.cuModuleLoadData(byref(made), image) or cuda.cuModuleGetFunction(byref(found), made, b"deep")
    assert rc == 0, rc
    return found.value or 0


def node_of(kernel: int) -> KernelNode:
    return KernelNode(func=kernel, dims=(c_uint * 7)(1, 1, 1, 1, 1, 1, 0))


def graph_of(kernel: int) -> tuple[int, int]:
    """A graph with one explicit kernel node, and the node."""
    made, node = c_void_p(), c_void_p()
    rc = cuda.cuGraphCreate(byref(made), 0)
    rc = rc or cuda.cuGraphAddKernelNode_v2(byref(node), made, None, c_size_t(0), byref(node_of(kernel)))
    assert rc == 0, rc
    return made.value or 0, node.value or 0


def made(local: int) -> list[int]:
    """Of an explicit node: instantiated, and run where that is not refused."""
    rc, ready = graph_ready(graph_of(function(local))[0])
    return [rc or graph_run(ready)[0]]


def updated(before: int, after: int, way: str) -> list[int]:
    """Replaces the kernel of a graph by one with so much local memory, and runs it: the answer of the update."""
    graph, node = graph_of(function(before))
    rc, ready = graph_ready(graph)
    assert rc == 0, rc
    kernel = function(after)
    if way == "cuGraphExecUpdate_v2":
        rc = cuda.cuGraphExecUpdate_v2(c_void_p(ready), c_void_p(graph_of(kernel)[0]), byref((ctypes.c_char * 64)()))
    else:
        rc = cuda.cuGraphExecKernelNodeSetParams_v2(c_void_p(ready), c_void_p(node), byref(node_of(kernel)))
    run = graph_run(ready)[0]
    return [rc or run]
