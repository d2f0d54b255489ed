/* graph.c - graphs: nodes in the order they were added, run in that order.
 *
 * Memory of allocation nodes is counted at launch, in the device's graph pool, and stays reserved there until
 * cuDeviceGraphMemTrim, as the real driver keeps it. Dependencies are accepted and not needed: one queue a GPU.
 * An executable graph is a copy that only cuGraphExecUpdate changes.
 */
#include "internal.h"
#include "calls.h"

static void append(CUgraph graph, CUgraphNode node)
{
    SCOPED tables = locked(&cuda.lock);
    CUgraphNode *end = &graph->first;
    while (*end != NULL)
        end = &(*end)->next;
    node->graph = graph;
    *end = node;
}

static CUresult append_nodes_of(CUgraph graph, CUgraph other)
{
    for (CUgraphNode node = other->first, twin; node != NULL; node = node->next) {
        TRY(MAKE(&twin, HANDLE_NODE, CUgraphNode_st, .work = node->work));
        append(graph, twin);
    }
    return CUDA_SUCCESS;
}

static CUresult graph_copy(CUgraph *made, enum handle_kind kind, CUgraph graph)
{
    TRY(MAKE(made, kind, CUgraph_st, .first = NULL));
    return append_nodes_of(*made, graph);
}

CUresult node_add(CUgraph graph, struct work work, CUgraphNode *made)
{
    TRY(handle_ok(graph, HANDLE_GRAPH, CUDA_ERROR_INVALID_VALUE));
    if (work.child != NULL)
        TRY(graph_copy(&work.child, HANDLE_GRAPH, work.child));
    CUgraphNode node;
    TRY(MAKE(&node, HANDLE_NODE, CUgraphNode_st, .work = work));
    append(graph, node);
    PUT(made, node);
    return CUDA_SUCCESS;
}

static struct work kernel_of(CUfunction function, const struct job *job)
{
    return (struct work){.type = CU_GRAPH_NODE_TYPE_KERNEL, .function = function, .job = *job, .local = function->local, .runtime = function->runtime};
}

CUresult node_kernel(CUgraph graph, CUfunction function, const struct job *job, CUgraphNode *made)
{
    return node_add(graph, kernel_of(function, job), made);
}

static CUresult add_kernel(CUgraph graph, CUfunction function, void **parameters, void **extra, CUgraphNode *made)
{
    struct job job;
    CHECK(handle_is(function, HANDLE_FUNCTION), CUDA_ERROR_INVALID_VALUE);
    TRY(function_job(function, parameters, extra, &job));
    return node_kernel(graph, function, &job, made);
}

/* The node is one of the graph that was instantiated; the executable graph has a copy of it at the same place. */
static CUresult exec_kernel(CUgraph exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *how)
{
    const CUfunction function = how->func != NULL ? how->func : (CUfunction)how->kern;
    CHECK(handle_is(function, HANDLE_FUNCTION), CUDA_ERROR_INVALID_VALUE);
    CUgraphNode copy = exec->first;
    for (CUgraphNode before = node->graph->first; before != node && before != NULL && copy != NULL; before = before->next)
        copy = copy->next;
    CHECK(copy != NULL && copy->work.type == CU_GRAPH_NODE_TYPE_KERNEL, CUDA_ERROR_INVALID_VALUE);
    struct job job = {.kind = JOB_TIME, .ns = copy->work.job.ns};
    if (how->kernelParams != NULL)
        TRY(function_job(function, how->kernelParams, how->extra, &job));
    copy->work = kernel_of(function, &job);
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

static CUresult add_fill(CUgraph graph, const CUDA_MEMSET_NODE_PARAMS *how, CUgraphNode *made)
{
    const struct job job = {.kind = JOB_FILL, .value = how->value, .element = how->elementSize, .ends = AT_DEVICE,
                            .area = {.at = how->dst, .at_pitch = how->pitch, .width = how->width * how->elementSize, .rows = how->height}};
    return node_add(graph, (struct work){.type = CU_GRAPH_NODE_TYPE_MEMSET, .job = job}, made);
}

static CUresult list_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    size_t at = 0;
    for (CUgraphNode node = graph->first; node != NULL && (nodes == NULL || at < *count); node = node->next, at++)
        if (nodes != NULL)
            nodes[at] = node;
    *count = at;
    return CUDA_SUCCESS;
}

static void clear(CUgraph graph)
{
    for (CUgraphNode node = graph->first, next; node != NULL; node = next) {
        next = node->next;
        handle_free(node);
    }
    graph->first = NULL;
}

static CUresult graph_end(CUgraph graph, enum handle_kind kind)
{
    TRY(handle_ok(graph, kind, CUDA_ERROR_INVALID_VALUE));
    clear(graph);
    handle_free(graph);
    return CUDA_SUCCESS;
}

static CUresult exec_update(CUgraph exec, CUgraph graph, CUgraphExecUpdateResultInfo *result)
{
    memset(result, 0, sizeof *result);
    clear(exec);
    return append_nodes_of(exec, graph);
}

static CUresult run_alloc(CUdeviceptr at)
{
    struct span *span;
    SCOPED tables = locked(&cuda.lock);
    TRY(span_get(at, SPAN_GRAPH, CUDA_ERROR_INVALID_VALUE, &span));
    CHECK(!span->usable, CUDA_ERROR_INVALID_VALUE);
    span->usable = pool_grow(span->pool, span->bytes);
    return span->usable ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult run(CUgraph graph, CUstream stream)
{
    for (CUgraphNode node = graph->first; node != NULL; node = node->next) {
        if (node->work.type == CU_GRAPH_NODE_TYPE_KERNEL) {
            TRY(losses_launch(stream->ctx, node->work.local, node->work.runtime));
            TRY(launch_job(stream, &node->work.job));
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
            TRY(run_alloc(node->work.at));
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
            free_behind(stream, node->work.at);
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_MEMCPY || node->work.type == CU_GRAPH_NODE_TYPE_MEMSET || node->work.type == CU_GRAPH_NODE_TYPE_HOST) {
            TRY(stream_job(stream, node->work.type, &node->work.job));
        } else if (node->work.type == CU_GRAPH_NODE_TYPE_GRAPH) {
            TRY(run(node->work.child, stream));
        }
    }
    return CUDA_SUCCESS;
}

static CUresult graph_launch(CUgraph exec, CUstream stream)
{
    if (stream->capture == NULL)
        return run(exec, stream);
    return node_add(stream->capture, (struct work){.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = exec}, NULL);
}

#include "graph.def"
