/* blocked.c - does a second thread unmap and map memory while another is blocked inside the driver and the process is suspended?
 *
 *     blocked.sh [FOLDER]     builds it, and runs every case both ways
 *     blocked                 lists the cases
 *     blocked CASE before     the call is made while a kernel runs that does not end, then the process is suspended
 *     blocked CASE after      the call is made when the process is suspended
 *
 * A kernel counts in a block of cuMemCreate until a flag is set. All channels, those of copies too, are suspended. While a thread is in the call
 * that CASE names, another unmaps and releases the block, and maps a new one in its place. Then the flag is set, the channels are enabled,
 * and the call, the kernel and the context must end. Prints one line:
 *
 *     blocked CASE unmap_s S entered before|after waits 0|1 release_s S create_s S map_s S access_s S ended_s S rc N work_rc N wrong N
 *
 *     waits     the call had not returned when the unmap began
 *     ended_s   from the enable to the call's end; 0: it had ended before; -1: not within DEADLINE_S
 *     wrong     counters whose last value is not in the new block
 *
 * A step that takes longer than DEADLINE_S has -1, and the line ends with `hang STEP ends_after_resume 0|1`.
 */
#include <cuda.h>
#include <errno.h>
#include <pthread.h>

#include "channels.h"
#include "figures.h"

enum { DEADLINE_S = 8, SETTLE_US = 300000, COUNTERS = 1024, THREADS = 256, LAUNCHES = 20000, STACK = 16384 };
#define BLOCK (64 * MIB)

