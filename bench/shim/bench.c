/* bench.c - what calls cost, in nanoseconds each; run.py starts it with and without the library.
 *
 *   bench calls        name,ns lines: the median of 9 batches
 *   bench pairs        the same of cuMemAlloc and cuMemFree in turns, by size
 *   bench start N      name,ns: start /bin/true and wait, the median of N times
 */
#include <dlfcn.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "../../shim/src/abi.h"

enum { BATCHES = 9, FEW = 10, MANY = 50000, BLOCK = 64 * 1024, LARGE = 2 << 20 };

extern char **environ;

static CUresult (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*load)(void **, const void *);
static CUresult (*get_function)(void **, void *, const char *), (*synchronize)(void);
static CUresult (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static CUresult (*allocate)(CUdeviceptr *, size_t), (*release)(CUdeviceptr), (*info)(size_t *, size_t *);
static CUresult (*allocate_async)(CUdeviceptr *, size_t, CUstream), (*release_async)(CUdeviceptr, CUstream);
static CUresult (*to_device)(CUdeviceptr, const void *, size_t), (*to_host)(void *, CUdeviceptr, size_t);
static CUresult (*on_device)(CUdeviceptr, CUdeviceptr, size_t), (*fill)(CUdeviceptr, unsigned char, size_t);
static CUresult (*look_up)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

static void *library, *function;

static void take(const char *name, void *slot)
{
    void *at = dlsym(library, name);
    if (at == NULL) {
        fprintf(stderr, "bench: no %s\n", name);
        exit(1);
    }
    memcpy(slot, &at, sizeof at);
}

static void need(CUresult rc, const char *what)
{
    if (rc != CUDA_SUCCESS) {
        fprintf(stderr, "bench: %s answered %d\n", what, (int)rc);
        exit(1);
    }
}

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median_of(double *values, size_t count)
{
    qsort(values, count, sizeof *values, by_size);
    return values[count / 2];
}

static double median(double *values)
{
    return median_of(values, BATCHES);
}

static void launches(void)
{
    double batch[BATCHES];
    for (unsigned b = 0; b < BATCHES; b++) {
        double start = now_ns();
        for (unsigned i = 0; i < 20000; i++)
            launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        batch[b] = (now_ns() - start) / 20000;
        synchronize();
    }
    printf("cuLaunchKernel,%.1f\n", median(batch));
}

/* With the caches as a program leaves them that does much between two launches: neither the library's data nor the driver's are in the
 * nearer ones any more. What is added here is the worst that there is; PyTorch lies between this and the figure above. */
static void launches_in_the_cold(void)
{
    enum { OTHER = 4 << 20, LINE = 64, LAUNCHES = 200 };
    static unsigned char other[OTHER];
    double batch[BATCHES];
    unsigned sum = 0;
    for (unsigned b = 0; b < BATCHES; b++) {
        double taken = 0;
        launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL); /* the first after idleness is another matter */
        for (unsigned i = 0; i < LAUNCHES; i++) {
            for (unsigned at = 0; at < OTHER; at += LINE)
                sum += other[at]++;
            double start = now_ns();
            launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
            taken += now_ns() - start;
        }
        batch[b] = taken / LAUNCHES;
        synchronize();
    }
    printf("cuLaunchKernel_in_the_cold,%.1f\n", median(batch) + 0 * sum);
}

static void infos(void)
{
    double batch[BATCHES];
    size_t free_bytes, total;
    for (unsigned b = 0; b < BATCHES; b++) {
        double start = now_ns();
        for (unsigned i = 0; i < 100000; i++)
            info(&free_bytes, &total);
        batch[b] = (now_ns() - start) / 100000;
    }
    printf("cuMemGetInfo,%.1f\n", median(batch));
}

/* Allocate 10, free 10, again and again, beside `live` allocations that stay. */
static void allocations(unsigned live)
{
    static CUdeviceptr kept[MANY];
    CUdeviceptr some[FEW];
    double taking[BATCHES], freeing[BATCHES];
    for (unsigned i = 0; i < live; i++)
        need(allocate(&kept[i], BLOCK), "cuMemAlloc");
    for (unsigned b = 0; b < BATCHES; b++) {
        double taken = 0, freed = 0;
        for (unsigned round = 0; round < 500; round++) {
            double start = now_ns();
            for (unsigned i = 0; i < FEW; i++)
                need(allocate(&some[i], BLOCK), "cuMemAlloc");
            double middle = now_ns();
            for (unsigned i = 0; i < FEW; i++)
                need(release(some[i]), "cuMemFree");
            taken += middle - start;
            freed += now_ns() - middle;
        }
        taking[b] = taken / (500 * FEW);
        freeing[b] = freed / (500 * FEW);
    }
    printf("cuMemAlloc_%u_live,%.1f\ncuMemFree_%u_live,%.1f\n", live, median(taking), live, median(freeing));
    for (unsigned i = 0; i < live; i++)
        need(release(kept[i]), "cuMemFree");
}

