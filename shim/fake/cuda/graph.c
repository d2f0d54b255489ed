/* graph.c - graphs: nodes in the order they were added, run in that order.
 *
 * Memory of allocation nodes is counted at launch, in the device's graph pool, and stays reserved there until
 * cuDeviceGraphMemTrim, as the real driver keeps it. Dependencies are accepted and not needed: one queue a card.
 */
#include "internal.h"

#include <stdlib.h>

struct CUgraphNode_st {
    struct handle handle;
    enum node_kind kind;
    uint64_t ns, local; /* of a kernel */
    bool runtime;
    CUdeviceptr at; /* of an allocation or a free */
    struct CUgraph_st *graph, *child;
    struct CUgraphNode_st *next;
};

struct CUgraph_st {
    struct handle handle;
    struct CUgraphNode_st *first, **last;
    size_t nodes;
};

struct CUgraphExec_st {
    struct handle handle;
    struct CUgraph_st *graph; /* its own copy */
};

static bool graph_ok(CUgraph graph)
{
    return handle_is(graph, HANDLE_GRAPH);
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
    TRY(ready());
    CHECK(graph != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    *graph = handle_new(HANDLE_GRAPH, sizeof **graph);
    CHECK(*graph != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    (*graph)->last = &(*graph)->first;
    return CUDA_SUCCESS;
}

static CUresult add(CUgraph graph, enum node_kind kind, uint64_t ns, CUdeviceptr at, CUgraphNode *made)
{
    TRY(ready());
    CHECK(graph_ok(graph), CUDA_ERROR_INVALID_VALUE);
    CUgraphNode node = handle_new(HANDLE_NODE, sizeof *node);
    CHECK(node != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    node->kind = kind;
    node->ns = ns;
    node->at = at;
    node->graph = graph;
    lock();
    *graph->last = node;
    graph->last = &node->next;
    graph->nodes++;
    unlock();
    if (made != NULL)
        *made = node;
    return CUDA_SUCCESS;
}

CUresult capture_add(struct CUgraph_st *graph, enum node_kind kind, uint64_t ns)
{
    return add(graph, kind, ns, 0, NULL);
}

static CUresult kernel_node(CUgraph graph, CUfunction function, uint64_t ns, CUgraphNode *node)
{
    TRY(add(graph, NODE_KERNEL, ns, 0, node));
    (*node)->local = function->local;
    (*node)->runtime = function->runtime;
    return CUDA_SUCCESS;
}

CUresult capture_kernel(struct CUgraph_st *graph, CUfunction function, uint64_t ns)
{
    CUgraphNode node;
    return kernel_node(graph, function, ns, &node);
}

static CUresult alloc_node(CUgraph graph, int device, CUdeviceptr *at, size_t bytes, CUgraphNode *made)
{
    struct span *span;
    TRY(memory_new(SPAN_GRAPH, NULL, device, bytes, 0, &span)); /* an address now, memory at launch */
    lock();
    CUmemoryPool pool = cuda.device[device].graph_pool;
    unlock();
    if (pool == NULL) {
        TRY(pool_new(&pool, device, 0));
        lock();
        if (cuda.device[device].graph_pool == NULL)
            cuda.device[device].graph_pool = pool;
        unlock();
    }
    span->pool = cuda.device[device].graph_pool;
    *at = (CUdeviceptr)span->base;
    return add(graph, NODE_ALLOC, 0, *at, made);
}

CUresult capture_alloc(struct CUgraph_st *graph, int device, CUdeviceptr *at, size_t bytes)
{
    return alloc_node(graph, device, at, bytes, NULL);
}

CUresult capture_free(struct CUgraph_st *graph, CUdeviceptr at)
{
    return add(graph, NODE_FREE, 0, at, NULL);
}

EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t afters, const CUDA_KERNEL_NODE_PARAMS *how)
{
    uint64_t ns;
    (void)after, (void)afters;
    CHECK(how != NULL && node != NULL, CUDA_ERROR_INVALID_VALUE);
    CUfunction function = how->func != NULL ? how->func : (CUfunction)how->kern;
    CHECK(function_ok(function), CUDA_ERROR_INVALID_VALUE);
    TRY(function_ns(function, how->kernelParams, how->extra, &ns));
    return kernel_node(graph, function, ns, node);
}

EXPORT CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t afters, const CUDA_KERNEL_NODE_PARAMS_v1 *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    const CUDA_KERNEL_NODE_PARAMS longer = {.func = how->func, .kernelParams = how->kernelParams, .extra = how->extra};
    return cuGraphAddKernelNode_v2(node, graph, after, afters, &longer);
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t afters, CUDA_MEM_ALLOC_NODE_PARAMS *how)
{
    (void)after, (void)afters;
    CHECK(how != NULL && node != NULL && graph_ok(graph), CUDA_ERROR_INVALID_VALUE);
    TRY(device_ok(how->poolProps.location.id));
    return alloc_node(graph, how->poolProps.location.id, &how->dptr, how->bytesize, node);
}

EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t afters, CUdeviceptr at)
{
    (void)after, (void)afters;
    return add(graph, NODE_FREE, 0, at, node);
}

EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t afters)
{
    (void)after, (void)afters;
    return add(graph, NODE_EMPTY, 0, 0, node);
}

EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t afters, CUgraph child)
{
    (void)after, (void)afters;
    CHECK(graph_ok(child) && node != NULL, CUDA_ERROR_INVALID_VALUE);
    TRY(add(graph, NODE_CHILD, 0, 0, node));
    return cuGraphClone(&(*node)->child, child);
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    CHECK(graph_ok(graph) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    size_t at = 0;
    for (CUgraphNode node = graph->first; nodes != NULL && node != NULL && at < *count; node = node->next)
        nodes[at++] = node;
    *count = nodes == NULL ? graph->nodes : at;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    static const CUgraphNodeType types[] = {
        [NODE_EMPTY] = CU_GRAPH_NODE_TYPE_EMPTY,        [NODE_KERNEL] = CU_GRAPH_NODE_TYPE_KERNEL,
        [NODE_ALLOC] = CU_GRAPH_NODE_TYPE_MEM_ALLOC,    [NODE_FREE] = CU_GRAPH_NODE_TYPE_MEM_FREE,
        [NODE_HOST] = CU_GRAPH_NODE_TYPE_HOST,          [NODE_COPY] = CU_GRAPH_NODE_TYPE_MEMCPY,
        [NODE_FILL] = CU_GRAPH_NODE_TYPE_MEMSET,        [NODE_EVENT] = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        [NODE_CHILD] = CU_GRAPH_NODE_TYPE_GRAPH,
    };
    CHECK(handle_is(node, HANDLE_NODE) && type != NULL, CUDA_ERROR_INVALID_VALUE);
    *type = types[node->kind];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *how)
{
    CHECK(handle_is(node, HANDLE_NODE) && node->kind == NODE_ALLOC && how != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(how, 0, sizeof *how);
    lock();
    const struct span *span = span_find((uintptr_t)node->at);
    how->dptr = node->at;
    how->bytesize = span == NULL ? 0 : span->bytes;
    how->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    how->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    how->poolProps.location.id = span == NULL ? 0 : span->device;
    unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphClone(CUgraph *made, CUgraph graph)
{
    CHECK(graph_ok(graph) && made != NULL, CUDA_ERROR_INVALID_VALUE);
    TRY(cuGraphCreate(made, 0));
    for (CUgraphNode node = graph->first, copy; node != NULL; node = node->next) {
        TRY(add(*made, node->kind, node->ns, node->at, &copy));
        copy->child = node->child;
        copy->local = node->local;
        copy->runtime = node->runtime;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
    CHECK(handle_is(node, HANDLE_NODE) && node->kind == NODE_CHILD && graph != NULL, CUDA_ERROR_INVALID_VALUE);
    *graph = node->child;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    TRY(ready());
    CHECK(graph_ok(graph), CUDA_ERROR_INVALID_VALUE);
    for (CUgraphNode node = graph->first, next; node != NULL; node = next) {
        next = node->next;
        handle_free(node);
    }
    handle_free(graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    TRY(ready());
    CHECK(exec != NULL && graph_ok(graph), CUDA_ERROR_INVALID_VALUE);
    *exec = handle_new(HANDLE_EXEC, sizeof **exec);
    CHECK(*exec != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    return cuGraphClone(&(*exec)->graph, graph);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t room)
{
    if (error != NULL)
        *error = NULL;
    if (log != NULL && room > 0)
        log[0] = '\0';
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

ALIAS(cuGraphInstantiate, cuGraphInstantiate_v2)

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how)
{
    CHECK(how != NULL, CUDA_ERROR_INVALID_VALUE);
    how->hErrNode_out = NULL;
    how->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return cuGraphInstantiateWithFlags(exec, graph, how->flags);
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *result)
{
    TRY(ready());
    CHECK(handle_is(exec, HANDLE_EXEC) && graph_ok(graph) && result != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(result, 0, sizeof *result);
    cuGraphDestroy(exec->graph);
    return cuGraphClone(&exec->graph, graph);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    TRY(ready());
    CHECK(handle_is(exec, HANDLE_EXEC), CUDA_ERROR_INVALID_VALUE);
    cuGraphDestroy(exec->graph);
    handle_free(exec);
    return CUDA_SUCCESS;
}

static CUresult run_alloc(CUdeviceptr at)
{
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    lock();
    struct span *span = span_find((uintptr_t)at);
    if (span != NULL && span->kind == SPAN_GRAPH && !span->usable) {
        rc = pool_grow(span->pool, rounded(span->bytes, 512)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        span->usable = rc == CUDA_SUCCESS;
    }
    unlock();
    return rc;
}

static CUresult run(CUgraph graph, CUstream stream)
{
    for (CUgraphNode node = graph->first; node != NULL; node = node->next) {
        if (node->kind == NODE_KERNEL) {
            TRY(losses_launch(stream->ctx, node->local, node->runtime));
            stream_queue(stream, node->ns);
        } else if (node->kind == NODE_ALLOC)
            TRY(run_alloc(node->at));
        else if (node->kind == NODE_FREE)
            cuMemFreeAsync(node->at, stream);
        else if (node->kind == NODE_CHILD)
            TRY(run(node->child, stream));
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    CHECK(handle_is(exec, HANDLE_EXEC), CUDA_ERROR_INVALID_VALUE);
    if (stream->capture == NULL)
        return run(exec->graph, stream);
    CUgraphNode node;
    TRY(add(stream->capture, NODE_CHILD, 0, 0, &node));
    return cuGraphClone(&node->child, exec->graph);
}

EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream handle)
{
    CUstream stream;
    TRY(stream_get(handle, &stream));
    return handle_is(exec, HANDLE_EXEC) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    TRY(device_ok(device));
    lock();
    if (cuda.device[device].graph_pool != NULL)
        pool_shrink(cuda.device[device].graph_pool, 0);
    unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    TRY(device_ok(device));
    CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct CUmemPoolHandle_st none = {0};
    const struct CUmemPoolHandle_st *pool = cuda.device[device].graph_pool != NULL ? cuda.device[device].graph_pool : &none;
    switch ((int)attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = pool->used; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = pool->used_high; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = pool->reserved; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = pool->reserved_high; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}
