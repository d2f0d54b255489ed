/* raw.c - takes memory by the fake driver's own protocol, as a static program that makes the driver's ioctls itself would: no libcuda, and no loader
 * that preloads anything.
 *
 *     raw SOCKET MIB GPU [ROOT [ended]]    with ROOT, unless that is empty, it changes its root to that directory between connecting and
 *                                           allocating; with `ended` its first thread ends, and another one stays
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "wire.h"

static void print_line(const char *text, unsigned long long mib)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    printf("%lld.%03ld %s %llu MiB\n", (long long)now.tv_sec, now.tv_nsec / 1000000, text, mib);
    fflush(stdout);
}

static void *stay(void *unused)
{
    for (;;)
        pause();
    return unused;
}

int main(int count, char **word)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (count < 4)
        return 2;
    strncpy(to.sun_path, word[1], sizeof to.sun_path - 1);
    const unsigned long long mib = strtoull(word[2], NULL, 10);
    const unsigned long gpu = strtoul(word[3], NULL, 10) % FAKE_GPUS;
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        return 3;
    struct fake_message in;
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {&in, sizeof in};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(fd, &message, 0) < 0)
        return 4;
    int page_fd;
    memcpy(&page_fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof page_fd);
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    if (page == MAP_FAILED)
        return 5;
    if (count > 4 && *word[4] && (chroot(word[4]) != 0 || chdir("/") != 0))
        return 6;
    page->slot[in.slot].kind = FAKE_CUDA;
    page->slot[in.slot].contexts[gpu] = 1;
    atomic_fetch_add(&page->unit[gpu].used_bytes[in.slot], mib * FAKE_MIB);
    print_line("allocated", mib);
    pthread_t other;
    if (count > 5 && pthread_create(&other, NULL, stay, NULL) == 0)
        syscall(SYS_exit, 0); /* of this thread alone: pthread_exit needs a shared library */
    for (;;)
        pause();
}