/* All memory that is left, in pieces of 2 MiB and more. */
static unsigned take_the_rest(CUdeviceptr *large, unsigned most)
{
    unsigned count = 0;
    for (size_t bytes = (size_t)1 << 32; bytes >= LARGE; bytes /= 2)
        while (count < most && allocate(&large[count], bytes) == CUDA_SUCCESS)
            count++;
    return count;
}

/* With no memory left but in pages that small allocations share: 100 of them have gaps of half of what is requested, and one has space. */
static void near_the_limit(void)
{
    enum { PAGES = 100, GAP = BLOCK / 2, GAPS = PAGES * (LARGE / GAP), LARGE_LIMIT = 1000, ROUNDS = 2000 };
    static CUdeviceptr small[GAPS], large[LARGE_LIMIT];
    CUdeviceptr last, at;
    double batch[BATCHES];
    for (unsigned i = 0; i < GAPS; i++)
        need(allocate(&small[i], GAP), "cuMemAlloc");
    need(allocate(&last, BLOCK), "cuMemAlloc");
    const unsigned count = take_the_rest(large, LARGE_LIMIT);
    for (unsigned i = 0; i < GAPS; i += 2)
        need(release(small[i]), "cuMemFree");
    for (unsigned b = 0; b < BATCHES; b++) {
        double start = now_ns();
        for (unsigned i = 0; i < ROUNDS; i++) {
            need(allocate(&at, BLOCK), "cuMemAlloc");
            need(release(at), "cuMemFree");
        }
        batch[b] = (now_ns() - start) / ROUNDS;
    }
    printf("cuMemAlloc_cuMemFree_near_the_limit,%.1f\n", median(batch));
    for (unsigned i = 1; i < GAPS; i += 2)
        need(release(small[i]), "cuMemFree");
    for (unsigned i = 0; i < count; i++)
        need(release(large[i]), "cuMemFree");
    need(release(last), "cuMemFree");
}

/* Out of the device's pool, which has grown by then: what CUDA runtimes of cudaMallocAsync do all the time. */
static void ordered(void)
{
    CUdeviceptr some[FEW];
    double taking[BATCHES], freeing[BATCHES];
    for (unsigned b = 0; b < BATCHES; b++) {
        double taken = 0, freed = 0;
        for (unsigned round = 0; round < 500; round++) {
            double start = now_ns();
            for (unsigned i = 0; i < FEW; i++)
                need(allocate_async(&some[i], BLOCK, NULL), "cuMemAllocAsync");
            double middle = now_ns();
            for (unsigned i = 0; i < FEW; i++)
                need(release_async(some[i], NULL), "cuMemFreeAsync");
            taken += middle - start;
            freed += now_ns() - middle;
        }
        taking[b] = taken / (500 * FEW);
        freeing[b] = freed / (500 * FEW);
        synchronize();
    }
    printf("cuMemAllocAsync,%.1f\ncuMemFreeAsync,%.1f\n", median(taking), median(freeing));
}

/* One of them, on `block` bytes of a GPU's memory. */
static void copy(unsigned which, CUdeviceptr at, unsigned char *host, size_t block)
{
    switch (which) {
    case 0:
        need(to_device(at, host, block), "cuMemcpyHtoD");
        break;
    case 1:
        need(to_host(host, at, block), "cuMemcpyDtoH");
        break;
    case 2:
        need(on_device(at, at + block, block), "cuMemcpyDtoD");
        break;
    case 3:
        need(fill(at, 0, block), "cuMemsetD8");
        break;
    default:
        launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        need(synchronize(), "cuCtxSynchronize");
    }
}

/* Small, and one after the other: after each but the device's own the GPU is idle, which may be reported to the arbiter. */
static void copies(void)
{
    static const char *const names[] = {"cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemsetD8", "cuLaunchKernel_cuCtxSynchronize"};
    enum { WAYS = sizeof names / sizeof *names, COPY = 4096, COPIES = 2000 };
    static unsigned char host[COPY];
    double batch[BATCHES];
    CUdeviceptr at;
    need(allocate(&at, BLOCK), "cuMemAlloc");
    for (unsigned which = 0; which < WAYS; which++) {
        for (unsigned b = 0; b < BATCHES; b++) {
            double start = now_ns();
            for (unsigned i = 0; i < COPIES; i++)
                copy(which, at, host, COPY);
            batch[b] = (now_ns() - start) / COPIES;
            synchronize();
        }
        printf("%s,%.1f\n", names[which], median(batch));
    }
    need(release(at), "cuMemFree");
}