static const char code[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry count(.param .u64 cells, .param .u64 lasts, .param .u64 flag)\n{\n"
    "  .reg .pred %p0;\n  .reg .b32 %r<6>;\n  .reg .b64 %d<4>;\n"
    "  ld.param.u64 %d0, [cells];\n  cvta.to.global.u64 %d0, %d0;\n"
    "  ld.param.u64 %d1, [lasts];\n  cvta.to.global.u64 %d1, %d1;\n"
    "  ld.param.u64 %d2, [flag];\n  cvta.to.global.u64 %d2, %d2;\n"
    "  mov.u32 %r0, %ctaid.x;\n  mov.u32 %r1, %ntid.x;\n  mov.u32 %r2, %tid.x;\n  mad.lo.u32 %r0, %r0, %r1, %r2;\n"
    "  mul.wide.u32 %d3, %r0, 4;\n  add.u64 %d0, %d0, %d3;\n  add.u64 %d1, %d1, %d3;\n  mov.u32 %r3, 0;\n"
    "again:\n"
    "  add.u32 %r3, %r3, 1;\n  st.volatile.global.u32 [%d0], %r3;\n"
    "  ld.volatile.global.u32 %r4, [%d2];\n  setp.eq.u32 %p0, %r4, 0;\n  @%p0 bra again;\n"
    "  st.volatile.global.u32 [%d1], %r3;\n  ret;\n}\n"
    ".visible .entry nothing()\n{\n  ret;\n}\n";

/* What the calls use, made before the kernel starts. */
static CUcontext context;
static CUmodule module, other_module;
static CUfunction nothing;
static CUstream busy, idle;
static CUevent event;
static CUdeviceptr plain;
static CUmemoryPool pool;
static CUgraph graph;
static CUgraphExec executable;
static void *pinned, *pageable, *unregistered, *registered;
static volatile int *flag;
static volatile bool over; /* set when the channels are enabled */

static int launch_nothing(CUstream on)
{
    return (int)cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, on, NULL, NULL);
}

/* The calls. Each returns what the driver answered. */
static int none(void) { return 0; }
static int mem_free(void) { return (int)cuMemFree(plain); }
static int mem_alloc(void) { return (int)cuMemAlloc(&plain, BLOCK); }
static int mem_host_alloc(void) { return (int)cuMemHostAlloc(&pinned, BLOCK, 0); }
static int mem_free_host(void) { return (int)cuMemFreeHost(pinned); }
static int mem_host_unregister(void) { return (int)cuMemHostUnregister(registered); }
static int mem_host_register(void) { return (int)cuMemHostRegister(unregistered, BLOCK, 0); }
static int module_unload(void) { return (int)cuModuleUnload(other_module); }
static int module_load_data(void) { return (int)cuModuleLoadData(&other_module, code); }
static int ctx_synchronize(void) { return (int)cuCtxSynchronize(); }
static int stream_synchronize(void) { return (int)cuStreamSynchronize(busy); }
static int stream_create(void) { return (int)cuStreamCreate(&idle, CU_STREAM_NON_BLOCKING); }
static int stream_query(void) { return (int)cuStreamQuery(busy); } /* 600: the kernel has not ended */
static int ctx_set_limit(void) { return (int)cuCtxSetLimit(CU_LIMIT_STACK_SIZE, STACK); } /* larger stacks: the driver exchanges them */
static int stream_destroy(void) { return (int)cuStreamDestroy(busy); }
static int event_synchronize(void) { return (int)cuEventSynchronize(event); }
static int memcpy_pageable(void) { return (int)cuMemcpyHtoD(plain, pageable, BLOCK); }
static int memcpy_pinned(void) { return (int)cuMemcpyDtoH(pinned, plain, BLOCK); }
static int graph_instantiate(void) { return (int)cuGraphInstantiateWithFlags(&executable, graph, 0); }
static int mem_pool_trim(void) { return (int)cuMemPoolTrimTo(pool, 0); }

static int stream_is_capturing(void)
{
    CUstreamCaptureStatus status;
    return (int)cuStreamIsCapturing(busy, &status);
}

static int memset_and_wait(void)
{
    int rc = (int)cuMemsetD8(plain, 1, BLOCK);
    return rc ? rc : (int)cuStreamSynchronize(NULL);
}

static int alloc_and_free_async(void)
{
    CUdeviceptr at;
    int rc = (int)cuMemAllocAsync(&at, BLOCK, idle);
    rc = rc ? rc : (int)cuMemFreeAsync(at, idle);
    return rc ? rc : (int)cuStreamSynchronize(idle);
}

/* Behind the kernel, until the queue is full. */
static int launch_full_queue(void)
{
    int rc = 0;
    for (int i = 0; i < LAUNCHES && !over && rc == 0; i++)
        rc = launch_nothing(busy);
    return rc;
}

static int graph_launch_full_queue(void)
{
    int rc = 0;
    for (int i = 0; i < LAUNCHES && !over && rc == 0; i++)
        rc = (int)cuGraphLaunch(executable, busy);
    return rc;
}

/* Functions of the program that the driver runs on a thread of its own, on a stream with nothing before them; they call no CUDA. */
static void CUDA_CB wait_until_over(void *unused)
{
    (void)unused;
    while (!over)
        usleep(1000);
}

static void CUDA_CB called_back(CUstream on, CUresult rc, void *unused)
{
    (void)on;
    (void)rc;
    wait_until_over(unused);
}

static int host_function(void)
{
    int rc = (int)cuLaunchHostFunc(idle, wait_until_over, NULL);
    return rc ? rc : (int)cuStreamSynchronize(idle);
}

static int callback(void)
{
    int rc = (int)cuStreamAddCallback(idle, called_back, NULL, 0);
    return rc ? rc : (int)cuStreamSynchronize(idle);
}

static const struct {
    const char *name;
    int (*call)(void);
} cases[] = {
    {"none", none},
    {"cuMemFree", mem_free},
    {"cuMemAlloc", mem_alloc},
    {"cuMemHostAlloc", mem_host_alloc},
    {"cuMemFreeHost", mem_free_host},
    {"cuMemHostRegister", mem_host_register},
    {"cuMemHostUnregister", mem_host_unregister},
    {"cuModuleUnload", module_unload},
    {"cuModuleLoadData", module_load_data},
    {"cuCtxSynchronize", ctx_synchronize},
    {"cuStreamSynchronize", stream_synchronize},
    {"cuStreamCreate", stream_create},
    {"cuStreamDestroy", stream_destroy},
    {"cuStreamQuery", stream_query},
    {"cuStreamIsCapturing", stream_is_capturing},
    {"cuCtxSetLimit", ctx_set_limit},
    {"cuEventSynchronize", event_synchronize},
    {"cuMemcpyHtoD_pageable", memcpy_pageable},
    {"cuMemcpyDtoH_pinned", memcpy_pinned},
    {"cuMemsetD8", memset_and_wait},
    {"cuGraphInstantiate", graph_instantiate},
    {"cuGraphLaunch_full", graph_launch_full_queue},
    {"cuLaunchKernel_full", launch_full_queue},
    {"cuMemAllocAsync", alloc_and_free_async},
    {"cuMemPoolTrimTo", mem_pool_trim},
    {"cuLaunchHostFunc", host_function},
    {"cuStreamAddCallback", callback},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* A function on a thread of its own, whose end is waited for with a limit. */
struct task {
    int (*call)(void);
    int rc;
    bool ended;
    double ended_at;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static void *run_task(void *argument)
{
    struct task *task = (struct task *)argument;
    CHECK(cuCtxSetCurrent(context));
    int rc = task->call();
    pthread_mutex_lock(&task->lock);
    task->rc = rc;
    task->ended = true;
    task->ended_at = now();
    pthread_cond_broadcast(&task->changed);
    pthread_mutex_unlock(&task->lock);
    return NULL;
}

/* The task is never freed: a thread may be in it until the process ends. */
static struct task *start(int (*call)(void))
{
    struct task *task = (struct task *)calloc(1, sizeof *task);
    pthread_t thread;
    task->call = call;
    pthread_mutex_init(&task->lock, NULL);
    pthread_cond_init(&task->changed, NULL);
    CHECK(pthread_create(&thread, NULL, run_task, task));
    return task;
}

static bool ends(struct task *task, double seconds)
{
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += (time_t)seconds;
    pthread_mutex_lock(&task->lock);
    while (!task->ended && pthread_cond_timedwait(&task->changed, &task->lock, &limit) != ETIMEDOUT)
        continue;
    bool ended = task->ended;
    pthread_mutex_unlock(&task->lock);
    return ended;
}

/* The block that is replaced. */
static CUdeviceptr block;
static CUmemGenericAllocationHandle memory;
static CUmemAllocationProp properties;
static CUmemAccessDesc access_here;

static int unmap_block(void) { return (int)cuMemUnmap(block, BLOCK); }
static int release_block(void) { return (int)cuMemRelease(memory); }
static int create_block(void) { return (int)cuMemCreate(&memory, BLOCK, &properties, 0); }
static int map_block(void) { return (int)cuMemMap(block, BLOCK, 0, memory, 0); }
static int access_block(void) { return (int)cuMemSetAccess(block, BLOCK, &access_here, 1); }

static void resume(void)
{
    flag[0] = 1;
    over = true;
    switch_channels(false, true);
    switch_channels(false, false);
}

/* Prints `NAME SECONDS`. A step that hangs ends the program, after it was seen whether enabling the channels lets it end. */
static void step(const char *name, int (*call)(void))
{
    double began = now();
    struct task *task = start(call);
    if (!ends(task, DEADLINE_S)) {
        resume();
        printf("%s -1 hang %s ends_after_resume %d\n", name, name, ends(task, DEADLINE_S));
        fflush(stdout);
        _exit(2);
    }
    printf("%s %.6f ", name, task->ended_at - began);
    if (task->rc) {
        printf("gave %d\n", task->rc);
        fflush(stdout);
        _exit(1);
    }
}

static void prepare(void)
{
    CUdevice device;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, code));
    CHECK(cuModuleLoadData(&other_module, code));
    CHECK(cuModuleGetFunction(&nothing, module, "nothing"));
    CHECK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&idle, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuMemHostAlloc((void **)&flag, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    flag[0] = 0;
    CHECK(cuMemHostAlloc(&pinned, BLOCK, 0));
    CHECK(cuMemAlloc(&plain, BLOCK));
    pageable = calloc(1, BLOCK);
    unregistered = aligned_alloc(4096, BLOCK);
    memset(unregistered, 1, BLOCK);
    registered = aligned_alloc(4096, BLOCK);
    memset(registered, 1, BLOCK);
    CHECK(cuMemHostRegister(registered, BLOCK, 0));
    CHECK(cuMemcpyHtoD(plain, pageable, BLOCK)); /* copies both ways make the channels of copies */
    CHECK(cuMemcpyDtoH(pinned, plain, BLOCK));
    CHECK(launch_nothing(idle));
    CHECK(cuStreamSynchronize(idle));

    uint64_t keep = UINT64_MAX; /* so that trimming has something to free */
    CUdeviceptr from_pool;
    CHECK(cuDeviceGetDefaultMemPool(&pool, device));
    CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    CHECK(cuMemAllocAsync(&from_pool, BLOCK, idle));
    CHECK(cuMemFreeAsync(from_pool, idle));
    CHECK(cuStreamSynchronize(idle));

    CHECK(cuStreamBeginCapture(idle, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(launch_nothing(idle));
    CHECK(cuStreamEndCapture(idle, &graph));
    CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));

    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    access_here.location = properties.location;
    access_here.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK(cuMemAddressReserve(&block, BLOCK, 0, 0, 0));
    CHECK(create_block());
    CHECK(map_block());
    CHECK(access_block());
}

static size_t wrong_counters(CUdeviceptr lasts)
{
    uint32_t cell[COUNTERS], last[COUNTERS];
    size_t wrong = 0;
    CHECK(cuMemcpyDtoH(cell, block, sizeof cell));
    CHECK(cuMemcpyDtoH(last, lasts, sizeof last));
    for (int i = 0; i < COUNTERS; i++)
        wrong += last[i] == 0 || cell[i] != last[i];
    return wrong;
}

static struct task *enter(int (*call)(void))
{
    struct task *task = start(call);
    usleep(SETTLE_US);
    return task;
}

int main(int argc, char **argv)
{
    int which = 0;
    while (argc == 3 && which < CASES && strcmp(argv[1], cases[which].name) != 0)
        which++;
    if (argc != 3 || which == CASES || (strcmp(argv[2], "before") != 0 && strcmp(argv[2], "after") != 0)) {
        for (int i = 0; i < CASES; i++)
            puts(cases[i].name);
        return argc == 1 ? 0 : 2;
    }
    bool before = strcmp(argv[2], "before") == 0;
    prepare();
    CUfunction count;
    CUdeviceptr lasts, at;
    CHECK(cuModuleGetFunction(&count, module, "count"));
    CHECK(cuMemAlloc(&lasts, COUNTERS * sizeof(uint32_t)));
    CHECK(cuMemHostGetDevicePointer(&at, (void *)(uintptr_t)flag, 0));
    void *parameters[] = {&block, &lasts, &at};
    CHECK(cuLaunchKernel(count, COUNTERS / THREADS, 1, 1, THREADS, 1, 1, 0, busy, parameters, NULL));
    CHECK(cuEventRecord(event, busy));
    usleep(SETTLE_US);

    struct task *call = before ? enter(cases[which].call) : NULL;
    uint32_t status = switch_channels(true, false) | switch_channels(true, true);
    if (status)
        printf("suspend_status %u\n", status);
    if (!before)
        call = enter(cases[which].call);
    bool waits = !ends(call, 0);
    printf("blocked %s ", argv[1]);
    fflush(stdout);
    step("unmap_s", unmap_block);
    printf("entered %s waits %d ", argv[2], waits);
    step("release_s", release_block);
    step("create_s", create_block);
    step("map_s", map_block);
    step("access_s", access_block);

    double enabled_at = now();
    resume();
    bool ended = ends(call, DEADLINE_S);
    double ended_s = call->ended_at > enabled_at ? call->ended_at - enabled_at : 0;
    printf("ended_s %.6f rc %d ", ended ? ended_s : -1, call->rc);
    struct task *rest = start(ctx_synchronize);
    bool all = ends(rest, DEADLINE_S);
    printf("work_rc %d ", all ? rest->rc : -1);
    size_t wrong = ended && all ? wrong_counters(lasts) : COUNTERS;
    printf("wrong %zu\n", wrong);
    fflush(stdout);
    _exit(!ended || !all || rest->rc != 0 || wrong != 0);
}
