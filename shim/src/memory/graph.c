/* graph.c - graphs with memory of their own.
 *
 * An allocation node, explicit or captured, is an address without memory until the graph is launched; the memory then stays
 * reserved for the device's graphs until it is trimmed. So what a graph allocates is added up when it is instantiated, taken
 * from the lease before its first launch, and settled against what the driver reserves for graphs (pool.c). A graph
 * that was launched since the last trim has its memory mapped and is never refused for want of it: such a refusal would end
 * a program that did nothing new. Graphs that share their memory, as they ran one after another, may so need more when they are launched
 * at once, and pass the limit (docs/operations/limits.md). For a process whose graphs allocate nothing, a launch costs one load.
 *
 * Kernels are checked when a graph is instantiated and when those of an executable one are replaced: what would make the driver grow
 * stacks that do not fit is refused there, for a launch hook does not see it. An update changes no allocation node.
 *
 * The driver may check the addresses of a graph's copies and fills when it is instantiated or updated, so these wait for memory that is away, as
 * those do that add such nodes (gputime/addresses.def).
 */
#include "hooks/hook.h"
#include "gputime/launching.h"
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>

enum {
    MEMCPY_BATCH = 14, /* CU_GRAPH_NODE_TYPE_MEMCPY_BATCH: of the types that are newer than conditional nodes, one without kernels */
    DEPTH_LIMIT = 64,  /* children of children; the driver's own limit is not documented */
    NODES_FREE = 1000, /* measured: so many kernel nodes take nothing */
    NODE_BYTES = 4096  /* measured: 2,202 of 20,000 */
};

struct need {
    struct pool *pool;
    uint64_t bytes;
    _Atomic unsigned trims; /* of the pool, at the last launch, and 1 more; 0 = never launched */
};

struct graph {
    unsigned kernels; /* nodes */
    bool refused;     /* one of them does not fit, or the driver does not report what it is */
    unsigned needs;
    struct need need[DEVICES_LIMIT];
};