/* What a CUDA runtime does when it starts: functions by name, most of which the library leaves alone. */
static void look_ups(void)
{
    static const char *const names[] = {"cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetName", "cuModuleGetFunction",
                                        "cuMemAlloc", "cuMemFree", "cuStreamCreate", "cuEventRecord"};
    enum { NAMES = sizeof names / sizeof *names };
    CUdriverProcAddressQueryResult status;
    void *at;
    double start = now_ns();
    for (unsigned i = 0; i < NAMES; i++)
        look_up(names[i], &at, 12000, 0, &status);
    printf("first_%u_of_cuGetProcAddress,%.0f\n", NAMES, now_ns() - start);
}

static void first_call(void)
{
    CUdeviceptr at;
    double start = now_ns();
    need(allocate(&at, BLOCK), "cuMemAlloc");
    printf("first_cuMemAlloc,%.0f\n", now_ns() - start);
    need(release(at), "cuMemFree");
}

/* One after the other, as a program without an allocator of its own does it. */
static void pairs(void)
{
    static const struct {
        const char *name;
        size_t bytes;
    } sizes[] = {{"512_B", 512}, {"2_MiB", (size_t)2 << 20}, {"20_MiB", (size_t)20 << 20}, {"512_MiB", (size_t)512 << 20}};
    enum { SIZES = sizeof sizes / sizeof *sizes, PAIRS = 5000 };
    double batch[BATCHES];
    CUdeviceptr at;
    for (unsigned size = 0; size < SIZES; size++) {
        for (unsigned b = 0; b < BATCHES; b++) {
            double start = now_ns();
            for (unsigned i = 0; i < PAIRS; i++) {
                need(allocate(&at, sizes[size].bytes), "cuMemAlloc");
                need(release(at), "cuMemFree");
            }
            batch[b] = (now_ns() - start) / PAIRS;
        }
        printf("cuMemAlloc_cuMemFree_%s,%.1f\n", sizes[size].name, median(batch));
    }
}

static void calls(void (*of)(void))
{
    void *context, *module;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "bench: %s\n", dlerror());
        exit(1);
    }
    take("cuInit", &init);
    take("cuDevicePrimaryCtxRetain", &retain);
    take("cuCtxSetCurrent", &use);
    take("cuModuleLoadData", &load);
    take("cuModuleGetFunction", &get_function);
    take("cuCtxSynchronize", &synchronize);
    take("cuLaunchKernel", &launch);
    take("cuMemAlloc_v2", &allocate);
    take("cuMemFree_v2", &release);
    take("cuMemGetInfo_v2", &info);
    take("cuMemAllocAsync", &allocate_async);
    take("cuMemFreeAsync", &release_async);
    take("cuMemcpyHtoD_v2", &to_device);
    take("cuMemcpyDtoH_v2", &to_host);
    take("cuMemcpyDtoD_v2", &on_device);
    take("cuMemsetD8_v2", &fill);
    take("cuGetProcAddress_v2", &look_up);
    need(init(0), "cuInit");
    need(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    need(use(context), "cuCtxSetCurrent");
    need(load(&module, ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n"), "cuModuleLoadData");
    need(get_function(&function, module, "nothing"), "cuModuleGetFunction");
    of();
}

static void all_calls(void)
{
    first_call();
    look_ups();
    fflush(stdout);
    launches();
    launches_in_the_cold();
    infos();
    copies();
    allocations(FEW);
    allocations(MANY);
    ordered();
    near_the_limit();
}

static void starts(unsigned count)
{
    char *arguments[] = {(char *)(uintptr_t)"true", NULL};
    double *taken = calloc(count, sizeof *taken);
    if (taken == NULL)
        exit(1);
    for (unsigned i = 0; i < count; i++) {
        pid_t child;
        double start = now_ns();
        if (posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) != 0)
            exit(1);
        waitpid(child, NULL, 0);
        taken[i] = now_ns() - start;
    }
    printf("process_start,%.0f\n", median_of(taken, count));
    free(taken);
}

int main(int count, char **words)
{
    if (count == 3 && strcmp(words[1], "start") == 0)
        starts((unsigned)atoi(words[2]));
    else
        calls(count == 2 && strcmp(words[1], "pairs") == 0 ? pairs : all_calls);
    return 0;
}
