/* socket.c - see socket.h. */
#include "socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "fail.h"

enum { BACKLOG = 4, DESCRIPTORS_READ = 4, SOCKET_PATH = sizeof((struct sockaddr_un *)0)->sun_path };

/* So that a second copier does not take the place of one that serves: the lock lasts as long as the process. */
static void lock_beside(const char *path)
{
    char lock[SOCKET_PATH + sizeof ".lock"];
    snprintf(lock, sizeof lock, "%s.lock", path);
    int file = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0)
        fail("%s: %s", lock, strerror(errno));
    if (flock(file, LOCK_EX | LOCK_NB) != 0)
        fail("socket %s: another copier serves it", path);
}

int socket_listen(const char *path)
{
    char fresh[SOCKET_PATH];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (snprintf(fresh, sizeof fresh, "%s.new", path) >= (int)sizeof fresh)
        fail("socket %s: the path is longer than %zu characters", path, sizeof fresh - sizeof ".new");
    strcpy(address.sun_path, fresh);
    lock_beside(path);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(fresh);
    umask(0177);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, BACKLOG) != 0 || rename(fresh, path) != 0)
        fail("socket %s: %s", path, strerror(errno));
    return listener;
}

int socket_accept(int listener, bool *lacks)
{
    int peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct ucred from;
    socklen_t size = sizeof from;
    *lacks = peer < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
    if (peer < 0)
        return -1;
    if (getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &from, &size) == 0 && (from.uid == 0 || from.uid == geteuid()))
        return peer;
    const struct packet rejected = error_packet(COPIER_NOT_ALLOWED, "only root may connect");
    socket_send(peer, &rejected);
    close(peer);
    return -1;
}

struct packet packet_of(enum copier_type type, size_t body_bytes)
{
    return (struct packet){
        .header = {.magic = COPIER_MAGIC, .version = COPIER_VERSION, .type = (uint16_t)type, .body_bytes = (uint32_t)body_bytes}};
}

struct packet error_packet(enum copier_reason reason, const char *text)
{
    struct packet packet = packet_of(COPIER_ERROR, sizeof packet.body.error);
    packet.body.error.reason = reason;
    snprintf(packet.body.error.text, sizeof packet.body.error.text, "%s", text);
    return packet;
}

/* The one descriptor of a message, of which all others are closed; -1: there is not exactly one. */
static int only_descriptor(struct msghdr *message)
{
    int only = -1;
    unsigned count = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        size_t bytes = part->cmsg_len - CMSG_LEN(0);
        for (size_t at = 0; at + sizeof only <= bytes; at += sizeof only) {
            if (count++ > 0)
                close(only);
            memcpy(&only, CMSG_DATA(part) + at, sizeof only);
        }
    }
    if (count > 1)
        close(only);
    return count == 1 ? only : -1;
}

/* NULL: it is a request. */
static const char *wrong_with(const struct packet *packet, size_t bytes)
{
    static const size_t body_bytes[] = {[COPIER_SAVE] = sizeof(struct copier_job),
                                        [COPIER_RESTORE] = sizeof(struct copier_job),
                                        [COPIER_FORGET] = sizeof(struct copier_forget),
                                        [COPIER_STATUS] = 0};
    const struct copier_header *header = &packet->header;
    if (bytes < sizeof *header || header->magic != COPIER_MAGIC)
        return "the packet does not begin with the header of this protocol";
    if (header->version != COPIER_VERSION)
        return "the packet has another version than 1";
    if (header->type < COPIER_SAVE || header->type > COPIER_STATUS)
        return "the packet is no request";
    if (header->body_bytes != body_bytes[header->type] || bytes != sizeof *header + header->body_bytes)
        return "the packet's length is not that of its type";
    return NULL;
}

enum received socket_receive(int peer, struct packet *packet, int *descriptor, const char **why)
{
    union {
        struct cmsghdr header;
        char buffer[CMSG_SPACE(DESCRIPTORS_READ * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = packet, .iov_len = sizeof *packet};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(peer, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? NOTHING_YET : PEER_GONE;
    *descriptor = only_descriptor(&message);
    if (*descriptor >= 0 && (got == 0 || (message.msg_flags & MSG_CTRUNC) != 0)) { /* nobody takes it, or there were more */
        close(*descriptor);
        *descriptor = -1;
    }
    if (got == 0)
        return PEER_GONE;
    *why = (message.msg_flags & MSG_TRUNC) != 0 ? "the packet is longer than any request" : wrong_with(packet, (size_t)got);
    return *why == NULL ? RECEIVED : RECEIVED_BAD;
}

bool socket_send(int peer, const struct packet *packet)
{
    return send(peer, packet, sizeof packet->header + packet->header.body_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}