static bool add_node(struct graph *sum, CUgraphNode node)
{
    CUDA_MEM_ALLOC_NODE_PARAMS how;
    if (tangram.driver.cuGraphMemAllocNodeGetParams(node, &how) != CUDA_SUCCESS)
        return false;
    if (gpu_of_location(&how.poolProps.location) == NULL)
        return true;
    struct pool *pool = pool_of_graphs(how.poolProps.location.id & 0xff);
    unsigned i = 0;
    while (i < sum->needs && sum->need[i].pool != pool)
        i++;
    if (pool == NULL || i == DEVICES_LIMIT)
        return false;
    sum->need[i].pool = pool;
    sum->need[i].bytes += (how.bytesize + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    sum->needs = i == sum->needs ? i + 1 : sum->needs;
    return true;
}

static CUfunction kernel_of(CUfunction function, CUkernel kernel)
{
    return function != NULL ? function : (CUfunction)(void *)kernel;
}

static void add_kernel(struct graph *sum, CUgraphNode node)
{
    CUDA_KERNEL_NODE_PARAMS how = {.func = NULL};
    sum->kernels++;
    if (!atomic_load(&tangram.hot.noted) || !HAS(cuGraphKernelNodeGetParams_v2)) /* a driver that lacks it is reported */
        return;
    CUresult rc = tangram.driver.cuGraphKernelNodeGetParams_v2(node, &how);
    sum->refused = sum->refused || rc != CUDA_SUCCESS || kernel_refused(kernel_of(how.func, how.kern));
}

static bool add_up(struct graph *sum, CUgraph graph, unsigned depth);

/* Kernels that the driver does not show: they may be any of this process. */
static void add_unseen(struct graph *sum)
{
    sum->refused = sum->refused || (atomic_load(&tangram.hot.noted) && !stack_fits_any());
}

/* Which of a conditional node's bodies run is decided on the GPU: all count. Before CUDA 13.2 the driver does not show them. */
static bool add_bodies(struct graph *sum, CUgraphNode node, unsigned depth)
{
    CUgraphNodeParams how = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
    bool good = true;
    if (!HAS(cuGraphNodeGetParams) || tangram.driver.cuGraphNodeGetParams(node, &how) != CUDA_SUCCESS ||
        how.type != CU_GRAPH_NODE_TYPE_CONDITIONAL || how.conditional.phGraph_out == NULL)
        add_unseen(sum);
    else
        for (unsigned i = 0; i < how.conditional.size && good; i++)
            good = add_up(sum, how.conditional.phGraph_out[i], depth + 1);
    return good;
}

/* False when the graph could not be read: its memory is then unknown. If the driver would accept the graph all the same, it is refused. */
static bool add_up(struct graph *sum, CUgraph graph, unsigned depth)
{
    size_t count = 0;
    CUresult rc = depth > DEPTH_LIMIT ? CUDA_ERROR_NOT_SUPPORTED : tangram.driver.cuGraphGetNodes(graph, NULL, &count);
    if (rc != CUDA_SUCCESS) {
        sum->refused = sum->refused || !is_drivers_answer(rc);
        return false;
    }
    CUgraphNode *node = malloc(count * sizeof *node + 1);
    bool good = node != NULL && (count == 0 || tangram.driver.cuGraphGetNodes(graph, node, &count) == CUDA_SUCCESS);
    for (size_t i = 0; i < count && good; i++) {
        CUgraphNodeType type;
        CUgraph child;
        if (tangram.driver.cuGraphNodeGetType(node[i], &type) != CUDA_SUCCESS)
            good = false;
        else if (type == CU_GRAPH_NODE_TYPE_KERNEL)
            add_kernel(sum, node[i]);
        else if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            good = add_node(sum, node[i]);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && HAS(cuGraphChildGraphNodeGetGraph))
            good = tangram.driver.cuGraphChildGraphNodeGetGraph(node[i], &child) == CUDA_SUCCESS && add_up(sum, child, depth + 1);
        else if (type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
            good = add_bodies(sum, node[i], depth);
        else if ((int)type > CU_GRAPH_NODE_TYPE_CONDITIONAL && (int)type != MEMCPY_BATCH)
            add_unseen(sum);
    }
    free(node);
    sum->refused = sum->refused || !good; /* it has nodes: it is a graph */
    return good;
}

/* What instantiating or launching may take, one growth a device. */
static bool begin(struct graph *graph, struct growth *growth)
{
    for (unsigned i = 0; i < graph->needs; i++) {
        struct need *need = &graph->need[i];
        bool has_it = atomic_load(&need->trims) == atomic_load(&need->pool->trims) + 1;
        if (has_it ? growth_again(&growth[i], need->pool, need->bytes) : growth_begin(&growth[i], need->pool, need->bytes))
            continue;
        while (i-- > 0)
            growth_end(&growth[i]);
        return false;
    }
    return true;
}

/* More than was requested cannot be undone once a graph runs: it is settled with what is freed next. */
static void end(struct graph *graph, struct growth *growth, bool has_run)
{
    for (unsigned i = 0; i < graph->needs; i++) {
        if (has_run)
            atomic_store(&graph->need[i].trims, atomic_load(&graph->need[i].pool->trims) + 1);
        growth_end(&growth[i]);
    }
}

struct making {
    struct gpu *gpu;     /* whose context grows by its nodes */
    struct graph *graph; /* NULL when it allocates nothing */
    struct growth growth[DEVICES_LIMIT];
};

static bool make_begin(struct making *making, CUgraph graph, bool uploads)
{
    making->graph = NULL;
    making->gpu = NULL;
    if (grant_ready() == GRANT_NONE || !HAS(cuGraphGetNodes) || !HAS(cuGraphNodeGetType))
        return true;
    struct graph *sum = calloc(1, sizeof *sum);
    if (sum == NULL)
        return false;
    bool known = add_up(sum, graph, 0); /* a graph that cannot be read is not a graph: the driver's error is the answer */
    struct gpu *gpu = known && sum->kernels > NODES_FREE ? current_gpu() : NULL;
    bool fits = !sum->refused && bound_begin(gpu, (uint64_t)sum->kernels * NODE_BYTES);
    making->gpu = fits ? gpu : NULL;
    if (fits && known && sum->needs > 0 && (!uploads || begin(sum, making->growth))) {
        making->graph = sum;
        return true;
    }
    fits = fits && (!known || sum->needs == 0);
    if (!fits)
        bound_end(making->gpu);
    free(sum);
    return fits;
}

static CUresult make_end(struct making *making, CUresult rc, CUgraphExec *exec, bool uploads)
{
    struct graph *graph = making->graph;
    bound_end(making->gpu);
    if (graph == NULL)
        return rc;
    if (uploads)
        end(graph, making->growth, rc == CUDA_SUCCESS);
    if (rc != CUDA_SUCCESS) {
        free(graph);
        return rc;
    }
    if (!table_own((struct owned){OWNED_AS(OWNED_GRAPH, (uintptr_t)*exec), 0, graph->need[0].pool->gpu, graph})) {
        tangram.driver.cuGraphExecDestroy(*exec);
        free(graph);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    atomic_fetch_add(&tangram.graphs, 1);
    for (unsigned i = 0; i < graph->needs; i++)
        pool_settle(graph->need[i].pool);
    return rc;
}

#define INSTANTIATE(name, params, uploads, ...)                                                                                \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct making making;                                                                                                  \
        bool at_once = uploads;                                                                                                \
        await_memory();                                                                                                        \
        if (!make_begin(&making, graph, at_once))                                                                              \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        return make_end(&making, tangram.driver.name(__VA_ARGS__), exec, at_once);                                             \
    }

#define UPLOADS (how != NULL && (how->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0)
INSTANTIATE(cuGraphInstantiate, (CUgraphExec * exec, CUgraph graph, CUgraphNode *error, char *log, size_t capacity), false, exec,
            graph, error, log, capacity)
INSTANTIATE(cuGraphInstantiate_v2, (CUgraphExec * exec, CUgraph graph, CUgraphNode *error, char *log, size_t capacity), false, exec,
            graph, error, log, capacity)
INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags),
            (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0, exec, graph, flags)
