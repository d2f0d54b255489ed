/* status.c - what the daemon says of units and processes, and what can be done to a process's kernels. */
#define _GNU_SOURCE
#include "channels.h"
#include "daemon.h"

#include <inttypes.h>

/* Of one moment: what a process gives another may take at once. */
static void say_unit(uint32_t unit)
{
    const struct fake_unit *of = &driver.page->unit[unit];
    const uint32_t busy = gpu_time_busy(driver.page, unit);
    page_lock(driver.page);
    say(&driver.answer, " %s used_mib=%" PRIu64 " limit_mib=%" PRIu64 " busy_percent=%u\n", of->uuid, page_sum(of) / FAKE_MIB,
        of->limit_bytes / FAKE_MIB, busy);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *its = &driver.page->slot[slot];
        if (of->used_bytes[slot] > 0 || its->contexts[unit] > 0)
            say(&driver.answer, "  pid=%d used_mib=%" PRIu64 " contexts=%u %.63s\n", (int)its->pid, of->used_bytes[slot] / FAKE_MIB,
                its->contexts[unit], its->name);
    }
    page_unlock(driver.page);
}

bool say_status(const struct value *value)
{
    (void)value;
    for (uint32_t card = 0; card < driver.page->cards; card++) {
        const struct fake_card *of = &driver.page->card[card];
        say(&driver.answer, "card %u %s mig=%s xid=%u", card, of->model, of->mig_on ? "on" : "off", atomic_load(&of->xid));
        say_unit(card);
        for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
            const uint32_t unit = fake_unit_of_instance(card, i);
            const struct fake_unit *instance = &driver.page->unit[unit];
            if (!instance->live)
                continue;
            say(&driver.answer, "card %u instance %u %s", card, instance->gi, fake_profile_of(driver.page, instance)->name);
            say_unit(unit);
        }
    }
    return true;
}

static void say_process(uint32_t slot, uint32_t unit)
{
    const struct fake_slot *of = &driver.page->slot[slot];
    uint32_t channels = 0, owed = 0;
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
        if (channel_is(&of->object[i]) && of->object[i].unit == unit) {
            channels++;
            owed += of->object[i].disables;
        }
    if (channels == 0 && atomic_load(&of->queued_ns[unit]) == 0)
        return;
    gpu_time_settle(driver.page, unit);
    say(&driver.answer, "pid=%d unit=%u channels=%u enables_owed=%u held=%u queued_us=%" PRIu64 " ran_us=%" PRIu64 "\n", (int)of->pid, unit,
        channels, owed, atomic_load(&of->held[unit]), atomic_load(&of->queued_ns[unit]) / 1000, atomic_load(&of->ran_ns[unit]) / 1000);
}

bool say_kernel(const struct value *value)
{
    (void)value;
    const struct fake_page *page = driver.page;
    say(&driver.answer, "misuses=%" PRIu64 " %s\n", atomic_load(&page->kernel_misuses), page->kernel_misuse);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS && page->slot[slot].kind == FAKE_CUDA; unit++)
            say_process(slot, unit);
    return true;
}

bool disable_process(const struct value *value)
{
    uint32_t channels = 0;
    page_lock(driver.page);
    for (uint32_t slot = 0; (slot = slot_from(slot, FAKE_CUDA, value[0].number)) < FAKE_SLOTS; slot++) {
        for (struct fake_kernel_object *object = driver.page->slot[slot].object, *end = object + FAKE_OBJECTS; object < end; object++)
            if (channel_is_compute(object)) {
                channels++;
                object->disables++;
            }
        channels_hold(driver.page, slot);
    }
    page_unlock(driver.page);
    return channels > 0 || REFUSE("pid: found %s, must be a process with compute channels", value[0].word);
}

/* As if a kernel of the process had ended in that CUresult, on every device where it has a context. */
bool trap_process(const struct value *value)
{
    uint32_t contexts = 0;
    page_lock(driver.page);
    for (uint32_t slot = 0; (slot = slot_from(slot, FAKE_CUDA, value[0].number)) < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
            if (driver.page->slot[slot].contexts[unit] > 0) {
                atomic_store(&driver.page->slot[slot].error[unit], (uint32_t)value[1].number);
                contexts++;
            }
    page_unlock(driver.page);
    return contexts > 0 || REFUSE("pid: found %s, must be a process with a CUDA context", value[0].word);
}
