/* unit_code.c - what kernels take: stacks that a launch or a graph would make the driver grow; and which GPU a thread's context is on. Sizes read
 * from images are in unit_images.c.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. The driver is a few functions of this file. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/hooks/hook.h"
#include "../src/memory/memory.h"
#include "unit_images.h"

#undef NDEBUG

/* An H200 with one context, whose stacks grow at a launch as the driver's do. */
enum { THREADS = 270336 };
static size_t stack = 1024;
static int local;
static unsigned launches;

static CUresult get_current(CUcontext *context)
{
    *context = (CUcontext)(uintptr_t)0x1000;
    return CUDA_SUCCESS;
}
static CUdevice device_there; /* of the context */
static CUresult get_device(CUdevice *device)
{
    *device = device_there;
    return CUDA_SUCCESS;
}
static CUresult get_limit(size_t *value, CUlimit limit)
{
    *value = limit == 0 ? stack : 0;
    return CUDA_SUCCESS;
}
static CUresult set_limit(CUlimit limit, size_t value)
{
    stack = limit == 0 ? value : stack;
    return CUDA_SUCCESS;
}
static CUresult device_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    *value = attribute == 16 ? 132 : 2048;
    return CUDA_SUCCESS;
}
static CUresult get_function(CUfunction *function, CUmodule module, const char *name)
{
    (void)module;
    *function = (CUfunction)(uintptr_t)name;
    return CUDA_SUCCESS;
}
static CUresult function_attribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    (void)function;
    *value = attribute == 3 ? local : 0;
    return CUDA_SUCCESS;
}
static CUresult launch(CUfunction function, int width, int height)
{
    (void)function, (void)width, (void)height;
    launches++;
    stack = (size_t)local > stack ? (size_t)local : stack;
    return CUDA_SUCCESS;
}

static struct gpu *h200(uint64_t lease_bytes)
{
    struct gpu *gpu = &tangram.grant.gpu[0];
    tangram.driver.cuCtxGetCurrent = get_current;
    tangram.driver.cuCtxGetDevice = get_device;
    tangram.driver.cuCtxGetLimit = get_limit;
    tangram.driver.cuCtxSetLimit = set_limit;
    tangram.driver.cuDeviceGetAttribute = device_attribute;
    tangram.driver.cuModuleGetFunction = get_function;
    tangram.driver.cuFuncGetAttribute = function_attribute;
    tangram.driver.cuLaunchGrid = launch;
    atomic_store(&tangram.hot.driver_found, true);
    atomic_store(&tangram.grant.state, GRANT_GOOD);
    tangram.grant.gpus = 1;
    atomic_store(&tangram.only_gpu, gpu);
    atomic_store(&gpu->limit_bytes, 0); /* no more can be leased */
    atomic_store(&gpu->unused_bytes, lease_bytes);
    return gpu;
}

static CUfunction function_of(const char *name, int local_bytes)
{
    CUfunction function;
    local = local_bytes;
    assert(cuModuleGetFunction(&function, NULL, name) == CUDA_SUCCESS);
    return function;
}

static void a_launch_that_grows_the_stacks_is_paid_for_or_refused(void)
{
    struct gpu *gpu = h200(UINT64_C(200) << 20);
    CUfunction flat = function_of("flat", 1024);
    assert(!atomic_load(&tangram.hot.noted) && cuLaunchGrid(flat, 1, 1) == CUDA_SUCCESS && launches == 1);

    CUfunction deep = function_of("deep", 1504); /* measured: 130,023,424 bytes */
    assert(cuLaunchGrid(deep, 1, 1) == CUDA_SUCCESS && stack == 1504 && launches == 2);
    uint64_t left = atomic_load(&gpu->unused_bytes);
    assert((UINT64_C(200) << 20) - left >= 130023424 - PAGE && (UINT64_C(200) << 20) - left <= 130023424 + PAGE);
    assert(cuLaunchGrid(deep, 1, 1) == CUDA_SUCCESS && atomic_load(&gpu->unused_bytes) == left && launches == 3);

    CUfunction abyss = function_of("abyss", 131072);
    assert(cuLaunchGrid(abyss, 1, 1) == CUDA_ERROR_OUT_OF_MEMORY && launches == 3 && atomic_load(&gpu->unused_bytes) == left);

    assert(cuCtxSetLimit(0, 512) == CUDA_SUCCESS && atomic_load(&gpu->unused_bytes) == UINT64_C(200) << 20);
    assert(cuCtxSetLimit(0, 65536) == CUDA_ERROR_OUT_OF_MEMORY && stack == 512);
    function_of("abyss", 16); /* the same handle, given out anew */
    assert(cuLaunchGrid(abyss, 1, 1) == CUDA_SUCCESS);
}

