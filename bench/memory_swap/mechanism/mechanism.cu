// What the driver allows while a process's channels are suspended, and how fast a second process moves its memory.
//
//     mechanism.sh [FOLDER]     builds it, and runs all cases
//     mechanism CASE GIB BLOCK_MIB STREAMS [WITH_COPIES [BASELINE]]
//
// The owner makes GIB of memory in blocks by cuMemCreate, starts the work that CASE names over all of it, and suspends its own compute channels
// (with WITH_COPIES its channels of copies, too). A copier in a second process imports the blocks by descriptor, copies them to registered host memory
// and releases them. The owner unmaps and releases its own, makes new blocks at the same addresses, the copier fills them, the channels are enabled, and
// the owner's work must have the results that it has without all this.
//
//     idle      no work
//     work      a kernel over all memory, or one in each of STREAMS with a copy behind it
//     flag      and a kernel that waits for the host
//     meet      and two kernels that wait for each other
//     queue     and a launch queue that is full, with a thread blocked in the next launch
//     copying   and a copy of all memory in progress
//
// One line `name value` for each figure: seconds, GiB, GiB/s. An operation that takes more than DEADLINE_S is reported as `hang NAME`; the channels are
// enabled then, and the line after it says whether that ended it. BASELINE: a plain allocation and pinned memory, in the same run.
#include <cuda_runtime.h>
#include <sys/wait.h>

#include "kernels.cuh"
#include "second_process.h"

static const char *which;
static int streams, *flag;
static cudaStream_t *stream;
static uint32_t *cell, rounds; // every cell gets `rounds` more
static size_t cells;
static char *big; // what the owner's own copy is to fill

static volatile bool stop_launching;
static CUstream queue_stream;
static volatile unsigned long launched;

static void *launch_for_ever(void *)
{
    CHECK(cuCtxSetCurrent(context));
    while (!stop_launching) {
        nothing<<<1, 1, 0, queue_stream>>>();
        launched++;
    }
    return NULL;
}

static bool is(const char *name)
{
    return strcmp(which, name) == 0;
}

// Kernels over all cells; behind each of several a copy, of memory that comes back unchanged.
static void start_kernels(void)
{
    const size_t host_bytes = 64 * MIB;
    char *host = NULL;
    CHECK(cudaHostAlloc(&host, host_bytes * 2, 0));
    rounds = (uint32_t)(1.5e12 / (double)total) + 1; // about a second
    size_t parts = streams ? (size_t)streams : 1, part = cells / parts;
    for (size_t i = 0; i < parts; i++) {
        size_t n = i == parts - 1 ? cells - part * i : part;
        add_one<<<streams ? 32 : 1024, 256, 0, stream[i]>>>(cell + part * i, n, rounds);
        if (streams)
            CHECK(cudaMemcpyAsync(host, cell + part * i, n * 4 < host_bytes ? n * 4 : host_bytes, cudaMemcpyDeviceToHost, stream[i]));
    }
}

static pthread_t launcher;

static void start_work(void)
{
    if (!is("idle"))
        start_kernels();
    if (is("flag"))
        wait_for<<<1, 1, 0, stream[streams + 1]>>>(flag);
    if (is("meet")) {
        meet<<<1, 1, 0, stream[streams + 1]>>>(flag, flag + 16);
        meet<<<1, 1, 0, stream[streams + 2]>>>(flag + 16, flag);
    }
    if (is("queue")) {
        queue_stream = stream[streams + 1];
        wait_for<<<1, 1, 0, queue_stream>>>(flag);
        pthread_create(&launcher, NULL, launch_for_ever, NULL);
    }
    usleep(300000);
    if (is("queue"))
        figure("launched_when_full", (double)launched);
    if (is("copying")) {
        CHECK(cudaHostAlloc(&big, total, 0));
        for (size_t i = 0; i < total; i += 4096)
            big[i] = 0;
        CHECK(cudaMemcpyAsync(big, cell, total, cudaMemcpyDeviceToHost, stream[streams + 1]));
        usleep(20000);
    }
}

// Does the owner's own copy go on while it is suspended?
static void watch_copy(void)
{
    size_t seen[3] = {0};
    for (int k = 0; k < 3; k++) {
        usleep(30000);
        for (size_t i = 0; i < total; i += 16 * MIB)
            seen[k] += big[i + 4] != 0 || big[i + 5] != 0;
    }
    printf("copied_blocks %zu %zu %zu of %zu\n", seen[0], seen[1], seen[2], (size_t)(total / (16 * MIB)));
}

static void report(const char *prefix, struct answer answer)
{
    const char *name[] = {"import_s", "copy_s", "release_s"};
    const double value[] = {answer.import_s, answer.copy_s, answer.release_s};
    for (int i = 0; i < 3; i++) {
        printf("%s_", prefix);
        figure(name[i], value[i]);
    }
    printf("%s_", prefix);
    figure("gib_per_s", (double)total / GIB / answer.copy_s);
}

