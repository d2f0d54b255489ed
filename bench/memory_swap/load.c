/* load.c - the process that owns the memory which copier.py has copied: load SOCKET. One line in, one line of JSON out.
 *
 *   make SET FILE               {"create_s": s, "map_s": s, "access_s": s}   blocks of a set, 0 or 1, of as many MiB as the lines of a file have;
 *                                                                            each 2 MiB have a value of their own
 *   again SET                   the same                                     new blocks at the same addresses
 *   export SET                  {"export_s": s}                              their descriptors go through SOCKET, one a packet
 *   unmap SET                   {"unmap_s": s, "release_s": s}
 *   check SET                   {"wrong": n}                                 words that are not what `make` wrote
 *   plain MIB                   {"out": s, "in": s, "both": s}               a plain allocation and pinned memory: so much out, in, and half each way
 *
 * The first line is {"uuid": "GPU-..."}. Seconds; an error ends the program with a sentence.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"

#define MIB (UINT64_C(1) << 20)
enum { PIECE = 2 << 20, MOST_BLOCKS = 16384, NON_BLOCKING = 1 };

#define FUNCTIONS(F)                                                                                                               \
    F(cuInit, (unsigned))                                                                                                          \
    F(cuDeviceGet, (CUdevice *, int))                                                                                              \
    F(cuDeviceGetUuid_v2, (CUuuid *, CUdevice))                                                                                    \
    F(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                           \
    F(cuCtxSetCurrent, (CUcontext))                                                                                                \
    F(cuStreamCreate, (CUstream *, unsigned))                                                                                      \
    F(cuStreamSynchronize, (CUstream))                                                                                             \
    F(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                      \
    F(cuMemRelease, (CUmemGenericAllocationHandle))                                                                                \
    F(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                                       \
    F(cuMemAddressFree, (CUdeviceptr, size_t))                                                                                     \
    F(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))                                   \
    F(cuMemUnmap, (CUdeviceptr, size_t))                                                                                           \
    F(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                                      \
    F(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long))         \
    F(cuMemsetD32_v2, (CUdeviceptr, unsigned, size_t))                                                                             \
    F(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                                               \
    F(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                                                         \
    F(cuMemHostAlloc, (void **, size_t, unsigned))                                                                                 \
    F(cuMemFreeHost, (void *))                                                                                                     \
    F(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                                      \
    F(cuMemFree_v2, (CUdeviceptr))

static struct {
#define FIELD(name, types) CUresult(*name) types;
    FUNCTIONS(FIELD)
#undef FIELD
} cuda;

struct set {
    CUdeviceptr base;
    uint64_t bytes, blocks;
    uint64_t size[MOST_BLOCKS]; /* of each block */
    CUmemGenericAllocationHandle handle[MOST_BLOCKS];
};
static struct set set[2];
static CUstream out, in;
static CUdevice gpu;

static void need(int rc, const char *what)
{
    if (rc != 0) {
        fprintf(stderr, "load: %s answered %d\n", what, rc);
        exit(1);
    }
}
#define NEED(call) need((int)(call), #call)

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static uint32_t value_of(const struct set *one, uint64_t piece)
{
    return (uint32_t)(piece * 2654435761u + (one == set ? 1u : 2u));
}

static void make_blocks(struct set *one)
{
    const CUmemAllocationProp how = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                     .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu}};
    const CUmemAccessDesc access = {.location = how.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    double began = now_s();
    for (uint64_t i = 0; i < one->blocks; i++)
        NEED(cuda.cuMemCreate(&one->handle[i], one->size[i], &how, 0));
    double created = now_s();
    CUdeviceptr at = one->base;
    for (uint64_t i = 0; i < one->blocks; at += one->size[i++])
        NEED(cuda.cuMemMap(at, one->size[i], 0, one->handle[i], 0));
    double mapped = now_s();
    NEED(cuda.cuMemSetAccess(one->base, one->bytes, &access, 1));
    printf("{\"create_s\": %.9f, \"map_s\": %.9f, \"access_s\": %.9f}\n", created - began, mapped - created, now_s() - mapped);
}

/* New addresses for the blocks of these sizes, and their content. */
static void make_set(struct set *one)
{
    one->bytes = 0;
    for (uint64_t i = 0; i < one->blocks; i++)
        one->bytes += one->size[i];
    NEED(cuda.cuMemAddressReserve(&one->base, one->bytes, 0, 0, 0));
    make_blocks(one);
    for (uint64_t piece = 0; piece < one->bytes / PIECE; piece++)
        NEED(cuda.cuMemsetD32_v2(one->base + piece * PIECE, value_of(one, piece), PIECE / sizeof(uint32_t)));
    NEED(cuda.cuStreamSynchronize(NULL));
}

static void drop_addresses(struct set *one)
{
    if (one->base != 0)
        NEED(cuda.cuMemAddressFree(one->base, one->bytes));
}

static void make(struct set *one, const char *path)
{
    unsigned long mib;
    FILE *file = fopen(path, "r");
    need(file == NULL, path);
    drop_addresses(one);
    one->blocks = 0;
    while (one->blocks < MOST_BLOCKS && fscanf(file, "%lu", &mib) == 1)
        one->size[one->blocks++] = mib * MIB;
    need(!feof(file) || one->blocks == 0, path);
    fclose(file);
    make_set(one);
}

