/* clients.c - slots, and the requests of those who hold them.
 *
 * A connection gets a slot at HELLO; its hang-up empties the slot, which is how the memory of a killed process is free again.
 * What does not parse is answered with FAILED and a hang-up, and touches nobody else.
 */
#define _GNU_SOURCE
#include "client.h"
#include "daemon.h"
#include "packet.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

void clients_init(struct daemon *daemon)
{
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        daemon->client_fd[slot] = -1;
}

static int free_slot(const struct daemon *daemon)
{
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (daemon->client_fd[slot] < 0 && daemon->page->slot[slot].kind == FAKE_FREE)
            return (int)slot;
    return -1;
}

bool client_accept(struct daemon *daemon)
{
    const int fd = accept4(daemon->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return false;
    const int slot = free_slot(daemon);
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (slot < 0 || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
        fprintf(stderr, "nvidia-fake-driverd: a client is turned away: all %u slots are taken\n", FAKE_SLOTS);
        close(fd);
        return true;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)slot};
    if (epoll_ctl(daemon->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        close(fd);
        return true;
    }
    daemon->client_fd[slot] = fd;
    struct fake_slot *of = &daemon->page->slot[slot];
    memset(of, 0, sizeof *of);
    memset(daemon->last_slot_ran_ns[slot], 0, sizeof daemon->last_slot_ran_ns[slot]);
    of->pid = peer.pid;
    if (!process_name(of->pid, of->name))
        snprintf(of->name, sizeof of->name, "[unknown]");
    return true;
}

static void empty_slot(struct daemon *daemon, uint32_t slot)
{
    struct fake_page *page = daemon->page;
    gpu_time_drop(page, slot);
    page_lock(page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        const uint64_t held = page->slot[slot].used_bytes[unit];
        page->unit[unit].used_bytes -= held < page->unit[unit].used_bytes ? held : page->unit[unit].used_bytes;
    }
    memset(&page->slot[slot], 0, sizeof page->slot[slot]);
    page_unlock(page);
}

void client_drop(struct daemon *daemon, uint32_t slot)
{
    object_drop_slot(daemon, slot);
    empty_slot(daemon, slot);
    close(daemon->client_fd[slot]);
    daemon->client_fd[slot] = -1;
}

/* A process that has ended holds nothing more, as soon as anybody can know of its end. epoll may tell of a request that was
 * sent after a hang-up before it tells of the hang-up: who is answered looks first. */
static void drop_ended(struct daemon *daemon, uint32_t but)
{
    struct pollfd others[FAKE_SLOTS];
    uint32_t slot_of[FAKE_SLOTS], count = 0;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (slot != but && daemon->client_fd[slot] >= 0) {
            others[count] = (struct pollfd){.fd = daemon->client_fd[slot]};
            slot_of[count++] = slot;
        }
    if (poll(others, count, 0) <= 0)
        return;
    for (uint32_t i = 0; i < count; i++)
        if (others[i].revents & POLLHUP)
            client_drop(daemon, slot_of[i]);
}

static bool reply(const struct daemon *daemon, uint32_t slot, uint32_t type, const void *body, size_t length, int fd)
{
    return packet_send(daemon->client_fd[slot], type, body, length, fd, MSG_DONTWAIT) == 0;
}

static bool refuse(const struct daemon *daemon, uint32_t slot, const char *why)
{
    reply(daemon, slot, FAKE_FAILED, why, strlen(why), -1);
    fprintf(stderr, "nvidia-fake-driverd: pid %d is hung up on: %s\n", (int)daemon->page->slot[slot].pid, why);
    return false;
}

static bool on_hello(struct daemon *daemon, uint32_t slot, const struct fake_packet *packet)
{
    struct fake_hello hello;
    struct fake_slot *of = &daemon->page->slot[slot];
    if (packet->header.length != sizeof hello || of->kind != FAKE_FREE)
        return refuse(daemon, slot, "a HELLO of another size, or a second one");
    memcpy(&hello, packet->body, sizeof hello);
    if (hello.page_version != FAKE_PAGE_VERSION)
        return refuse(daemon, slot, "the library is of another version than the daemon");
    if (hello.kind != FAKE_CUDA && hello.kind != FAKE_NVML && hello.kind != FAKE_CTL)
        return refuse(daemon, slot, "HELLO names an unknown kind of client");
    of->kind = hello.kind;
    if (hello.kind == FAKE_CUDA)
        sample_start(daemon);
    const struct fake_welcome welcome = {.slot = slot};
    return reply(daemon, slot, FAKE_OK, &welcome, sizeof welcome, daemon->page_fd);
}

static bool on_object(struct daemon *daemon, uint32_t slot, const struct fake_packet *packet, int *fd)
{
    struct fake_object object;
    if (packet->header.length != sizeof object)
        return refuse(daemon, slot, "an object of another size");
    memcpy(&object, packet->body, sizeof object);
    int out = -1;
    bool good = true;
    if (packet->header.type == FAKE_SHARE) {
        good = *fd >= 0 && object_share(daemon, slot, &object, *fd);
        if (good)
            *fd = -1; /* the object keeps it */
    } else if (packet->header.type == FAKE_IMPORT) {
        out = object_import(slot, &object);
        good = out >= 0;
    } else {
        good = object_release(daemon, slot, object.id);
    }
    static const char unknown[] = "no such object";
    return good ? reply(daemon, slot, FAKE_OK, &object, sizeof object, out)
                : reply(daemon, slot, FAKE_FAILED, unknown, sizeof unknown - 1, -1);
}

static bool on_command(struct daemon *daemon, uint32_t slot, const struct fake_packet *packet)
{
    char line[512];
    if (packet->header.length >= sizeof line)
        return refuse(daemon, slot, "a command of more than 511 characters");
    memcpy(line, packet->body, packet->header.length);
    line[packet->header.length] = '\0';
    static char answer[FAKE_BODY];
    struct text text = {.at = answer, .room = sizeof answer};
    answer[0] = '\0';
    const bool good = command_run(daemon, line, &text);
    return reply(daemon, slot, good ? FAKE_OK : FAKE_FAILED, answer, text.length, -1);
}

static bool on_packet(struct daemon *daemon, uint32_t slot, const struct fake_packet *packet, int *fd)
{
    if (packet->header.type != FAKE_HELLO && daemon->page->slot[slot].kind == FAKE_FREE)
        return refuse(daemon, slot, "a request before HELLO");
    switch (packet->header.type) {
    case FAKE_HELLO: return on_hello(daemon, slot, packet);
    case FAKE_SHARE:
    case FAKE_IMPORT:
    case FAKE_RELEASE: return on_object(daemon, slot, packet, fd);
    case FAKE_COMMAND: return on_command(daemon, slot, packet);
    default: return refuse(daemon, slot, "a request of unknown type");
    }
}

void client_answer(struct daemon *daemon, uint32_t slot)
{
    static struct fake_packet packet;
    int fd = -1;
    const int got = packet_receive(daemon->client_fd[slot], &packet, &fd, MSG_DONTWAIT);
    if (got == -EAGAIN)
        return;
    drop_ended(daemon, slot);
    const bool stay = got > 0 ? on_packet(daemon, slot, &packet, &fd)
                              : got == -EPROTO && refuse(daemon, slot, "a packet that is not ours");
    if (fd >= 0)
        close(fd);
    if (!stay)
        client_drop(daemon, slot);
}

bool foreign_add(struct daemon *daemon, uint32_t unit, int32_t pid, uint64_t bytes, const char *name, struct text *why)
{
    const int slot = free_slot(daemon);
    if (slot < 0)
        return say(why, "process %d: all %u slots are taken", (int)pid, FAKE_SLOTS), false;
    struct fake_slot *of = &daemon->page->slot[slot];
    memset(of, 0, sizeof *of);
    of->kind = FAKE_FOREIGN;
    of->pid = pid;
    of->contexts[unit] = 1;
    snprintf(of->name, sizeof of->name, "%s", name);
    if (page_take(daemon->page, (uint32_t)slot, unit, bytes))
        return true;
    memset(of, 0, sizeof *of);
    say(why, "process %d: %llu MiB is more than is free", (int)pid, (unsigned long long)(bytes / FAKE_MIB));
    return false;
}

bool foreign_remove(struct daemon *daemon, int32_t pid, struct text *why)
{
    bool found = false;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (daemon->page->slot[slot].kind == FAKE_FOREIGN && daemon->page->slot[slot].pid == pid) {
            empty_slot(daemon, slot);
            found = true;
        }
    if (!found)
        say(why, "pid is %d, but no process of that number was described", (int)pid);
    return found;
}
