/* second_process.h - the copier of the experiment: a process of its own, which imports the owner's blocks and copies them. */
#ifndef SECOND_PROCESS_H
#define SECOND_PROCESS_H

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "owner.h"

enum { MAKE_READY = 'r', SAVE = 's', RESTORE = 'f', FREE_BYTES = 'm', QUIT = 'q' };
struct answer { double copy_s, import_s, release_s, pool_s, free_gib; };

static void send_descriptors(int to)
{
    for (size_t i = 0; i < blocks; i++) {
        char byte = 0, space[CMSG_SPACE(sizeof(int))] = {0};
        struct iovec vector = {&byte, 1};
        struct msghdr message = {0, 0, &vector, 1, space, sizeof space, 0};
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &descriptor[i], sizeof(int));
        if (sendmsg(to, &message, 0) != 1)
            perror("sendmsg");
        close(descriptor[i]);
    }
}

static int receive_descriptor(int from)
{
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec vector = {&byte, 1};
    struct msghdr message = {0, 0, &vector, 1, space, sizeof space, 0};
    if (recvmsg(from, &message, 0) != 1)
        _exit(0);
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

static void copier(int socket)
{
    CUdevice device;
    CUcontext mine;
    CUstream stream;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&mine, device));
    CHECK(cuCtxSetCurrent(mine));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUmemGenericAllocationHandle *theirs = (CUmemGenericAllocationHandle *)calloc(blocks, sizeof *theirs);
    CUdeviceptr at;
    CHECK(cuMemAddressReserve(&at, total, 0, 0, 0));
    char *pool = NULL;
    for (char order; read(socket, &order, 1) == 1 && order != QUIT;) {
        struct answer answer = {0};
        double t = now();
        if (order == MAKE_READY) {
            int file = (int)syscall(SYS_memfd_create, "pool", 0x4u /* MFD_HUGETLB */);
            if (file < 0 || ftruncate(file, (off_t)total) != 0 ||
                (pool = (char *)mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0)) == MAP_FAILED) {
                pool = (char *)mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                madvise(pool, total, MADV_HUGEPAGE);
                answer.free_gib = -1; // no huge pages
            }
            for (size_t i = 0; i < total; i += 4096)
                pool[i] = 1;
            figure("pool_touch_s", now() - t);
            t = now();
            CHECK(cuMemHostRegister(pool, total, CU_MEMHOSTREGISTER_PORTABLE));
            answer.pool_s = now() - t;
        } else if (order == SAVE || order == RESTORE) {
            for (size_t i = 0; i < blocks; i++) {
                int fd = receive_descriptor(socket);
                CHECK(cuMemImportFromShareableHandle(&theirs[i], (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                close(fd);
                CHECK(cuMemMap(at + i * block_bytes, block_bytes, 0, theirs[i], 0));
            }
            CHECK(cuMemSetAccess(at, total, &access_here, 1));
            answer.import_s = now() - t;
            t = now();
            for (size_t done = 0, part; done < total; done += part) {
                part = total - done < 256 * MIB ? total - done : 256 * MIB;
                if (order == SAVE)
                    CHECK(cuMemcpyDtoHAsync(pool + done, at + done, part, stream));
                else
                    CHECK(cuMemcpyHtoDAsync(at + done, pool + done, part, stream));
            }
            CHECK(cuStreamSynchronize(stream));
            answer.copy_s = now() - t;
            t = now();
            CHECK(cuMemUnmap(at, total));
            for (size_t i = 0; i < blocks; i++)
                CHECK(cuMemRelease(theirs[i]));
            answer.release_s = now() - t;
        } else if (order == FREE_BYTES) {
            size_t left, all;
            CHECK(cuMemGetInfo(&left, &all));
            answer.free_gib = (double)left / GIB;
        }
        if (write(socket, &answer, sizeof answer) != sizeof answer)
            break;
    }
    _exit(0);
}

static struct answer order_copier(int socket, char order, bool send_blocks, const char *name)
{
    struct answer answer = {0};
    if (write(socket, &order, 1) != 1)
        _exit(3);
    if (send_blocks)
        send_descriptors(socket);
    struct pollfd wait = {socket, POLLIN, 0};
    if (poll(&wait, 1, 60000) != 1) {
        printf("hang copier_%s\n", name);
        fflush(stdout);
        resume_all();
        poll(&wait, 1, 60000);
        hung = true;
    }
    if (read(socket, &answer, sizeof answer) != sizeof answer) {
        printf("copier_died %s\n", name);
        _exit(3);
    }
    return answer;
}

#endif