static void send_descriptor(int to, int fd)
{
    union {
        struct cmsghdr header;
        char buffer[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct iovec part = {.iov_base = "f", .iov_len = 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    need(sendmsg(to, &message, MSG_NOSIGNAL) != 1, "sendmsg");
}

static void export_blocks(struct set *one, int to)
{
    double took = 0;
    for (uint64_t i = 0; i < one->blocks; i++) {
        int fd;
        double began = now_s();
        NEED(cuda.cuMemExportToShareableHandle(&fd, one->handle[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        took += now_s() - began;
        send_descriptor(to, fd);
        close(fd);
    }
    printf("{\"export_s\": %.9f}\n", took);
}

static void unmap(struct set *one)
{
    double began = now_s();
    NEED(cuda.cuMemUnmap(one->base, one->bytes));
    double unmapped = now_s();
    for (uint64_t i = 0; i < one->blocks; i++)
        NEED(cuda.cuMemRelease(one->handle[i]));
    printf("{\"unmap_s\": %.9f, \"release_s\": %.9f}\n", unmapped - began, now_s() - unmapped);
}

static void check(struct set *one)
{
    uint64_t wrong = 0;
    uint32_t *word;
    NEED(cuda.cuMemHostAlloc((void **)&word, PIECE, 0));
    for (uint64_t piece = 0; piece < one->bytes / PIECE; piece++) {
        NEED(cuda.cuMemcpyDtoHAsync_v2(word, one->base + piece * PIECE, PIECE, out));
        NEED(cuda.cuStreamSynchronize(out));
        for (size_t i = 0; i < PIECE / sizeof *word; i++)
            wrong += word[i] != value_of(one, piece);
    }
    NEED(cuda.cuMemFreeHost(word));
    printf("{\"wrong\": %llu}\n", (unsigned long long)wrong);
}

/* So many bytes out and in at the same time; the second round counts. */
static double plain_s(CUdeviceptr at, char *host, uint64_t out_bytes, uint64_t in_bytes)
{
    double took = 0;
    for (int round = 0; round < 2; round++) {
        double began = now_s();
        if (out_bytes > 0)
            NEED(cuda.cuMemcpyDtoHAsync_v2(host, at, out_bytes, out));
        if (in_bytes > 0)
            NEED(cuda.cuMemcpyHtoDAsync_v2(at + out_bytes, host + out_bytes, in_bytes, in));
        NEED(cuda.cuStreamSynchronize(out));
        NEED(cuda.cuStreamSynchronize(in));
        took = now_s() - began;
    }
    return took;
}

static void plain(uint64_t mib)
{
    CUdeviceptr at;
    char *host;
    NEED(cuda.cuMemAlloc_v2(&at, mib * MIB));
    NEED(cuda.cuMemHostAlloc((void **)&host, mib * MIB, 0));
    double out_s = plain_s(at, host, mib * MIB, 0), in_s = plain_s(at, host, 0, mib * MIB), both_s = plain_s(at, host, mib / 2 * MIB, mib / 2 * MIB);
    NEED(cuda.cuMemFreeHost(host));
    NEED(cuda.cuMemFree_v2(at));
    printf("{\"out\": %.9f, \"in\": %.9f, \"both\": %.9f}\n", out_s, in_s, both_s);
}

static void start_up(void)
{
    CUcontext context;
    CUuuid uuid;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        need(-1, dlerror());
#define FIND(name, types)                                                                                                          \
    do {                                                                                                                           \
        void *at = dlsym(library, #name);                                                                                          \
        need(at == NULL, #name);                                                                                                   \
        memcpy(&cuda.name, &at, sizeof at);                                                                                        \
    } while (0);
    FUNCTIONS(FIND)
#undef FIND
    NEED(cuda.cuInit(0));
    NEED(cuda.cuDeviceGet(&gpu, 0));
    NEED(cuda.cuDevicePrimaryCtxRetain(&context, gpu));
    NEED(cuda.cuCtxSetCurrent(context));
    NEED(cuda.cuStreamCreate(&out, NON_BLOCKING));
    NEED(cuda.cuStreamCreate(&in, NON_BLOCKING));
    NEED(cuda.cuDeviceGetUuid_v2(&uuid, gpu));
    printf("{\"uuid\": \"GPU");
    for (int i = 0; i < 16; i++)
        printf("%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
    printf("\"}\n");
}

int main(int argc, char **argv)
{
    char line[256], word[16], path[200];
    unsigned long which;
    need(argc != 2, "usage: load SOCKET");
    setvbuf(stdout, NULL, _IOLBF, 0);
    start_up();
    while (fgets(line, sizeof line, stdin) != NULL) {
        which = 0;
        int words = sscanf(line, "%15s %lu", word, &which);
        if (words == 2 && strcmp(word, "plain") == 0)
            plain(which);
        else if (sscanf(line, "make %lu %199s", &which, path) == 2 && which <= 1)
            make(&set[which], path);
        else if (words < 2 || which > 1)
            need(words, line);
        else if (strcmp(word, "again") == 0)
            make_blocks(&set[which]);
        else if (strcmp(word, "export") == 0)
            export_blocks(&set[which], atoi(argv[1]));
        else if (strcmp(word, "unmap") == 0)
            unmap(&set[which]);
        else if (strcmp(word, "check") == 0)
            check(&set[which]);
        else
            need(words, line);
    }
    return 0;
}