/* Graphs: one kernel or conditional node each. */
struct CUgraphNode_st {
    CUgraphNodeType type;
    CUfunction function;
    CUgraph body[2];
    unsigned bodies;
};
struct CUgraph_st {
    struct CUgraphNode_st *node;
};
static unsigned instantiated;

static CUresult graph_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    if (nodes != NULL)
        nodes[0] = graph->node;
    *count = 1;
    return CUDA_SUCCESS;
}
static CUresult node_type(CUgraphNode node, CUgraphNodeType *type)
{
    *type = node->type;
    return CUDA_SUCCESS;
}
static CUresult kernel_params(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *how)
{
    how->func = node->function;
    return CUDA_SUCCESS;
}
static CUresult node_params(CUgraphNode node, CUgraphNodeParams *how)
{
    how->type = node->type;
    how->conditional.size = node->bodies;
    how->conditional.phGraph_out = node->body;
    return CUDA_SUCCESS;
}
static CUresult instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)graph, (void)flags;
    *exec = (CUgraphExec)(uintptr_t)0x7000;
    instantiated++;
    return CUDA_SUCCESS;
}

static CUresult instantiated_as(struct CUgraphNode_st *node)
{
    struct CUgraph_st graph = {node};
    CUgraphExec exec;
    return cuGraphInstantiateWithFlags(&exec, &graph, 0);
}

/* Of drivers that show the bodies of a conditional node those kernels count, in bodies of bodies, too; of others any kernel of the process. */
static void kernels_in_the_bodies_of_conditional_nodes_are_paid_for_or_refused(void)
{
    struct gpu *gpu = h200(UINT64_C(200) << 20);
    tangram.driver.cuGraphGetNodes = graph_nodes;
    tangram.driver.cuGraphNodeGetType = node_type;
    tangram.driver.cuGraphKernelNodeGetParams_v2 = kernel_params;
    tangram.driver.cuGraphInstantiateWithFlags = instantiate;
    stack = 1024;
    struct CUgraphNode_st flat = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .function = function_of("flat body", 16)}, conditional = flat, outer = flat;
    struct CUgraphNode_st deep = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .function = function_of("deep body", 1504)};
    struct CUgraph_st shallow = {&flat}, body = {&deep}, inner = {&conditional};
    conditional = (struct CUgraphNode_st){.type = CU_GRAPH_NODE_TYPE_CONDITIONAL, .body = {&shallow, &shallow}, .bodies = 2};
    outer = (struct CUgraphNode_st){.type = CU_GRAPH_NODE_TYPE_CONDITIONAL, .body = {&inner}, .bodies = 1};
    struct CUgraphNode_st newer = {.type = (CUgraphNodeType)99}, batch = {.type = (CUgraphNodeType)14};

    tangram.driver.cuGraphNodeGetParams = node_params;
    assert(instantiated_as(&outer) == CUDA_SUCCESS && atomic_load(&gpu->unused_bytes) == UINT64_C(200) << 20);
    conditional.body[1] = &body;
    assert(instantiated_as(&outer) == CUDA_SUCCESS && instantiated == 2);
    const uint64_t left = atomic_load(&gpu->unused_bytes);
    assert((UINT64_C(200) << 20) - left >= 130023424 - PAGE);
    deep.function = function_of("abyss body", 65536);
    assert(instantiated_as(&outer) == CUDA_ERROR_OUT_OF_MEMORY && instantiated == 2);
    deep.function = flat.function;
    assert(instantiated_as(&outer) == CUDA_SUCCESS && instantiated == 3 && atomic_load(&gpu->unused_bytes) == left);

    tangram.driver.cuGraphNodeGetParams = missing_cuGraphNodeGetParams; /* which of them the bodies have is not shown */
    assert(instantiated_as(&conditional) == CUDA_ERROR_OUT_OF_MEMORY && instantiated_as(&newer) == CUDA_ERROR_OUT_OF_MEMORY && instantiated == 3);
    assert(instantiated_as(&batch) == CUDA_SUCCESS && instantiated == 4);
    function_of("abyss body", 16);
    assert(instantiated_as(&conditional) == CUDA_SUCCESS && instantiated_as(&newer) == CUDA_SUCCESS && instantiated == 6);
}

