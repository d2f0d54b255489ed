/* graph.c - graphs: nodes in the order they were added, run in that order.
 *
 * Memory of allocation nodes is counted at launch, in the device's graph pool, and stays reserved there until
 * cuDeviceGraphMemTrim, as the real driver keeps it. Dependencies are accepted and not needed: one queue a card.
 */
#include "internal.h"

/* A graph, or an executable one: a copy that only cuGraphExecUpdate changes. */
struct CUgraph_st {
    struct handle handle;
    CUgraphNode first, *last;
    size_t nodes;
};

CUresult graph_new(CUgraph *made, enum handle_kind kind)
{
    TRY(ready());
    CUgraph graph;
    TRY(handle_new(&graph, kind, sizeof *graph));
    graph->last = &graph->first;
    *made = graph;
    return CUDA_SUCCESS;
}

static void append(CUgraph graph, CUgraphNode node)
{
    SCOPED tables = hold(&cuda.lock);
    node->graph = graph;
    *graph->last = node;
    graph->last = &node->next;
    graph->nodes++;
}

static CUresult append_nodes_of(CUgraph graph, CUgraph other)
{
    for (CUgraphNode node = other->first; node != NULL; node = node->next) {
        CUgraphNode twin;
        TRY(handle_new(&twin, HANDLE_NODE, sizeof *twin));
        twin->work = node->work;
        append(graph, twin);
    }
    return CUDA_SUCCESS;
}

CUresult graph_copy(CUgraph *made, enum handle_kind kind, CUgraph graph)
{
    TRY(graph_new(made, kind));
    return append_nodes_of(*made, graph);
}

CUresult node_add(CUgraph graph, struct work work, CUgraphNode *made)
{
    TRY(handle_ok(graph, HANDLE_GRAPH, CUDA_ERROR_INVALID_VALUE));
    if (work.child != NULL)
        TRY(graph_copy(&work.child, HANDLE_GRAPH, work.child));
    CUgraphNode node;
    TRY(handle_new(&node, HANDLE_NODE, sizeof *node));
    node->work = work;
    append(graph, node);
    if (made != NULL)
        *made = node;
    return CUDA_SUCCESS;
}

static struct work kernel_of(CUfunction function)
{
    return (struct work){.type = CU_GRAPH_NODE_TYPE_KERNEL, .function = function, .local = function->local, .runtime = function->runtime};
}

CUresult node_kernel(CUgraph graph, CUfunction function, void **parameters, void **extra, CUgraphNode *made)
{
    CHECK(handle_is(function, HANDLE_FUNCTION), CUDA_ERROR_INVALID_VALUE);
    struct work work = kernel_of(function);
    TRY(function_ns(function, parameters, extra, &work.ns));
    return node_add(graph, work, made);
}

/* The node is one of the graph that was instantiated; the executable graph has a copy of it at the same place. */
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *how)
{
    TRY(handle_ok(exec, HANDLE_EXEC, CUDA_ERROR_INVALID_VALUE));
    TRY(handle_ok(node, HANDLE_NODE, CUDA_ERROR_INVALID_VALUE));
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    CUfunction function = how->func != NULL ? how->func : (CUfunction)how->kern;
    CHECK(handle_is(function, HANDLE_FUNCTION), CUDA_ERROR_INVALID_VALUE);
    CUgraphNode copy = ((CUgraph)exec)->first;
    for (CUgraphNode before = node->graph->first; before != node && before != NULL && copy != NULL; before = before->next)
        copy = copy->next;
    CHECK(copy != NULL && copy->work.type == CU_GRAPH_NODE_TYPE_KERNEL, CUDA_ERROR_INVALID_VALUE);
    const uint64_t ns = copy->work.ns;
    copy->work = kernel_of(function);
    copy->work.ns = ns;
    return CUDA_SUCCESS;
}