INSTANTIATE(cuGraphInstantiateWithParams, (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how), UPLOADS, exec,
            graph, how)
INSTANTIATE(cuGraphInstantiateWithParams_ptsz, (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how), UPLOADS,
            exec, graph, how)

static CUresult run(CUresult (*call)(CUgraphExec, CUstream), CUgraphExec exec, CUstream stream, bool per_thread)
{
    struct owned found;
    struct growth growth[DEVICES_LIMIT];
    if (!table_find(OWNED_AS(OWNED_GRAPH, (uintptr_t)exec), &found) || capturing(stream, per_thread))
        return call(exec, stream);
    if (!begin(found.of, growth))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = call(exec, stream);
    end(found.of, growth, rc == CUDA_SUCCESS);
    return rc;
}

#define RUN(name, per_thread)                                                                                                  \
    EXPORT CUresult name(CUgraphExec exec, CUstream stream)                                                                    \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        activity_other(stream, per_thread);                                                                                    \
        if (atomic_load_explicit(&tangram.graphs, memory_order_relaxed) == 0)                                                  \
            return tangram.driver.name(exec, stream);                                                                          \
        return run(tangram.driver.name, exec, stream, per_thread);                                                             \
    }

RUN(cuGraphLaunch, false)
RUN(cuGraphLaunch_ptsz, true)
RUN(cuGraphUpload, false)
RUN(cuGraphUpload_ptsz, true)

/* What an executable graph is to run instead. False: refuse it. */
static bool kernels_fit(CUgraph graph)
{
    if (!atomic_load(&tangram.hot.noted) || grant_ready() == GRANT_NONE || !HAS(cuGraphGetNodes) || !HAS(cuGraphNodeGetType))
        return true;
    struct graph *sum = calloc(1, sizeof *sum);
    if (sum == NULL)
        return false;
    add_up(sum, graph, 0);
    bool fits = !sum->refused;
    free(sum);
    return fits;
}

static bool node_fits(const CUgraphNodeParams *how)
{
    if (how == NULL)
        return true;
    if (how->type == CU_GRAPH_NODE_TYPE_KERNEL)
        return !kernel_refused(kernel_of(how->kernel.func, how->kernel.kern));
    return how->type != CU_GRAPH_NODE_TYPE_GRAPH || kernels_fit(how->graph.graph);
}

#define UPDATE(name, params, fits, ...)                                                                                        \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        await_memory();                                                                                                        \
        return (fits) ? tangram.driver.name(__VA_ARGS__) : CUDA_ERROR_OUT_OF_MEMORY;                                           \
    }

UPDATE(cuGraphExecUpdate, (CUgraphExec exec, CUgraph graph, CUgraphNode *error, CUgraphExecUpdateResult *result),
       kernels_fit(graph), exec, graph, error, result)
UPDATE(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *result), kernels_fit(graph), exec,
       graph, result)
UPDATE(cuGraphExecKernelNodeSetParams, (CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *how),
       how == NULL || !kernel_refused(how->func), exec, node, how)
UPDATE(cuGraphExecKernelNodeSetParams_v2, (CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *how),
       how == NULL || !kernel_refused(kernel_of(how->func, how->kern)), exec, node, how)
UPDATE(cuGraphExecChildGraphNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraph graph), kernels_fit(graph), exec, node,
       graph)
UPDATE(cuGraphExecNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *how), node_fits(how), exec, node, how)

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    NEEDS(cuGraphExecDestroy);
    struct owned was;
    bool ours = atomic_load(&tangram.graphs) > 0 && table_disown(OWNED_AS(OWNED_GRAPH, (uintptr_t)exec), &was);
    CUresult rc = tangram.driver.cuGraphExecDestroy(exec);
    if (ours && rc == CUDA_SUCCESS) {
        atomic_fetch_sub(&tangram.graphs, 1);
        free(was.of);
    } else if (ours) {
        table_own(was);
    }
    return rc;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    NEEDS(cuDeviceGraphMemTrim);
    struct pool *pool = grant_ready() == GRANT_NONE ? NULL : pool_of_graphs(device);
    if (pool != NULL)
        atomic_fetch_add(&pool->trims, 1); /* before the call: a concurrent launch must not count on its memory */
    CUresult rc = tangram.driver.cuDeviceGraphMemTrim(device);
    if (pool != NULL && pool->gpu != NULL)
        pool_settle(pool);
    return rc;
}
