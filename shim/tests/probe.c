/* probe.c - a GPU program driven by lines: each line of stdin is one call, each line of stdout its results.
 *
 * So a test can stop several processes at chosen points without a clock. Numbers are decimal; the first word of an answer is
 * the CUresult.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "routes.h"

typedef unsigned long long u64;

static CUresult use(int device)
{
    CUcontext context;
    CUresult rc = p_cuInit(0);
    if (rc == CUDA_SUCCESS)
        rc = p_cuDevicePrimaryCtxRetain(&context, device);
    return rc == CUDA_SUCCESS ? p_cuCtxSetCurrent(context) : rc;
}

static CUresult create(CUmemGenericAllocationHandle *handle, u64 bytes, int device)
{
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return p_cuMemCreate(handle, bytes, &prop, 0);
}

/* Allocations of `bytes` until one is refused: its code, and how many there were. */
static void fill(u64 bytes)
{
    CUdeviceptr at;
    u64 count = 0;
    CUresult rc;
    while ((rc = p_cuMemAlloc_v2(&at, bytes)) == CUDA_SUCCESS)
        count++;
    printf("%d %llu\n", (int)rc, count);
}

struct hammering {
    CUcontext context;
    u64 bytes, rounds;
    _Atomic u64 failed;
    pthread_barrier_t all_hold; /* in the last round, what they could get: on one processor they might run one after another */
};

static void *hammer_one(void *given)
{
    struct hammering *work = given;
    CUdeviceptr kept[8];
    p_cuCtxSetCurrent(work->context);
    for (u64 round = 0; round < work->rounds; round++) {
        unsigned got = 0;
        while (got < 8 && p_cuMemAlloc_v2(&kept[got], work->bytes) == CUDA_SUCCESS)
            got++;
        if (got < 8)
            work->failed++;
        if (round + 1 == work->rounds)
            pthread_barrier_wait(&work->all_hold);
        while (got > 0)
            if (p_cuMemFree_v2(kept[--got]) != CUDA_SUCCESS)
                abort();
    }
    return NULL;
}

static void hammer(unsigned threads, u64 rounds, u64 bytes)
{
    static struct hammering work;
    pthread_t thread[64];
    work.bytes = bytes;
    work.rounds = rounds;
    pthread_barrier_init(&work.all_hold, NULL, threads < 64 ? threads : 64);
    p_cuDevicePrimaryCtxRetain(&work.context, 0);
    for (unsigned i = 0; i < threads && i < 64; i++)
        pthread_create(&thread[i], NULL, hammer_one, &work);
    for (unsigned i = 0; i < threads && i < 64; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&work.all_hold);
    printf("0 %llu\n", (u64)work.failed);
}

/* A child allocates: its own call counts, the parent's continues. A child that never used CUDA itself gets a context. */
static void in_child(u64 bytes)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr at;
        CUresult rc = use(0);
        _exit(rc != CUDA_SUCCESS ? 100 : (int)p_cuMemAlloc_v2(&at, bytes));
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128);
}

static void call(const char *verb, u64 a, u64 b, u64 c)
{
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle handle = 0;
    CUmemoryPool pool = NULL;
    size_t one = 0, two = 0;
    CUresult rc;
    int number = 0;
    if (strcmp(verb, "use") == 0)
        printf("%d\n", (int)use((int)a));
    else if (strcmp(verb, "count") == 0)
        rc = p_cuDeviceGetCount(&number), printf("%d %d\n", (int)rc, number);
    else if (strcmp(verb, "alloc") == 0)
        rc = p_cuMemAlloc_v2(&at, a), printf("%d %llu\n", (int)rc, (u64)at);
    else if (strcmp(verb, "managed") == 0)
        rc = p_cuMemAllocManaged(&at, a, 1), printf("%d %llu\n", (int)rc, (u64)at);
    else if (strcmp(verb, "pitch") == 0)
        rc = p_cuMemAllocPitch_v2(&at, &one, a, b, 4), printf("%d %llu %zu\n", (int)rc, (u64)at, one);
    else if (strcmp(verb, "async") == 0)
        rc = p_cuMemAllocAsync(&at, a, NULL), printf("%d %llu\n", (int)rc, (u64)at);
    else if (strcmp(verb, "pool") == 0)
        rc = p_cuDeviceGetDefaultMemPool(&pool, 0), rc = rc ? rc : p_cuMemAllocFromPoolAsync(&at, a, pool, NULL),
        printf("%d %llu\n", (int)rc, (u64)at);
    else if (strcmp(verb, "free") == 0)
        printf("%d\n", (int)p_cuMemFree_v2(a));
    else if (strcmp(verb, "freeasync") == 0)
        printf("%d\n", (int)p_cuMemFreeAsync(a, NULL));
    else if (strcmp(verb, "sync") == 0)
        printf("%d\n", (int)p_cuCtxSynchronize());
    else if (strcmp(verb, "info") == 0)
        rc = p_cuMemGetInfo_v2(&one, &two), printf("%d %zu %zu\n", (int)rc, one, two);
    else if (strcmp(verb, "total") == 0)
        rc = p_cuDeviceTotalMem_v2(&one, (int)a), printf("%d %zu\n", (int)rc, one);
    else if (strcmp(verb, "create") == 0)
        rc = create(&handle, a, (int)b), printf("%d %llu\n", (int)rc, (u64)handle);
    else if (strcmp(verb, "release") == 0)
        printf("%d\n", (int)p_cuMemRelease(a));
    else if (strcmp(verb, "reserve") == 0)
        rc = p_cuMemAddressReserve(&at, a, 0, 0, 0), printf("%d %llu\n", (int)rc, (u64)at);
    else if (strcmp(verb, "map") == 0)
        printf("%d\n", (int)p_cuMemMap(a, b, 0, c, 0));
    else if (strcmp(verb, "unmap") == 0)
        printf("%d\n", (int)p_cuMemUnmap(a, b));
    else if (strcmp(verb, "fill") == 0)
        fill(a);
    else if (strcmp(verb, "hammer") == 0)
        hammer((unsigned)a, b, c);
    else if (strcmp(verb, "child") == 0)
        in_child(a);
    else
        printf("-1\n");
}

int main(void)
{
    char line[256], verb[32];
    take_routes();
    while (fgets(line, sizeof line, stdin) != NULL) {
        u64 a = 0, b = 0, c = 0;
        if (sscanf(line, "%31s %llu %llu %llu", verb, &a, &b, &c) < 1)
            continue;
        call(verb, a, b, c);
        fflush(stdout);
    }
    return 0;
}
