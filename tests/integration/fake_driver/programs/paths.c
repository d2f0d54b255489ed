/* paths.c - every way to GPU memory, and whether it is counted: paths NAME. Needs a GPU of 1000 MiB, contexts free. */
#include <assert.h>
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define OK(call)                                                                                                               \
    do {                                                                                                                       \
        const CUresult rc_ = (call);                                                                                           \
        if (rc_ != CUDA_SUCCESS) {                                                                                             \
            fprintf(stderr, "%s:%d: %s: CUresult %d\n", __FILE__, __LINE__, #call, (int)rc_);                                  \
            exit(1);                                                                                                           \
        }                                                                                                                      \
    } while (0)

static size_t used_mib(void)
{
    size_t left, total;
    OK(cuMemGetInfo(&left, &total));
    return (total - left) / MIB;
}

static void start(void)
{
    CUcontext ctx;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&ctx, 0));
    OK(cuCtxSetCurrent(ctx));
    assert(used_mib() == 0);
}

static CUmemAllocationProp on_gpu(void)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
}

static void vmm(void)
{
    CUmemGenericAllocationHandle handle, again;
    CUdeviceptr at;
    size_t grain;
    char text[6] = "";
    const CUmemAllocationProp how = on_gpu();
    const CUmemAccessDesc access = {.location = how.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cuMemGetAllocationGranularity(&grain, &how, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    assert(grain == 2 * MIB);
    OK(cuMemAddressReserve(&at, 800 * MIB, 0, 0, 0));
    assert(used_mib() == 0);
    OK(cuMemCreate(&handle, 400 * MIB, &how, 0));
    assert(used_mib() == 400);
    assert(cuMemCreate(&again, 602 * MIB, &how, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    assert(cuMemCreate(&again, 3, &how, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemMap(at, 400 * MIB, 0, handle, 0));
    assert(cuMemcpyHtoD(at, "hello", 6) == CUDA_ERROR_INVALID_VALUE); /* no access yet */
    OK(cuMemSetAccess(at, 400 * MIB, &access, 1));
    OK(cuMemcpyHtoD(at + 100, "hello", 6));
    OK(cuMemMap(at + 400 * MIB, 400 * MIB, 0, handle, 0)); /* the same memory twice */
    OK(cuMemSetAccess(at + 400 * MIB, 400 * MIB, &access, 1));
    OK(cuMemcpyDtoH(text, at + 400 * MIB + 100, 6));
    assert(strcmp(text, "hello") == 0 && used_mib() == 400);
    OK(cuMemRelease(handle));
    assert(cuMemRelease(handle) == CUDA_ERROR_INVALID_VALUE);
    OK(cuMemRetainAllocationHandle(&again, (void *)at));
    OK(cuMemRelease(again));
    OK(cuMemUnmap(at, 400 * MIB));
    assert(used_mib() == 400); /* one map is left */
    OK(cuMemUnmap(at + 400 * MIB, 400 * MIB));
    assert(used_mib() == 0);
    OK(cuMemAddressFree(at, 800 * MIB));
}

static void pools(void)
{
    CUmemoryPool pool;
    CUdeviceptr first, second, third;
    cuuint64_t number;
    OK(cuMemAllocAsync(&first, 100 * MIB, NULL));
    OK(cuMemAllocAsync(&second, 100 * MIB, NULL));
    assert(used_mib() == 200);
    assert(cuMemAllocAsync(&third, 900 * MIB, NULL) == CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemFreeAsync(first, NULL));
    assert(used_mib() == 200); /* kept by the pool ... */
    OK(cuMemAllocAsync(&first, 60 * MIB, NULL));
    assert(used_mib() == 200); /* ... and used again */
    OK(cuStreamSynchronize(NULL));
    assert(used_mib() == 160);
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &number));
    assert(number == 160 * MIB);
    number = 1000 * MIB;
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &number));
    OK(cuMemFree(first));
    OK(cuMemFreeAsync(second, NULL));
    assert(cuMemFreeAsync(second, NULL) == CUDA_ERROR_INVALID_VALUE);
    OK(cuCtxSynchronize());
    assert(used_mib() == 160); /* below the threshold it keeps */
    OK(cuMemPoolTrimTo(pool, 0));
    assert(used_mib() == 0);
    const CUmemPoolProps how = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    OK(cuMemPoolCreate(&pool, &how));
    OK(cuMemAllocFromPoolAsync(&first, 300 * MIB, pool, NULL));
    assert(used_mib() == 300);
    OK(cuMemFreeAsync(first, NULL));
    OK(cuMemPoolDestroy(pool));
    assert(used_mib() == 0);
    OK(cuMemAllocAsync(&first, 0, NULL));
    assert(first == 0);
}

static void arrays(void)
{
    CUarray array, level;
    CUmipmappedArray mipmap;
    const CUDA_ARRAY_DESCRIPTOR flat = {.Width = 4096, .Height = 4096, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    const CUDA_ARRAY3D_DESCRIPTOR deep = {.Width = 512, .Height = 512, .Depth = 512, .Format = CU_AD_FORMAT_HALF, .NumChannels = 1};
    CUDA_ARRAY_DESCRIPTOR back;
    OK(cuArrayCreate(&array, &flat));
    assert(used_mib() == 256);
    OK(cuArrayGetDescriptor(&back, array));
    assert(back.Width == 4096 && back.NumChannels == 4);
    OK(cuArrayDestroy(array));
    assert(cuArrayDestroy(array) == CUDA_ERROR_INVALID_HANDLE);
    OK(cuArray3DCreate(&array, &deep));
    assert(used_mib() == 256);
    OK(cuMipmappedArrayCreate(&mipmap, &deep, 3));
    assert(used_mib() == 256 + 256 + 32 + 4);
    OK(cuMipmappedArrayGetLevel(&level, mipmap, 2));
    OK(cuMipmappedArrayDestroy(mipmap));
    OK(cuArrayDestroy(array));
    assert(used_mib() == 0);
}

static void plain(void)
{
    CUdeviceptr at, base;
    size_t pitch, bytes;
    unsigned char pixel = 0;
    OK(cuMemAllocPitch(&at, &pitch, 1000, 1024, 4));
    assert(pitch == 1024 && used_mib() == 2);
    OK(cuMemsetD2D8(at, pitch, 7, 1000, 1024));
    OK(cuMemcpyDtoH(&pixel, at + 1023 * pitch + 999, 1));
    assert(pixel == 7);
    OK(cuMemGetAddressRange(&base, &bytes, at + 5000));
    assert(base == at && bytes == MIB);
    OK(cuMemFree(at));
    OK(cuMemAllocManaged(&at, 300 * MIB, CU_MEM_ATTACH_GLOBAL));
    assert(used_mib() == 300);
    unsigned managed = 0;
    OK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at + 4096));
    assert(managed == 1);
    OK(cuMemFree(at));
    void *host;
    OK(cuMemHostAlloc(&host, 300 * MIB, 0));
    assert(used_mib() == 0); /* host memory is no GPU memory */
    unsigned type = 0;
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)host));
    assert(type == CU_MEMORYTYPE_HOST);
    OK(cuMemFreeHost(host));
}

