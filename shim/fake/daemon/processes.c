/* processes.c - slots of processes, what status and kernel print of them, and what can be done to a process's kernels. */
#define _GNU_SOURCE
#include "channels.h"
#include "daemon.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

uint32_t new_slot(enum fake_kind kind, int32_t pid)
{
    struct fake_slot *slot = driver.page->slot;
    page_lock(driver.page);
    while (slot < driver.page->slot + FAKE_SLOTS && slot->kind != FAKE_FREE)
        slot++;
    if (slot < driver.page->slot + FAKE_SLOTS) {
        slot->kind = kind;
        slot->pid = pid;
    }
    page_unlock(driver.page);
    return (uint32_t)(slot - driver.page->slot);
}

void empty_slot(uint32_t slot)
{
    gpu_time_drop(driver.page, slot);
    page_lock(driver.page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        driver.page->unit[unit].used_bytes[slot] = 0;
    memset(&driver.page->slot[slot], 0, sizeof driver.page->slot[slot]);
    page_unlock(driver.page);
}

/* The first slot from that one on of such a process, or FAKE_SLOTS. */
static uint32_t slot_from(uint32_t from, enum fake_kind kind, uint64_t pid)
{
    const struct fake_slot *slot = driver.page->slot;
    while (from < FAKE_SLOTS && (slot[from].kind != (uint32_t)kind || slot[from].pid != (int32_t)pid))
        from++;
    return from;
}

void add_process(const struct value *value)
{
    const uint32_t unit = (uint32_t)value[0].number, slot = new_slot(FAKE_FOREIGN, (int32_t)value[1].number);
    if (slot == FAKE_SLOTS)
        fail("process %s: all %u slots are taken", value[1].word, FAKE_SLOTS);
    if (!page_take(driver.page, slot, unit, value[2].number * FAKE_MIB)) {
        empty_slot(slot);
        fail("process %s: %s MiB is more than is free", value[1].word, value[2].word);
    }
    driver.page->slot[slot].contexts[unit] = 1;
    snprintf(driver.page->slot[slot].name, FAKE_NAME, "%s", value[3].word);
}

void end_process(const struct value *value)
{
    uint32_t slot = slot_from(0, FAKE_FOREIGN, value[0].number);
    if (slot == FAKE_SLOTS)
        fail("pid is %s, but no process of that number was described", value[0].word);
    for (; slot < FAKE_SLOTS; slot = slot_from(slot, FAKE_FOREIGN, value[0].number))
        empty_slot(slot);
}

/* Of one moment: what a process gives another may take at once. */
static void print_unit(uint32_t unit)
{
    const struct fake_unit *of = &driver.page->unit[unit];
    page_lock(driver.page);
    printf(" %s used_mib=%" PRIu64 " limit_mib=%" PRIu64 " busy_percent=%u\n", of->uuid, page_sum(of) / FAKE_MIB, of->limit_bytes / FAKE_MIB,
           gpu_time_busy(driver.page, unit));
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *its = &driver.page->slot[slot];
        if (of->used_bytes[slot] > 0 || its->contexts[unit] > 0)
            printf("  pid=%d used_mib=%" PRIu64 " contexts=%u %.63s\n", (int)its->pid, of->used_bytes[slot] / FAKE_MIB, its->contexts[unit], its->name);
    }
    page_unlock(driver.page);
}

void print_status(const struct value *value)
{
    (void)value;
    for (uint32_t card = 0; card < driver.page->cards; card++) {
        const struct fake_card *of = &driver.page->card[card];
        printf("card %u %s mig=%s xid=%u", card, of->model, of->mig_on ? "on" : "off", atomic_load(&of->xid));
        print_unit(card);
        for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
            const struct fake_unit *instance = &driver.page->unit[fake_unit_of_instance(card, i)];
            if (!instance->live)
                continue;
            printf("card %u instance %u %s", card, instance->gi, fake_profile_of(driver.page, instance)->name);
            print_unit(fake_unit_of_instance(card, i));
        }
    }
}

static void print_process(uint32_t slot, uint32_t unit)
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
    printf("pid=%d unit=%u channels=%u enables_owed=%u held=%u queued_us=%" PRIu64 " ran_us=%" PRIu64 "\n", (int)of->pid, unit, channels, owed,
           atomic_load(&of->held[unit]), atomic_load(&of->queued_ns[unit]) / 1000, atomic_load(&of->ran_ns[unit]) / 1000);
}

void print_kernel(const struct value *value)
{
    (void)value;
    const struct fake_page *page = driver.page;
    printf("misuses=%" PRIu64 " %s\n", atomic_load(&page->kernel_misuses), page->kernel_misuse);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS && page->slot[slot].kind == FAKE_CUDA; unit++)
            print_process(slot, unit);
}

void disable_process(const struct value *value)
{
    uint32_t channels = 0;
    page_lock(driver.page);
    for (uint32_t slot = 0; (slot = slot_from(slot, FAKE_CUDA, value[0].number)) < FAKE_SLOTS; slot++) {
        struct fake_kernel_object *object = driver.page->slot[slot].object;
        for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
            if (channel_is_compute(&object[i])) {
                channels++;
                object[i].disables++;
            }
        channels_hold(driver.page, slot);
    }
    page_unlock(driver.page);
    if (channels == 0)
        fail("pid: found %s, must be a process with compute channels", value[0].word);
}

/* As if a kernel of the process had ended in that CUresult, on every device where it has a context. */
void trap_process(const struct value *value)
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
    if (contexts == 0)
        fail("pid: found %s, must be a process with a CUDA context", value[0].word);
}

#define XID_FALLEN_OFF 79u /* "GPU has fallen off the bus" */

void raise_xid(const struct value *value)
{
    struct fake_page *page = driver.page;
    const uint32_t card = (uint32_t)value[0].number, xid = (uint32_t)value[1].number;
    page_lock(page);
    page->event[atomic_load(&page->events) % FAKE_EVENTS] = (struct fake_event){card, xid};
    atomic_store(&page->card[card].xid, xid);
    if (xid == XID_FALLEN_OFF)
        atomic_store(&page->card[card].lost, 1);
    bell_ring(&page->events);
    page_unlock(page);
}

void recover_card(const struct value *value)
{
    atomic_store(&driver.page->card[value[0].number].xid, 0);
    atomic_store(&driver.page->card[value[0].number].lost, 0);
}