// Suspended from here on: out and in again.
static void swap_out_and_in(int socket)
{
    double began = now();
    if (is("copying"))
        watch_copy();
    timed("export_s", export_all);
    if (!hung)
        report("save", order_copier(socket, SAVE, true, "save"));
    double free_before = order_copier(socket, FREE_BYTES, false, "free").free_gib;
    timed("unmap_s", unmap_all);
    timed("release_s", release_all);
    figure("freed_gib", order_copier(socket, FREE_BYTES, false, "free").free_gib - free_before);
    timed("create_again_s", create_all);
    timed("map_again_s", map_all);
    timed("access_again_s", access_all);
    timed("export_again_s", export_all);
    if (!hung)
        report("restore", order_copier(socket, RESTORE, true, "restore"));
    figure("away_s", now() - began);
}

// Returns whether the work ended well and every cell has the value that it has without a swap.
static bool results_are_right(void)
{
    flag[0] = flag[16] = 1;
    stop_launching = true;
    if (is("queue"))
        pthread_join(launcher, NULL);
    double t = now();
    int rc = (int)cudaDeviceSynchronize();
    figure("rest_of_work_s", now() - t);
    printf("work_rc %d\n", rc);
    unsigned long long *wrong;
    CHECK(cudaMallocManaged(&wrong, sizeof *wrong));
    *wrong = 0;
    count_wrong<<<1024, 256>>>(cell, cells, rounds, wrong);
    CHECK(cudaDeviceSynchronize());
    printf("wrong_cells %llu\n", *wrong);
    return rc == 0 && *wrong == 0;
}

// A plain allocation and pinned memory, one copy each way, twice.
static void baseline(void)
{
    CUdeviceptr plain;
    void *pinned;
    unmap_all();
    release_all();
    CHECK(cuMemAlloc(&plain, total));
    double t = now();
    CHECK(cuMemHostAlloc(&pinned, total, 0));
    figure("plain_pin_s", now() - t);
    for (int k = 0; k < 2; k++) {
        t = now();
        CHECK(cuMemcpyDtoH(pinned, plain, total));
        figure("plain_save_gib_per_s", (double)total / GIB / (now() - t));
        t = now();
        CHECK(cuMemcpyHtoD(plain, pinned, total));
        figure("plain_restore_gib_per_s", (double)total / GIB / (now() - t));
    }
}

// The memory, with a value in each cell.
static void make_memory(void)
{
    CUdevice device;
    pthread_t thread;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    handle = (CUmemGenericAllocationHandle *)calloc(blocks, sizeof *handle);
    descriptor = (int *)calloc(blocks, sizeof *descriptor);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CHECK(cuMemAddressReserve(&base, total, 0, 0, 0));
    CHECK(pthread_create(&thread, NULL, worker, NULL));
    timed("create_s", create_all);
    timed("map_s", map_all);
    timed("access_s", access_all);
    cell = (uint32_t *)base;
    cells = total / sizeof *cell;
    set_all<<<1024, 256>>>(cell, cells);
    CHECK(cudaDeviceSynchronize());
    stream = (cudaStream_t *)calloc((size_t)streams + 4, sizeof *stream);
    for (int i = 0; i < streams + 4; i++)
        CHECK(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
    CHECK(cudaHostAlloc(&flag, 4096, cudaHostAllocMapped));
    memset(flag, 0, 4096);
}

int main(int argc, char **argv)
{
    which = argc > 1 ? argv[1] : "idle";
    block_bytes = (argc > 3 ? (size_t)atoi(argv[3]) : 512) * MIB;
    blocks = (size_t)((argc > 2 ? atof(argv[2]) : 4) * GIB) / block_bytes;
    total = blocks * block_bytes;
    streams = argc > 4 ? atoi(argv[4]) : 0;
    with_copies = argc > 5 && atoi(argv[5]);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    if (fork() == 0) { // before the first call of the driver, which survives no fork
        close(pair[0]);
        copier(pair[1]);
    }
    close(pair[1]);
    int socket = pair[0];
    struct answer ready = order_copier(socket, MAKE_READY, false, "pool");
    figure("pool_register_s", ready.pool_s);
    figure("pool_huge", ready.free_gib >= 0);
    figure("gib", (double)total / GIB);
    figure("blocks", (double)blocks);
    make_memory();
    start_work();
    figure("groups", groups);
    suspend_all();
    swap_out_and_in(socket);
    if (!hung)
        resume_all();
    bool right = results_are_right();
    if (argc > 6)
        baseline();
    fflush(stdout);
    char quit = QUIT;
    if (write(socket, &quit, 1) == 1)
        wait(NULL);
    _exit(!right || hung);
}