static void graphs(void)
{
    CUgraph graph, captured;
    CUgraphExec exec;
    CUgraphNode node, last;
    CUstream stream;
    CUdeviceptr at;
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
                                         .bytesize = 200 * MIB};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory));
    OK(cuGraphAddMemFreeNode(&last, graph, &node, 1, memory.dptr));
    OK(cuGraphInstantiate(&exec, graph, 0));
    assert(used_mib() == 0);
    OK(cuStreamCreate(&stream, 0));
    OK(cuGraphLaunch(exec, stream));
    OK(cuGraphLaunch(exec, stream));
    assert(used_mib() == 200); /* the graph pool keeps it */
    OK(cuDeviceGraphMemTrim(0));
    assert(used_mib() == 0);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));

    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    assert(cuStreamSynchronize(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    OK(cuMemAllocAsync(&at, 100 * MIB, stream));
    OK(cuMemsetD8Async(at, 1, MIB, stream));
    OK(cuStreamEndCapture(stream, &captured));
    size_t nodes = 0;
    OK(cuGraphGetNodes(captured, NULL, &nodes));
    assert(nodes == 2 && used_mib() == 0);
    OK(cuGraphInstantiate(&exec, captured, 0));
    OK(cuGraphLaunch(exec, stream));
    assert(used_mib() == 100);
    OK(cuMemFreeAsync(at, stream));
    OK(cuDeviceGraphMemTrim(0));
    assert(used_mib() == 0);
}

static void graph_time(void)
{
    static const char text[] = "//fake slow us=30000\n.visible .entry slow() { ret; }\n";
    CUmodule module;
    CUfunction slow, none;
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    CUevent before, after;
    float ms;
    OK(cuModuleLoadData(&module, text));
    OK(cuModuleGetFunction(&slow, module, "slow"));
    assert(cuModuleGetFunction(&none, module, "fast") == CUDA_ERROR_NOT_FOUND);
    OK(cuStreamCreate(&stream, 0));
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuLaunchKernel(slow, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    OK(cuLaunchKernel(slow, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&exec, graph, 0));
    OK(cuEventCreate(&before, 0));
    OK(cuEventCreate(&after, 0));
    OK(cuEventRecord(before, stream));
    OK(cuGraphLaunch(exec, stream));
    OK(cuEventRecord(after, stream));
    assert(cuEventElapsedTime(&ms, before, after) == CUDA_ERROR_NOT_READY);
    OK(cuEventSynchronize(after));
    OK(cuEventElapsedTime(&ms, before, after));
    assert(ms > 59 && ms < 200); /* seen done when this process runs again */
    assert(cuLaunchKernel(slow, 1, 1, 1, 1025, 1, 1, 0, stream, NULL, NULL) == CUDA_ERROR_INVALID_VALUE);
}

static void send_fd(int to, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    assert(sendmsg(to, &message, 0) == 1);
}

static int receive_fd(int from)
{
    int fd;
    char byte, control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    assert(recvmsg(from, &message, 0) == 1);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t bytes)
{
    CUdeviceptr at;
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    OK(cuMemMap(at, bytes, 0, handle, 0));
    OK(cuMemSetAccess(at, bytes, &access, 1));
    return at;
}

/* A child makes and exports memory, the parent imports it, the child ends. */
static void handles(void)
{
    int pair[2], status;
    char text[6] = "";
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    const pid_t child = fork();
    if (child == 0) {
        CUmemGenericAllocationHandle handle;
        int fd;
        const CUmemAllocationProp how = on_gpu();
        start();
        OK(cuMemCreate(&handle, 100 * MIB, &how, 0));
        OK(cuMemcpyHtoD(map(handle, 100 * MIB), "there", 6));
        OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        send_fd(pair[1], fd);
        assert(read(pair[1], text, 1) == 1); /* until the parent has it */
        _exit(0);
    }
    CUmemGenericAllocationHandle handle;
    const int fd = receive_fd(pair[0]);
    CUcontext ctx;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&ctx, 0));
    OK(cuCtxSetCurrent(ctx));
    OK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    const CUdeviceptr at = map(handle, 100 * MIB);
    OK(cuMemcpyDtoH(text, at, 6));
    assert(strcmp(text, "there") == 0 && used_mib() == 100);
    assert(write(pair[0], "x", 1) == 1);
    assert(waitpid(child, &status, 0) == child && status == 0);
    assert(used_mib() == 100);
    OK(cuMemRelease(handle));
    OK(cuMemUnmap(at, 100 * MIB));
    assert(used_mib() == 0);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } all[] = {{"plain", plain}, {"vmm", vmm}, {"pools", pools}, {"arrays", arrays}, {"graphs", graphs}, {"graph_time", graph_time}};
    assert(argc == 2);
    if (strcmp(argv[1], "handles") == 0) {
        handles();
        return 0;
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strcmp(argv[1], all[i].name) == 0) {
            start();
            all[i].run();
            return 0;
        }
    return 2;
}
