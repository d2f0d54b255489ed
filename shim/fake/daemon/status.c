/* status.c - what the daemon says of units and processes, and what can be done to a process's kernels. */
#define _GNU_SOURCE
#include "channels.h"
#include "daemon.h"

#include <inttypes.h>
#include <stdio.h>

/* Of one moment: what a process gives another may take at once. */
static void say_unit(struct fake_page *page, uint32_t unit, const char *what, struct text *to)
{
    page_lock(page);
    say(to, "%s %s used_mib=%" PRIu64 " limit_mib=%" PRIu64 " busy_percent=%u\n", what, page->unit[unit].uuid,
        page->unit[unit].used_bytes / FAKE_MIB, page->unit[unit].limit_bytes / FAKE_MIB, atomic_load(&page->unit[unit].percent));
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        if (of->used_bytes[unit] > 0 || of->contexts[unit] > 0)
            say(to, "  pid=%d used_mib=%" PRIu64 " contexts=%u %.63s\n", (int)of->pid, of->used_bytes[unit] / FAKE_MIB,
                of->contexts[unit], of->name);
    }
    page_unlock(page);
}

bool say_status(struct daemon *daemon, const struct value *value, struct text *answer)
{
    (void)value;
    struct fake_page *page = daemon->page;
    for (uint32_t card = 0; card < page->cards; card++) {
        const struct fake_card *of = &page->card[card];
        char what[96];
        snprintf(what, sizeof what, "card %u %s mig=%s xid=%u", card, of->model, of->mig_on ? "on" : "off", atomic_load(&of->xid));
        say_unit(page, card, what, answer);
        for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
            const uint32_t unit = fake_unit_of_instance(card, i);
            snprintf(what, sizeof what, "card %u instance %u %s", card, page->unit[unit].gi, of->profile[page->unit[unit].profile].name);
            if (page->unit[unit].live)
                say_unit(page, unit, what, answer);
        }
    }
    return true;
}

static void say_process(struct fake_page *page, uint32_t slot, uint32_t unit, struct text *to)
{
    const struct fake_slot *of = &page->slot[slot];
    uint32_t channels = 0, owed = 0;
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
        const bool here = channel_is(&of->object[i]) && of->object[i].unit == unit;
        channels += here;
        owed += here ? of->object[i].disables : 0;
    }
    if (channels == 0 && atomic_load(&of->queued_ns[unit]) == 0)
        return;
    gpu_time_settle(page, unit);
    say(to, "pid=%d unit=%u channels=%u enables_owed=%u held=%u queued_us=%" PRIu64 " ran_us=%" PRIu64 "\n", (int)of->pid, unit, channels,
        owed, atomic_load(&of->held[unit]), atomic_load(&of->queued_ns[unit]) / 1000, atomic_load(&of->ran_ns[unit]) / 1000);
}

bool say_kernel(struct daemon *daemon, const struct value *value, struct text *answer)
{
    (void)value;
    struct fake_page *page = daemon->page;
    say(answer, "misuses=%" PRIu64 " %s\n", atomic_load(&page->kernel_misuses), page->kernel_misuse);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS && page->slot[slot].kind == FAKE_CUDA; unit++)
            say_process(page, slot, unit, answer);
    return true;
}

bool disable_process(struct daemon *daemon, const struct value *value, struct text *why)
{
    struct fake_page *page = daemon->page;
    uint32_t channels = 0;
    page_lock(page);
    for (uint32_t slot = 0; (slot = slot_from(page, slot, FAKE_CUDA, value[0].number)) < FAKE_SLOTS; slot++) {
        for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
            const bool compute = channel_is_compute(&page->slot[slot].object[i]);
            channels += compute;
            page->slot[slot].object[i].disables += compute;
        }
        channels_hold(page, slot);
    }
    page_unlock(page);
    if (channels == 0)
        say(why, "pid: found %s, must be a process with compute channels", value[0].word);
    return channels > 0;
}

/* As if a kernel of the process had ended in that CUresult, on every device where it has a context. */
bool trap_process(struct daemon *daemon, const struct value *value, struct text *why)
{
    struct fake_page *page = daemon->page;
    uint32_t contexts = 0;
    page_lock(page);
    for (uint32_t slot = 0; (slot = slot_from(page, slot, FAKE_CUDA, value[0].number)) < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
            if (page->slot[slot].contexts[unit] > 0)
                atomic_store(&page->slot[slot].error[unit], (uint32_t)value[1].number);
            contexts += page->slot[slot].contexts[unit];
        }
    page_unlock(page);
    if (contexts == 0)
        say(why, "pid: found %s, must be a process with a CUDA context", value[0].word);
    return contexts > 0;
}
