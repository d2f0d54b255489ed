/* packet.c - one packet, out or in. */
#define _GNU_SOURCE
#include "packet.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
};

int packet_send(int socket_fd, uint32_t type, const void *body, size_t length, int fd, int flags)
{
    struct fake_header header = {.magic = FAKE_PACKET_MAGIC, .type = type, .length = (uint32_t)length};
    struct iovec parts[2] = {{.iov_base = &header, .iov_len = sizeof header}, {.iov_base = (void *)(uintptr_t)body, .iov_len = length}};
    union control control = {0};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    ssize_t sent;
    do {
        sent = sendmsg(socket_fd, &message, MSG_NOSIGNAL | flags);
    } while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

int packet_receive(int socket_fd, struct fake_packet *packet, int *fd, int flags)
{
    struct iovec part = {.iov_base = packet, .iov_len = sizeof *packet};
    union control control = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t got;
    *fd = -1;
    do {
        got = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | flags);
    } while (got < 0 && errno == EINTR);
    if (got <= 0)
        return got < 0 ? -errno : 0;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    if (rights != NULL && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(rights), sizeof *fd);
    const bool ours = (message.msg_flags & MSG_TRUNC) == 0 && (size_t)got >= sizeof packet->header && packet->header.magic == FAKE_PACKET_MAGIC &&
                      packet->header.length <= FAKE_BODY && (size_t)got == sizeof packet->header + packet->header.length;
    return ours ? 1 : -EPROTO;
}
