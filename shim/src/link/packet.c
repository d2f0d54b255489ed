/* packet.c - one packet over the arbiter's socket, sent or received whole or not at all. It never blocks for long.
 *
 * A program may close a descriptor that it did not open, and get the number again for a file of its own. So an end records its
 * socket, and nothing is sent to, read from or closed under a number that has become another file's. It records its process, too:
 * what a child of a bare fork sends or reads on its parent's connection would count as the parent's.
 */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

bool wire_is_there(const struct wire_end *end)
{
    struct stat there;
    return end->fd >= 0 && fstat(end->fd, &there) == 0 && there.st_dev == end->device && there.st_ino == end->inode;
}

bool wire_is_ours(const struct wire_end *end)
{
    return process_owns(end->pid) && wire_is_there(end);
}

enum { ENDING_MS = 2000 }; /* so long an arbiter whose connections have ended may still listen, at most; guessed */

static struct wire_file file_at(const char *path)
{
    struct stat there;
    if (stat(path, &there) != 0 && !root_stat(&there))
        return (struct wire_file){0};
    return (struct wire_file){there.st_dev, there.st_ino, there.st_mtim};
}

static bool same_file(const struct wire_file *one, const struct wire_file *other)
{
    return one->device == other->device && one->inode == other->inode && one->made.tv_sec == other->made.tv_sec &&
           one->made.tv_nsec == other->made.tv_nsec;
}

/* The kernel closes a killed arbiter's sockets one by one, on a busy machine with pauses in between. Its socket may still listen when our
 * connection has ended: a new connection would be closed too, and a socket of the reserve lost. So the reserve waits for another arbiter's
 * file. If there is none after a while, the arbiter is alive and has closed only our connection. */
static bool may_spend(const struct wire_past *past, const struct wire_file *file)
{
    bool another = past->file.inode != 0 && file->inode != 0 && !same_file(&past->file, file);
    return past->ended_ms == 0 || another || now_ms() >= past->ended_ms + ENDING_MS;
}

/* A full backlog is a failure as well: it never blocks. The descriptor's number is the kernel's choice: moving it up would grow
 * the descriptor table, which costs a process of several threads 5 to 20 ms (measured). */
bool wire_connect(struct wire_end *end, const char *path, const struct wire_past *past)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    *end = WIRE_NO_END;
    if (process_is_guest()) /* its descriptors may be its own */
        return false;
    if (strlen(path) >= sizeof address.sun_path)
        return false;
    strcpy(address.sun_path, path);
    const struct wire_file before = file_at(path);
    bool made = wire_socket(end);
    if (!made && (!may_spend(past, &before) || !spare_sockets_take(end)))
        return false;
    if (connect(end->fd, (const struct sockaddr *)&address, sizeof address) == 0 || root_connect(end->fd)) {
        const struct wire_file after = file_at(path);
        end->file = same_file(&before, &after) ? before : (struct wire_file){0};
        return true;
    }
    if (made)
        wire_close(end);
    else
        spare_sockets_return(end);
    return false;
}

bool wire_has_descriptor(void)
{
    struct wire_end end;
    bool made = wire_socket(&end);
    if (made)
        wire_close(&end);
    return made;
}

/* Of the kernel, 4 KiB or up to 64 on arm64: no map is a part of one. */
static size_t whole_pages(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* What an arbiter understands is kept: the next one does, too. */
static void *map_nothing(void *at)
{
    struct wire_gpu_time *state = at == NULL ? NULL : (struct wire_gpu_time *)(void *)((char *)at + WIRE_GPU_TIME_AT);
    uint32_t features = state == NULL ? 0 : atomic_load(&state->features), wait_ms = state == NULL ? 0 : atomic_load(&state->wait_ms);
    void *page = mmap(at, whole_pages(WIRE_PAGE_BYTES), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at != NULL ? MAP_FIXED : 0), -1, 0);
    if (page == MAP_FAILED)
        return page;
    state = (struct wire_gpu_time *)(void *)((char *)page + WIRE_GPU_TIME_AT);
    atomic_store(&state->features, features);
    atomic_store(&state->wait_ms, wait_ms);
    mprotect(page, whole_pages(WIRE_PAGE_BYTES), PROT_READ);
    return page;
}

void *wire_map_page(void *at, int fd)
{
    if (fd < 0)
        return map_nothing(at);
    return mmap(at, whole_pages(WIRE_PAGE_BYTES), PROT_READ, MAP_SHARED | (at != NULL ? MAP_FIXED : 0), fd, 0);
}

