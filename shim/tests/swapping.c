/* swapping.c - swaps the blocks of its own elastic memory, with another process as the copier. `swapping ROUNDS` prints one line:
 *
 *   swaps S bytes B wrong W
 *
 * It is compiled with the library's own sources, for what the arbiter's orders will call is not exported. In each round all memory has new
 * random content, a kernel runs, some blocks are chosen, saved by the copier, unmapped, made again, restored, and then every byte is compared.
 * A part of it is mapped by the program, as expandable segments are, from blocks of cuMemCreate. Other threads allocate, map and free all the
 * time. Blocks of cuMemAlloc have 8 MiB at most here.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/hooks/hook.h"
#include "../src/memory/memory.h"

enum { PIECES = 24, MOST = 64, EACH = 10 /* blocks of 2 MiB */ };

#define DRIVER(X)                                                                                                              \
    X(cuCtxSetCurrent, (CUcontext context))                                                                                    \
    X(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes))                                                       \
    X(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes))
#define DECLARE(name, params) static CUresult(*p_##name) params;
DRIVER(DECLARE)

static void need(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "swapping: %s\n", what);
        exit(1);
    }
}

static void take_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *at;
    need(library != NULL, "libcuda.so.1");
#define TAKE(name, params)                                                                                                     \
    at = dlsym(library, #name);                                                                                                \
    need(at != NULL, #name);                                                                                                   \
    memcpy(&p_##name, &at, sizeof at);
    DRIVER(TAKE)
}

static void begin(void)
{
    CUcontext context = NULL;
    take_driver();
    need(cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS, "a context");
    need(p_cuCtxSetCurrent(context) == CUDA_SUCCESS, "cuCtxSetCurrent");
}

/* The copier: another process, to which a block is a descriptor. */

enum order { SAVE, RESTORE };
struct job {
    uint64_t order, id, bytes;
};

static void copy_block(int fd, const struct job *job, unsigned char *slot)
{
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    need(tangram.driver.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0, "import");
    need(tangram.driver.cuMemAddressReserve(&at, job->bytes, 0, 0, 0) == 0 && tangram.driver.cuMemMap(at, job->bytes, 0, handle, 0) == 0, "map");
    need(tangram.driver.cuMemSetAccess(at, job->bytes, &access, 1) == 0, "access");
    if (job->order == SAVE)
        need(p_cuMemcpyDtoH_v2(slot, at, job->bytes) == 0, "save");
    else
        need(p_cuMemcpyHtoD_v2(at, slot, job->bytes) == 0, "restore");
    need(tangram.driver.cuMemUnmap(at, job->bytes) == 0 && tangram.driver.cuMemRelease(handle) == 0, "unmap");
    tangram.driver.cuMemAddressFree(at, job->bytes);
    close(fd);
}

union control {
    struct cmsghdr header;
    char space[CMSG_SPACE(sizeof(int))];
};

static void be_copier(int socket)
{
    static struct {
        uint64_t id;
        unsigned char *content;
    } slot[MOST * PIECES];
    unsigned slots = 0;
    begin();
    for (;;) {
        struct job job;
        union control control;
        struct iovec part = {&job, sizeof job};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof job)
            exit(0);
        int fd;
        unsigned i = 0;
        memcpy(&fd, CMSG_DATA(&control.header), sizeof fd);
        while (i < slots && slot[i].id != job.id)
            i++;
        if (i == slots) {
            need(slots < sizeof slot / sizeof *slot, "a slot");
            slot[slots].id = job.id;
            slot[slots++].content = malloc(job.bytes);
        }
        copy_block(fd, &job, slot[i].content);
        need(write(socket, "", 1) == 1, "an answer");
    }
}

static void order(int socket, enum order what, const struct elastic_choice *block)
{
    char answer;
    const int fd = elastic_export(block->id);
    need(fd >= 0, "export");
    struct job job = {what, block->id, block->bytes};
    union control control = {.header = {.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct iovec part = {&job, sizeof job};
    const struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    need(sendmsg(socket, &message, 0) == (ssize_t)sizeof job && read(socket, &answer, 1) == 1, "the copier");
    close(fd);
}

/* The program. */

static struct piece {
    CUdeviceptr at;
    size_t bytes;
    unsigned char *content;
    CUmemGenericAllocationHandle handle[EACH]; /* mapped: of its blocks of 2 MiB; 0: released already */
    bool mapped;
} piece[PIECES];

static const CUmemAllocationProp on_gpu = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static const CUmemAccessDesc usable = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

/* Side by side; every third block's handle is released at once, so that its mapping alone keeps it. */
static void map_piece(struct piece *one)
{
    const unsigned blocks = (unsigned)(one->bytes / PAGE);
    need(tangram.driver.cuMemAddressReserve(&one->at, one->bytes, 0, 0, 0) == CUDA_SUCCESS, "addresses");
    for (unsigned i = 0; i < blocks; i++) {
        need(cuMemCreate(&one->handle[i], PAGE, &on_gpu, 0) == CUDA_SUCCESS && created_is(one->handle[i]), "cuMemCreate");
        need(cuMemMap(one->at + i * PAGE, PAGE, 0, one->handle[i], 0) == CUDA_SUCCESS, "cuMemMap");
        if (i % 3 == 0) {
            need(cuMemRelease(one->handle[i]) == CUDA_SUCCESS, "cuMemRelease");
            one->handle[i] = 0;
        }
    }
    need(cuMemSetAccess(one->at, one->bytes, &usable, 1) == CUDA_SUCCESS, "cuMemSetAccess");
}

static bool unmap_piece(const struct piece *one)
{
    bool good = cuMemUnmap(one->at, one->bytes) == CUDA_SUCCESS;
    for (unsigned i = 0; i < one->bytes / PAGE; i++)
        good = (one->handle[i] == 0 || cuMemRelease(one->handle[i]) == CUDA_SUCCESS) && good;
    return cuMemAddressFree(one->at, one->bytes) == CUDA_SUCCESS && good;
}

static void allocate(void)
{
    static const size_t sizes[] = {100000, 3 * MIB, 512, 20 * MIB, 1 << 20, 2 * MIB, 70000, 9 * MIB};
    for (unsigned i = 0; i < PIECES; i++) {
        piece[i].bytes = sizes[i % (sizeof sizes / sizeof *sizes)];
        piece[i].content = malloc(piece[i].bytes);
        piece[i].mapped = piece[i].bytes % PAGE == 0 && i % 3 != 0;
        need(piece[i].content != NULL, "memory");
        if (piece[i].mapped)
            map_piece(&piece[i]);
        else
            need(cuMemAlloc_v2(&piece[i].at, piece[i].bytes) == CUDA_SUCCESS, "cuMemAlloc");
    }
}

static void refill(uint64_t *seed)
{
    for (unsigned i = 0; i < PIECES; i++) {
        for (size_t at = 0; at + 8 <= piece[i].bytes; at += 8) {
            *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
            memcpy(piece[i].content + at, seed, 8);
        }
        need(p_cuMemcpyHtoD_v2(piece[i].at, piece[i].content, piece[i].bytes) == CUDA_SUCCESS, "a copy to the device");
    }
}

static unsigned wrong(void)
{
    unsigned count = 0;
    unsigned char *now = malloc(20 * MIB);
    for (unsigned i = 0; i < PIECES; i++)
        count += p_cuMemcpyDtoH_v2(now, piece[i].at, piece[i].bytes) != CUDA_SUCCESS || memcmp(now, piece[i].content, piece[i].bytes) != 0;
    free(now);
    return count;
}

static unsigned unreadable(void)
{
    unsigned count = 0;
    unsigned char *now = malloc(20 * MIB);
    for (unsigned i = 0; i < PIECES; i++)
        count += p_cuMemcpyDtoH_v2(now, piece[i].at, piece[i].bytes) != CUDA_SUCCESS;
    free(now);
    return count;
}

static atomic_bool enough;

static void *churns(void *context)
{
    uint64_t round = 0;
    p_cuCtxSetCurrent(context);
    while (!atomic_load(&enough)) {
        CUdeviceptr at;
        const size_t bytes = ++round % 3 == 0 ? 3 * MIB : 1000 + round * 7919 % 200000;
        need(cuMemAlloc_v2(&at, bytes) == CUDA_SUCCESS && cuMemFree_v2(at) == CUDA_SUCCESS, "the other thread");
    }
    return NULL;
}

/* Maps and unmaps all the time. A block that is away when it is mapped is waited for. */
static void *remaps(void *context)
{
    CUdeviceptr at;
    p_cuCtxSetCurrent(context);
    need(tangram.driver.cuMemAddressReserve(&at, 4 * PAGE, 0, 0, 0) == CUDA_SUCCESS, "addresses");
    for (unsigned round = 0; !atomic_load(&enough); round++) {
        CUmemGenericAllocationHandle handle;
        CUmemAllocationProp seen;
        const CUdeviceptr other = at + 2 * PAGE;
        need(cuMemCreate(&handle, 2 * PAGE, &on_gpu, 0) == CUDA_SUCCESS, "cuMemCreate beside");
        usleep(round % 4 * 1000);
        need(cuMemMap(at, 2 * PAGE, 0, handle, 0) == CUDA_SUCCESS && cuMemSetAccess(at, 2 * PAGE, &usable, 1) == CUDA_SUCCESS, "a mapping beside");
        need(cuMemMap(at, 2 * PAGE, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE, "a second mapping at one place");
        usleep(round % 3 * 1000);
        need(cuMemMap(other, 2 * PAGE, 0, handle, 0) == CUDA_SUCCESS && cuMemSetAccess(other, 2 * PAGE, &usable, 1) == CUDA_SUCCESS, "a mapping elsewhere");
        need(cuMemGetAllocationPropertiesFromHandle(&seen, handle) == CUDA_SUCCESS && memcmp(&seen, &on_gpu, sizeof seen) == 0, "properties");
        need(cuMemRelease(handle) == CUDA_SUCCESS, "cuMemRelease beside");
        need(cuMemUnmap(at, 4 * PAGE) == CUDA_SUCCESS, "cuMemUnmap beside");
    }
    return NULL;
}

static CUfunction a_kernel(void)
{
    static const char image[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry k() { ret; }\n//fake k us=3000\n";
    CUmodule module;
    CUfunction kernel = NULL;
    need(cuModuleLoadData(&module, image) == CUDA_SUCCESS && cuModuleGetFunction(&kernel, module, "k") == CUDA_SUCCESS, "a kernel");
    return kernel;
}

/* None of what is chosen could be left out, unless there is no more. */
static void checked(const struct elastic_choice *chosen, size_t count, uint64_t wanted, uint64_t there)
{
    uint64_t sum = 0, least = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        sum += chosen[i].bytes;
        least = chosen[i].bytes < least ? chosen[i].bytes : least;
    }
    need(count == MOST || sum >= (wanted < there ? wanted : there), "too little was chosen");
    need(count == 0 || sum - least < wanted, "more was chosen than is needed");
}

/* Blocks out of state are refused, and stay as they are. */
static void refusals(const struct elastic_choice *block)
{
    need(!elastic_make(block->id) && !elastic_filled(block->id), "an order for a block that is not away");
    need(!elastic_unmap(block->id + 1000000) && elastic_export(block->id + 1000000) < 0, "an order for a block that is not there");
}

/* Others may have it mapped. */
static void resident_is_not_chosen(struct gpu *gpu)
{
    static struct elastic_choice all[4096];
    CUdeviceptr at;
    need(cuMemAlloc_v2(&at, 48 * MIB) == CUDA_SUCCESS, "memory that others open");
    lock_acquire(&tangram.elastic.lock);
    struct elastic_region *region = region_of(at);
    region->ipc.resident = true;
    lock_release(&tangram.elastic.lock);
    const size_t chosen = elastic_choose(gpu, UINT64_MAX / 2, all, sizeof all / sizeof *all);
    need(chosen > 0, "other memory");
    for (size_t i = 0; i < chosen; i++)
        for (unsigned j = 0; j < region->blocks; j++)
            need(all[i].id != region->block[j].id, "memory that others open was chosen");
    elastic_stay(gpu);
    const struct elastic_totals before = elastic_totals(gpu);
    const uint64_t kept_before = atomic_load(&gpu->kept_bytes);
    need(cuMemFree_v2(at) == CUDA_SUCCESS, "a free");
    need(elastic_totals(gpu).bytes == before.bytes - 48 * MIB && atomic_load(&gpu->kept_bytes) == kept_before, "it was kept, and others may write into it");
}

int main(int count, char **words)
{
    struct elastic_choice chosen[MOST];
    int pair[2];
    unsigned swaps = 0, bad = 0;
    uint64_t moved = 0, seed = 1;
    need(count == 2 && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "ROUNDS");
    const pid_t copier = fork(); /* before CUDA */
    if (copier == 0) {
        close(pair[0]);
        unsetenv("TANGRAM_GRANT");
        be_copier(pair[1]);
    }
    close(pair[1]);
    begin();
    allocate();
    struct gpu *gpu = &tangram.grant.gpu[0];
    CUfunction kernel = a_kernel();
    resident_is_not_chosen(gpu);
    pthread_t thread, other;
    CUcontext context;
    tangram.driver.cuCtxGetCurrent(&context);
    pthread_create(&thread, NULL, churns, context);
    pthread_create(&other, NULL, remaps, context);
    for (int round = 0; round < atoi(words[1]); round++) {
        refill(&seed);
        need(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == CUDA_SUCCESS, "a launch");
        const struct elastic_totals totals = elastic_totals(gpu);
        const uint64_t wanted = round % 5 == 4 ? UINT64_MAX / 2 : seed % totals.bytes;
        const size_t blocks = elastic_choose(gpu, wanted, chosen, MOST);
        checked(chosen, blocks, wanted, 100 * MIB); /* what the other thread has comes and goes */
        if (round % 7 == 6) { /* it is cancelled */
            elastic_stay(gpu);
            need(blocks == 0 || elastic_export(chosen[0].id) < 0, "a block that was to stay");
            bad += wrong();
            continue;
        }
        uint64_t away = 0;
        for (size_t i = 0; i < blocks; i++) {
            refusals(&chosen[i]);
            order(pair[0], SAVE, &chosen[i]);
            const bool unmapped = elastic_unmap(chosen[i].id);
            need(unmapped || chosen[i].bytes == 2 * PAGE, "unmap"); /* the other thread may have let its block go meanwhile */
            chosen[i].bytes = unmapped ? chosen[i].bytes : 0;
            away += chosen[i].bytes;
        }
        need(elastic_totals(gpu).away == away, "what is away is not counted right");
        need(blocks < 10 || unreadable() > 0, "memory that is away was read");
        for (size_t i = 0; i < blocks; i++) {
            if (chosen[i].bytes == 0)
                continue;
            need(elastic_make(chosen[i].id), "make");
            order(pair[0], RESTORE, &chosen[i]);
            need(elastic_filled(chosen[i].id), "filled");
        }
        need(elastic_totals(gpu).away == 0, "nothing is away");
        bad += wrong();
        swaps += (unsigned)blocks;
        moved += away;
    }
    atomic_store(&enough, true);
    pthread_join(thread, NULL);
    pthread_join(other, NULL);
    for (unsigned i = 0; i < PIECES; i++)
        bad += piece[i].mapped ? !unmap_piece(&piece[i]) : cuMemFree_v2(piece[i].at) != CUDA_SUCCESS;
    need(atomic_load(&gpu->kept_bytes) == elastic_totals(gpu).bytes, "what was freed is not kept");
    close(pair[0]);
    waitpid(copier, NULL, 0);
    printf("swaps %u bytes %llu wrong %u\n", swaps, (unsigned long long)moved, bad);
    return 0;
}
