/* message.c - one message, out or in. */
#define _GNU_SOURCE
#include "client.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

struct envelope {
    struct msghdr header;
    struct iovec body;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } rights; /* room for one descriptor */
};

static struct msghdr *seal(struct envelope *envelope, struct fake_message *message)
{
    envelope->body = (struct iovec){.iov_base = message, .iov_len = sizeof *message};
    envelope->header = (struct msghdr){.msg_iov = &envelope->body, .msg_iovlen = 1, .msg_control = &envelope->rights,
                                       .msg_controllen = sizeof envelope->rights};
    return &envelope->header;
}

int message_send(int socket_fd, struct fake_message *message, int fd)
{
    struct envelope envelope = {.rights.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)}};
    struct msghdr *header = seal(&envelope, message);
    memcpy(CMSG_DATA(&envelope.rights.head), &fd, sizeof fd);
    if (fd < 0)
        header->msg_controllen = 0;
    message->version = FAKE_PAGE_VERSION;
    while (sendmsg(socket_fd, header, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            return -errno;
    return 0;
}

int message_receive(int socket_fd, struct fake_message *message, int *fd)
{
    struct envelope envelope;
    struct msghdr *header = seal(&envelope, message);
    ssize_t got;
    *fd = -1;
    while ((got = recvmsg(socket_fd, header, MSG_CMSG_CLOEXEC)) < 0)
        if (errno != EINTR)
            return -errno;
    if (got == 0)
        return -ECONNRESET;
    const struct cmsghdr *rights = CMSG_FIRSTHDR(header);
    if (rights != NULL && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(rights), sizeof *fd);
    const bool whole = got == sizeof *message && (header->msg_flags & MSG_TRUNC) == 0;
    return whole && message->version == FAKE_PAGE_VERSION ? 0 : -EPROTO;
}