/* An address now, memory at launch. */
CUresult node_alloc(CUgraph graph, int device, size_t bytes, CUdeviceptr *at, CUgraphNode *made)
{
    CUmemoryPool pool;
    struct span *span;
    TRY(handle_ok(graph, HANDLE_GRAPH, CUDA_ERROR_INVALID_VALUE));
    TRY(pool_get(device, POOL_GRAPH, &pool));
    TRY(memory_new(&(struct span){.kind = SPAN_GRAPH, .device = device, .pool = pool, .pages = PAGES_POOL, .bytes = bytes}, &span));
    *at = (CUdeviceptr)span->base;
    return node_add(graph, (struct work){.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .at = *at}, made);
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    TRY(handle_ok(graph, HANDLE_GRAPH, CUDA_ERROR_INVALID_VALUE));
    CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    size_t at = 0;
    for (CUgraphNode node = graph->first; nodes != NULL && node != NULL && at < *count; node = node->next)
        nodes[at++] = node;
    *count = nodes == NULL ? graph->nodes : at;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *how)
{
    TRY(handle_ok(node, HANDLE_NODE, CUDA_ERROR_INVALID_VALUE));
    CHECK(how != NULL && node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC, CUDA_ERROR_INVALID_VALUE);
    SCOPED tables = hold(&cuda.lock);
    const struct span *span = span_find((uintptr_t)node->work.at);
    memset(how, 0, sizeof *how);
    how->dptr = node->work.at;
    how->bytesize = span == NULL ? 0 : span->bytes;
    how->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    how->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    how->poolProps.location.id = span == NULL ? 0 : span->device;
    return CUDA_SUCCESS;
}

static void clear(CUgraph graph)
{
    for (CUgraphNode node = graph->first, next; node != NULL; node = next) {
        next = node->next;
        handle_free(node);
    }
    graph->first = NULL;
    graph->last = &graph->first;
    graph->nodes = 0;
}

CUresult graph_end(CUgraph graph, enum handle_kind kind)
{
    TRY(handle_ok(graph, kind, CUDA_ERROR_INVALID_VALUE));
    clear(graph);
    handle_free(graph);
    return CUDA_SUCCESS;
}

CUresult graph_instantiate(CUgraphExec *exec, CUgraph graph)
{
    CHECK(exec != NULL && handle_is(graph, HANDLE_GRAPH), CUDA_ERROR_INVALID_VALUE);
    return graph_copy((CUgraph *)exec, HANDLE_EXEC, graph);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room)
{
    if (error != NULL)
        *error = NULL;
    if (log != NULL && room > 0)
        log[0] = '\0';
    return graph_instantiate(exec, graph);
}

ALIAS(cuGraphInstantiate, cuGraphInstantiate_v2)

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    how->hErrNode_out = NULL;
    how->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return graph_instantiate(exec, graph);
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *result)
{
    TRY(handle_ok(exec, HANDLE_EXEC, CUDA_ERROR_INVALID_VALUE));
    CHECK(handle_is(graph, HANDLE_GRAPH) && result != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(result, 0, sizeof *result);
    clear((CUgraph)exec);
    return append_nodes_of((CUgraph)exec, graph);
}

static CUresult run_alloc(CUdeviceptr at)
{
    struct span *span;
    SCOPED tables = hold(&cuda.lock);
    TRY(span_get(at, SPAN_GRAPH, CUDA_ERROR_INVALID_VALUE, &span));
    CHECK(!span->usable, CUDA_ERROR_INVALID_VALUE);
    span->usable = pool_grow(span->pool, rounded(span->bytes, GRAIN));
    return span->usable ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult run(CUgraph graph, CUstream stream)
{
    for (CUgraphNode node = graph->first; node != NULL; node = node->next) {
        if (node->work.type == CU_GRAPH_NODE_TYPE_KERNEL) {
            TRY(losses_launch(stream->ctx, node->work.local, node->work.runtime));
            stream_queue(stream, node->work.ns);
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
            TRY(run_alloc(node->work.at));
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
            memory_free(node->work.at, SPAN_DEVICE);
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_GRAPH) {
            TRY(run(node->work.child, stream));
        }
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(handle_is(exec, HANDLE_EXEC), CUDA_ERROR_INVALID_VALUE);
    if (stream->capture == NULL)
        return run((CUgraph)exec, stream);
    return node_add(stream->capture, (struct work){.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = (CUgraph)exec}, NULL);
}