bool wire_socket(struct wire_end *end)
{
    return wire_own(end, socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

bool wire_own(struct wire_end *end, int fd)
{
    struct stat there;
    *end = WIRE_NO_END;
    if (fd >= 0 && fd <= STDERR_FILENO) { /* the program closed those: what it writes there must not come to us */
        int higher = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(fd);
        fd = higher;
    }
    if (fd < 0)
        return false;
    if (fstat(fd, &there) != 0) {
        close(fd);
        return false;
    }
    *end = (struct wire_end){.fd = fd, .pid = getpid(), .device = there.st_dev, .inode = there.st_ino};
    return true;
}

void wire_close(struct wire_end *end)
{
    if (wire_is_there(end)) /* in a child: our copy, and the parent's stays open */
        close(end->fd);
    *end = WIRE_NO_END;
}

struct wire_past wire_ended(struct wire_end *end)
{
    struct wire_past past = {end->file, now_ms()};
    wire_close(end);
    return past;
}

void wire_hang_up(const struct wire_end *end)
{
    if (wire_is_ours(end))
        shutdown(end->fd, SHUT_RDWR);
}

bool wire_readable(const struct wire_end *end, uint64_t ms)
{
    struct pollfd ready = {.fd = end->fd, .events = POLLIN};
    int rc;
    do
        rc = poll(&ready, 1, ms > INT_MAX ? INT_MAX : (int)ms);
    while (rc < 0 && errno == EINTR);
    return rc > 0;
}

bool wire_send(const struct wire_end *end, enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes)
{
    return wire_send_fd(end, type, seq, body, body_bytes, -1);
}

bool wire_send_fd(const struct wire_end *end, enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes, int passed_fd)
{
    return wire_send_fds(end, type, seq, body, body_bytes, &passed_fd, passed_fd >= 0);
}

bool wire_send_fds(const struct wire_end *end, enum wire_type type, uint32_t seq, const void *body, uint32_t body_bytes, const int *passed_fd,
                   unsigned passed_fds)
{
    if (!wire_is_ours(end)) {
        errno = EBADF;
        return false;
    }
    struct wire_header header = {WIRE_MAGIC, WIRE_VERSION, (uint16_t)type, seq, body_bytes};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)(uintptr_t)body, body_bytes}};
    union {
        struct cmsghdr align;
        char buffer[CMSG_SPACE(WIRE_BLOCKS_LIMIT * sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (passed_fds > 0) {
        const size_t passed_bytes = passed_fds * sizeof *passed_fd;
        message.msg_control = control.buffer;
        message.msg_controllen = CMSG_SPACE(passed_bytes);
        struct cmsghdr *passed = CMSG_FIRSTHDR(&message);
        passed->cmsg_level = SOL_SOCKET;
        passed->cmsg_type = SCM_RIGHTS;
        passed->cmsg_len = CMSG_LEN(passed_bytes);
        memcpy(CMSG_DATA(passed), passed_fd, passed_bytes);
    }
    ssize_t sent;
    do
        sent = sendmsg(end->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)(sizeof header + body_bytes);
}

static uint32_t least_body(uint16_t type)
{
    switch (type) {
    case WIRE_WELCOME:
        return 8;
    case WIRE_LEASED:
        return sizeof(struct wire_leased);
    case WIRE_RECALL:
    case WIRE_PENDING:
    case WIRE_SWAP_OUT:
        return sizeof(struct wire_amount);
    case WIRE_BURST:
        return sizeof(struct wire_burst);
    case WIRE_UNMAP:
    case WIRE_SWAP_IN:
    case WIRE_FILLED:
    case WIRE_DISCARDED:
        return sizeof(struct wire_ids);
    case WIRE_CANCEL:
        return sizeof(struct wire_gpu_only);
    case WIRE_ERROR:
        return sizeof(struct wire_error);
    case WIRE_MEASURED:
        return sizeof(struct wire_measured);
    case WIRE_PROCESS_LIST:
        return 8;
    case WIRE_EXPORT:
        return sizeof(struct wire_handle);
    case WIRE_EXPORTED:
        return sizeof(struct wire_exported);
    default:
        return UINT32_MAX; /* not for us */
    }
}

static bool well_formed(const struct wire_packet *packet, size_t got)
{
    const struct wire_header *header = &packet->header;
    if (got < sizeof *header || header->magic != WIRE_MAGIC || header->version != WIRE_VERSION)
        return false;
    if (header->body_bytes != got - sizeof *header || header->body_bytes < least_body(header->type))
        return false;
    if (header->type == WIRE_PROCESS_LIST) {
        uint32_t count = packet->body.process_list.count;
        return count <= WIRE_PROCESSES_LIMIT && header->body_bytes == 8 + count * sizeof(struct wire_process);
    }
    if (header->type != WIRE_WELCOME)
        return true;
    uint32_t gpus = packet->body.welcome.gpus;
    return gpus <= WIRE_GPUS && header->body_bytes == 8 + gpus * sizeof(struct wire_gpu);
}

void wire_passed_close(struct wire_passed *passed)
{
    for (unsigned i = 0; i < passed->count; i++)
        if (passed->fd[i] >= 0)
            close(passed->fd[i]);
    passed->count = 0;
}

/* False when the peer closed the connection, or the data is no packet of this protocol. Descriptors for which no number was left are missing. */
bool wire_receive_all(const struct wire_end *end, struct wire_packet *packet, struct wire_passed *passed)
{
    union {
        struct cmsghdr align;
        char buffer[CMSG_SPACE(WIRE_PASSED_LIMIT * sizeof(int))];
    } control;
    struct iovec part = {packet, sizeof *packet};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got;
    passed->count = 0;
    if (!wire_is_ours(end))
        return false;
    do
        got = recvmsg(end->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got <= 0)
        return false;
    struct cmsghdr *came = CMSG_FIRSTHDR(&message);
    if (came != NULL && came->cmsg_level == SOL_SOCKET && came->cmsg_type == SCM_RIGHTS) {
        const size_t bytes = came->cmsg_len - CMSG_LEN(0);
        passed->count = (unsigned)(bytes / sizeof *passed->fd);
        memcpy(passed->fd, CMSG_DATA(came), passed->count * sizeof *passed->fd);
    }
    return (message.msg_flags & MSG_TRUNC) == 0 && well_formed(packet, (size_t)got);
}

/* The same, of which one descriptor at most is wanted; -1: there is none. */
bool wire_receive(const struct wire_end *end, struct wire_packet *packet, int *passed_fd)
{
    struct wire_passed passed;
    const bool good = wire_receive_all(end, packet, &passed);
    *passed_fd = passed.count > 0 ? passed.fd[0] : -1;
    if (passed.count > 0)
        passed.fd[0] = -1;
    wire_passed_close(&passed);
    return good;
}
