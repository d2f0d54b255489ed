/* clients.c - slots, and the requests of those who hold them.
 *
 * A connection gets a slot when it is accepted; its hang-up empties the slot, which is how the memory of a killed process is free
 * again. What is no request is answered with a sentence and a hang-up, and touches nobody else.
 */
#define _GNU_SOURCE
#include "client.h"
#include "daemon.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

uint32_t slot_from(uint32_t from, enum fake_kind kind, uint64_t pid)
{
    const struct fake_slot *slot = driver.page->slot;
    while (from < FAKE_SLOTS && (slot[from].kind != (uint32_t)kind || slot[from].pid != (int32_t)pid))
        from++;
    return from;
}

/* FAKE_SLOTS: all are taken. */
static uint32_t new_slot(int32_t pid)
{
    uint32_t slot = 0;
    while (slot < FAKE_SLOTS && (driver.polled[slot].fd >= 0 || driver.page->slot[slot].kind != FAKE_FREE))
        slot++;
    if (slot < FAKE_SLOTS)
        driver.page->slot[slot].pid = pid;
    return slot;
}

static void empty_slot(uint32_t slot)
{
    gpu_time_drop(driver.page, slot);
    page_lock(driver.page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        driver.page->unit[unit].used_bytes[slot] = 0;
    memset(&driver.page->slot[slot], 0, sizeof driver.page->slot[slot]);
    page_unlock(driver.page);
}

void client_accept(void)
{
    const int fd = accept4(driver.polled[LISTENER].fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (fd < 0)
        return;
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
    const uint32_t slot = known ? new_slot(peer.pid) : FAKE_SLOTS;
    if (slot == FAKE_SLOTS) {
        fprintf(stderr, "nvidia-fake-driverd: a client is turned away: all %u slots are taken\n", FAKE_SLOTS);
        close(fd);
        return;
    }
    driver.polled[slot].fd = fd;
    if (!process_name(peer.pid, driver.page->slot[slot].name))
        snprintf(driver.page->slot[slot].name, FAKE_NAME, "[unknown]");
}

static void drop(uint32_t slot)
{
    object_drop_slot(slot);
    empty_slot(slot);
    close(driver.polled[slot].fd);
    driver.polled[slot].fd = -1;
}

/* A process that has ended holds nothing more, as soon as anybody can know of its end: who is answered looks first, since its
 * request may have been sent after that hang-up and be seen before it. */
static void drop_ended(uint32_t but)
{
    struct pollfd now[FAKE_SLOTS];
    memcpy(now, driver.polled, sizeof now);
    now[but].fd = -1;
    poll(now, FAKE_SLOTS, 0);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (now[slot].fd >= 0 && (now[slot].revents & POLLHUP))
            drop(slot);
}

static bool run_command(struct fake_message *message)
{
    char line[FAKE_TEXT];
    snprintf(line, sizeof line, "%.*s", (int)sizeof line - 1, message->text);
    message->text[0] = '\0';
    driver.answer = (struct text){.at = message->text, .room = sizeof message->text};
    return line_run(COMMAND, line);
}

/* Answers in the request's own place. A sentence: it was no request of ours, and its sender is hung up on. */
static const char *answer(uint32_t slot, struct fake_message *message, struct passed *fd)
{
    const uint32_t type = message->type, kind = message->kind;
    struct fake_slot *of = &driver.page->slot[slot];
    bool good = true;
    if ((type == FAKE_HELLO) != (of->kind == FAKE_FREE))
        return "a request before HELLO, or a second one";
    if (type == FAKE_HELLO) {
        if (kind != FAKE_CUDA && kind != FAKE_NVML && kind != FAKE_CTL)
            return "HELLO names an unknown kind of client";
        of->kind = kind;
        message->slot = slot;
        fd->out = driver.page_fd;
    } else if (type == FAKE_SHARE || type == FAKE_IMPORT || type == FAKE_RELEASE) {
        good = object_request(slot, message, fd);
    } else if (type == FAKE_COMMAND) {
        good = run_command(message);
    } else {
        return "a request of unknown type";
    }
    message->type = good ? FAKE_DONE : FAKE_REFUSED;
    return NULL;
}

void client_answer(uint32_t slot)
{
    static struct fake_message message;
    struct passed fd = {-1, -1};
    const int socket_fd = driver.polled[slot].fd, got = message_receive(socket_fd, &message, &fd.in, MSG_DONTWAIT);
    if (got == -EAGAIN)
        return;
    if (got == -ECONNRESET) {
        drop(slot);
        return;
    }
    drop_ended(slot);
    const char *wrong = got == 0 ? answer(slot, &message, &fd) : "a message that is not ours";
    if (wrong != NULL) {
        message.type = FAKE_REFUSED;
        snprintf(message.text, sizeof message.text, "%s", wrong);
        fprintf(stderr, "nvidia-fake-driverd: pid %d is hung up on: %s\n", (int)driver.page->slot[slot].pid, wrong);
    }
    const bool sent = message_send(socket_fd, &message, fd.out, MSG_DONTWAIT) == 0;
    if (fd.in >= 0)
        close(fd.in);
    if (wrong != NULL || !sent)
        drop(slot);
}

/* Processes that are not ours: a slot without a client. */

bool add_process(const struct value *value)
{
    const uint32_t unit = (uint32_t)value[0].number, slot = new_slot((int32_t)value[1].number);
    if (slot == FAKE_SLOTS)
        return REFUSE("process %s: all %u slots are taken", value[1].word, FAKE_SLOTS);
    if (!page_take(driver.page, slot, unit, value[2].number * FAKE_MIB))
        return REFUSE("process %s: %s MiB is more than is free", value[1].word, value[2].word);
    struct fake_slot *of = &driver.page->slot[slot];
    of->contexts[unit] = 1;
    snprintf(of->name, sizeof of->name, "%s", value[3].word);
    of->kind = FAKE_FOREIGN;
    return true;
}

bool end_process(const struct value *value)
{
    uint32_t slot = slot_from(0, FAKE_FOREIGN, value[0].number);
    if (slot == FAKE_SLOTS)
        return REFUSE("pid is %s, but no process of that number was described", value[0].word);
    for (; slot < FAKE_SLOTS; slot = slot_from(slot, FAKE_FOREIGN, value[0].number))
        empty_slot(slot);
    return true;
}
