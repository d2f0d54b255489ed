/* clients.c - slots, and the requests of those who hold them.
 *
 * A connection gets a slot at HELLO; its hang-up empties the slot, which is how the memory of a killed process is free again.
 * What does not parse is answered with FAILED and a hang-up, and touches nobody else.
 */
#define _GNU_SOURCE
#include "client.h"
#include "daemon.h"
#include "message.h"

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

/* Answers in the request's own place. A sentence: it was no request of ours, and its sender is hung up on. */
static const char *answer(struct daemon *daemon, uint32_t slot, struct fake_message *message, struct passed *fd)
{
    struct fake_slot *of = &daemon->page->slot[slot];
    const uint32_t type = message->type;
    bool good = true;
    if ((type == FAKE_HELLO) != (of->kind == FAKE_FREE))
        return "a request before HELLO, or a second one";
    if (type == FAKE_HELLO && message->kind != FAKE_CUDA && message->kind != FAKE_NVML && message->kind != FAKE_CTL)
        return "HELLO names an unknown kind of client";
    if (type == FAKE_HELLO) {
        of->kind = message->kind;
        message->slot = slot;
        fd->out = daemon->page_fd;
        if (of->kind == FAKE_CUDA)
            sample_start(daemon);
    } else if (type == FAKE_SHARE || type == FAKE_IMPORT || type == FAKE_RELEASE) {
        good = object_request(daemon, slot, message, fd);
    } else if (type == FAKE_COMMAND) {
        char line[FAKE_TEXT];
        struct text text = {.at = message->text, .room = sizeof message->text};
        snprintf(line, sizeof line, "%.*s", (int)sizeof line - 1, message->text);
        message->text[0] = '\0';
        good = line_run(daemon, COMMAND, line, &text);
    } else {
        return "a request of unknown type";
    }
    message->type = good ? FAKE_DONE : FAKE_REFUSED;
    return NULL;
}

void client_answer(struct daemon *daemon, uint32_t slot)
{
    static struct fake_message message;
    struct passed fd = {-1, -1};
    const int socket_fd = daemon->polled[slot].fd, got = message_receive(socket_fd, &message, &fd.in, MSG_DONTWAIT);
    if (got == -EAGAIN)
        return;
    if (got == -ECONNRESET) {
        drop(daemon, slot);
        return;
    }
    drop_ended(daemon, slot);
    const char *wrong = got == 0 ? answer(daemon, slot, &message, &fd) : "a message that is not ours";
    if (wrong != NULL) {
        message.type = FAKE_REFUSED;
        snprintf(message.text, sizeof message.text, "%s", wrong);
        fprintf(stderr, "nvidia-fake-driverd: pid %d is hung up on: %s\n", (int)daemon->page->slot[slot].pid, wrong);
    }
    const bool sent = message_send(socket_fd, &message, fd.out, MSG_DONTWAIT) == 0;
    if (fd.in >= 0)
        close(fd.in);
    if (wrong != NULL || !sent)
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