static CUresult unloaded;
static CUresult unload(CUmodule module)
{
    (void)module;
    return unloaded;
}

static size_t noted(void)
{
    size_t count = 0;
    for (unsigned i = 0; i < SHARDS; i++)
        count += tangram.shard[i].used;
    return count;
}

static void what_is_noted_of_functions_ends_with_their_module(void)
{
    CUmodule module = (CUmodule)(uintptr_t)0x5000;
    CUfunction function;
    h200(UINT64_C(200) << 20);
    tangram.driver.cuModuleUnload = unload;
    const size_t before = noted();
    local = 65536;
    assert(cuModuleGetFunction(&function, module, "one") == CUDA_SUCCESS && cuModuleGetFunction(&function, module, "another") == CUDA_SUCCESS);
    code_loads_late(module, 1 << 20, 1 << 16);
    assert(noted() == before + 3);
    unloaded = CUDA_ERROR_INVALID_VALUE;
    assert(cuModuleUnload(module) == CUDA_ERROR_INVALID_VALUE && noted() == before + 3);
    unloaded = CUDA_SUCCESS;
    assert(cuModuleUnload((CUmodule)(uintptr_t)0x6000) == CUDA_SUCCESS && noted() == before + 3);
    assert(cuModuleUnload(module) == CUDA_SUCCESS && noted() == before);
}

static CUresult count_devices(int *count)
{
    *count = 2;
    return CUDA_SUCCESS;
}
static CUresult answer;
static CUresult detach(CUcontext context)
{
    (void)context;
    return answer;
}
static CUresult destroy_green(CUgreenCtx context)
{
    (void)context;
    return answer;
}

static CUresult detach_by_hook(void)
{
    return cuCtxDetach(NULL);
}
static CUresult destroy_green_by_hook(void)
{
    return cuGreenCtxDestroy(NULL);
}

/* The driver reuses the handle of a context that ended, on another GPU. */
static void what_a_thread_remembers_of_its_context_ends_with_any(CUresult (*end)(void))
{
    struct gpu *gpu = h200(0);
    tangram.driver.cuCtxDetach = detach;
    tangram.driver.cuGreenCtxDestroy = destroy_green;
    tangram.driver.cuDeviceGetCount = count_devices;
    tangram.grant.gpus = 2;
    atomic_store(&tangram.only_gpu, NULL);
    atomic_fetch_add(&tangram.contexts_gone, 1); /* by whatever ran here before */
    for (unsigned i = 0; i < 2; i++)
        atomic_store(&tangram.device_gpu[i], &gpu[i]);
    device_there = 0;
    assert(current_gpu() == &gpu[0]);
    device_there = 1;
    answer = CUDA_ERROR_INVALID_CONTEXT;
    assert(end() == CUDA_ERROR_INVALID_CONTEXT && current_gpu() == &gpu[0]);
    answer = CUDA_SUCCESS;
    assert(end() == CUDA_SUCCESS && current_gpu() == &gpu[1]);
    device_there = 0;
}

static void a_newer_form_of_a_hooked_function_is_known_by_its_name(void)
{
    assert(hook_is_newer_form("cuMemAlloc_v3") && hook_is_newer_form("cuMemAllocAsync_v2_ptsz") && hook_is_newer_form("cuMemAllocAsync_v12"));
    assert(!hook_is_newer_form("cuMemAlloc") && !hook_is_newer_form("cuMemAlloc_v2") && !hook_is_newer_form("cuMemAllocAsync_ptsz"));
    assert(!hook_is_newer_form("cuStreamBeginCapture_v2") && !hook_is_newer_form("cuMem_v2") && !hook_is_newer_form("nvmlInit_v3"));
    assert(!hook_is_newer_form("cu") && !hook_is_newer_form("") && !hook_is_newer_form("cu_v2") && !hook_is_newer_form("cuMemAlloc_v"));
}

int main(void)
{
    a_newer_form_of_a_hooked_function_is_known_by_its_name();
    images_are_read();
    a_launch_that_grows_the_stacks_is_paid_for_or_refused();
    kernels_in_the_bodies_of_conditional_nodes_are_paid_for_or_refused();
    what_is_noted_of_functions_ends_with_their_module();
    what_a_thread_remembers_of_its_context_ends_with_any(detach_by_hook);
    what_a_thread_remembers_of_its_context_ends_with_any(destroy_green_by_hook);
    puts("ok");
    return 0;
}
