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
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

uint32_t slot_from(const struct fake_page *page, uint32_t from, enum fake_kind kind, uint64_t pid)
{
    while (from < FAKE_SLOTS && (page->slot[from].kind != (uint32_t)kind || page->slot[from].pid != (int32_t)pid))
        from++;
    return from;
}

/* Cleared, but for the process. FAKE_SLOTS: all are taken. */
static uint32_t new_slot(struct daemon *daemon, int32_t pid)
{
    uint32_t slot = 0;
    while (slot < FAKE_SLOTS && (daemon->polled[slot].fd >= 0 || daemon->page->slot[slot].kind != FAKE_FREE))
        slot++;
    if (slot == FAKE_SLOTS)
        return slot;
    memset(&daemon->page->slot[slot], 0, sizeof daemon->page->slot[slot]);
    memset(daemon->last_slot_ran_ns[slot], 0, sizeof daemon->last_slot_ran_ns[slot]);
    daemon->page->slot[slot].pid = pid;
    return slot;
}

static void empty_slot(struct fake_page *page, uint32_t slot)
{
    gpu_time_drop(page, slot);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        page_give(page, slot, unit, page->slot[slot].used_bytes[unit]);
    page_lock(page);
    memset(&page->slot[slot], 0, sizeof page->slot[slot]);
    page_unlock(page);
}

void client_accept(struct daemon *daemon)
{
    const int fd = accept4(daemon->polled[LISTENER].fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (fd < 0)
        return;
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
    const uint32_t slot = known ? new_slot(daemon, peer.pid) : FAKE_SLOTS;
    if (slot == FAKE_SLOTS) {
        fprintf(stderr, "nvidia-fake-driverd: a client is turned away: all %u slots are taken\n", FAKE_SLOTS);
        close(fd);
        return;
    }
    daemon->polled[slot].fd = fd;
    struct fake_slot *of = &daemon->page->slot[slot];
    if (!process_name(of->pid, of->name))
        snprintf(of->name, sizeof of->name, "[unknown]");
}

static void drop(struct daemon *daemon, uint32_t slot)
{
    object_drop_slot(daemon, slot);
    empty_slot(daemon->page, slot);
    close(daemon->polled[slot].fd);
    daemon->polled[slot].fd = -1;
}

/* A process that has ended holds nothing more, as soon as anybody can know of its end: who is answered looks first, since its
 * request may have been sent after that hang-up and be seen before it. */
static void drop_ended(struct daemon *daemon, uint32_t but)
{
    struct pollfd now[FAKE_SLOTS];
    memcpy(now, daemon->polled, sizeof now);
    now[but].fd = -1;
    poll(now, FAKE_SLOTS, 0);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (now[slot].fd >= 0 && (now[slot].revents & POLLHUP))
            drop(daemon, slot);
}

static bool reply(const struct daemon *daemon, uint32_t slot, uint32_t type, const void *body, size_t length, int fd)
{
    return packet_send(daemon->polled[slot].fd, type, body, length, fd, MSG_DONTWAIT) == 0;
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
    if (packet->header.length != sizeof hello || daemon->page->slot[slot].kind != FAKE_FREE)
        return refuse(daemon, slot, "a HELLO of another size, or a second one");
    memcpy(&hello, packet->body, sizeof hello);
    if (hello.page_version != FAKE_PAGE_VERSION)
        return refuse(daemon, slot, "the library is of another version than the daemon");
    if (hello.kind != FAKE_CUDA && hello.kind != FAKE_NVML && hello.kind != FAKE_CTL)
        return refuse(daemon, slot, "HELLO names an unknown kind of client");
    daemon->page->slot[slot].kind = hello.kind;
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
    bool good;
    if (packet->header.type == FAKE_SHARE) {
        good = *fd >= 0 && object_share(daemon, slot, &object, *fd);
        *fd = good ? -1 : *fd; /* the object keeps it */
    } else if (packet->header.type == FAKE_IMPORT) {
        out = object_import(slot, &object);
        good = out >= 0;
    } else {
        good = object_release(daemon, slot, object.id);
    }
    return good ? reply(daemon, slot, FAKE_OK, &object, sizeof object, out) : reply(daemon, slot, FAKE_FAILED, NULL, 0, -1);
}

static bool on_command(struct daemon *daemon, uint32_t slot, struct fake_packet *packet)
{
    static char answer[FAKE_BODY];
    struct text text = {.at = answer, .room = sizeof answer};
    if (packet->header.length >= FAKE_BODY)
        return refuse(daemon, slot, "a command that fills its packet");
    packet->body[packet->header.length] = '\0';
    answer[0] = '\0';
    const bool good = line_run(daemon, COMMAND, (char *)packet->body, &text);
    return reply(daemon, slot, good ? FAKE_OK : FAKE_FAILED, answer, text.length, -1);
}

static bool on_packet(struct daemon *daemon, uint32_t slot, struct fake_packet *packet, int *fd)
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
    const int got = packet_receive(daemon->polled[slot].fd, &packet, &fd, MSG_DONTWAIT);
    if (got == -EAGAIN)
        return;
    drop_ended(daemon, slot);
    const bool stay = got > 0 ? on_packet(daemon, slot, &packet, &fd) : got == -EPROTO && refuse(daemon, slot, "a packet that is not ours");
    if (fd >= 0)
        close(fd);
    if (!stay)
        drop(daemon, slot);
}

bool add_process(struct daemon *daemon, const struct value *value, struct text *why)
{
    const uint32_t unit = (uint32_t)value[0].number, slot = new_slot(daemon, (int32_t)value[1].number);
    if (slot == FAKE_SLOTS)
        return say(why, "process %s: all %u slots are taken", value[1].word, FAKE_SLOTS), false;
    struct fake_slot *of = &daemon->page->slot[slot];
    if (!page_take(daemon->page, slot, unit, value[2].number * FAKE_MIB))
        return say(why, "process %s: %s MiB is more than is free", value[1].word, value[2].word), false;
    of->contexts[unit] = 1;
    snprintf(of->name, sizeof of->name, "%s", value[3].word);
    of->kind = FAKE_FOREIGN;
    return true;
}

bool end_process(struct daemon *daemon, const struct value *value, struct text *why)
{
    struct fake_page *page = daemon->page;
    uint32_t slot = slot_from(page, 0, FAKE_FOREIGN, value[0].number);
    if (slot == FAKE_SLOTS)
        return say(why, "pid is %s, but no process of that number was described", value[0].word), false;
    for (; slot < FAKE_SLOTS; slot = slot_from(page, slot, FAKE_FOREIGN, value[0].number))
        empty_slot(page, slot);
    return true;
}
