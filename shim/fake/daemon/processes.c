/* processes.c - slots of processes, what status and kernel print of them, and what can be done to a process's kernels. */
#define _GNU_SOURCE
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
    const uint32_t number = (uint32_t)(slot - driver.page->slot);
    if (number >= driver.page->slots)
        driver.page->slots = number + 1;
    page_unlock(driver.page);
    return number;
}

void empty_slot(uint32_t slot)
{
    gpu_time_drop(driver.page, slot);
    page_lock(driver.page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        atomic_store(&driver.page->unit[unit].used_bytes[slot], 0);
        atomic_store(&driver.page->unit[unit].unlisted_bytes[slot], 0);
    }
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
        if (driver.page->slot[slot].object[i].client != 0)
            driver.page->ended_client[slot] = driver.page->slot[slot].object[i].client;
    memset(&driver.page->slot[slot], 0, sizeof driver.page->slot[slot]);
    page_unlock(driver.page);
}

/* The first slot from that one on of such a process, or FAKE_SLOTS. */
static uint32_t slot_from(uint32_t from, enum fake_kind kind, int32_t pid)
{
    const struct fake_slot *slot = driver.page->slot;
    while (from < FAKE_SLOTS && (slot[from].kind != (uint32_t)kind || slot[from].pid != pid))
        from++;
    return from;
}

static int32_t read_pid(const char *word)
{
    return (int32_t)read_number("pid", word, 1, 4194304);
}

void add_process(char **word)
{
    const uint32_t unit = read_unit(word[0]);
    const uint64_t mib = read_number("mib", word[2], 0, 1u << 24);
    const uint32_t slot = new_slot(FAKE_FOREIGN, read_pid(word[1]));
    if (slot == FAKE_SLOTS)
        fail("process %s: all %u slots are taken", word[1], FAKE_SLOTS);
    if (!page_take(driver.page, slot, unit, mib * FAKE_MIB, false)) {
        empty_slot(slot);
        fail("process %s: %s MiB is more than is free", word[1], word[2]);
    }
    driver.page->slot[slot].contexts[unit] = 1;
    snprintf(driver.page->slot[slot].name, FAKE_NAME, "%s", word[3]);
}

void end_process(char **word)
{
    const int32_t pid = read_pid(word[0]);
    uint32_t slot = slot_from(0, FAKE_FOREIGN, pid);
    if (slot == FAKE_SLOTS)
        fail("pid is %d, but no process of that number was described", (int)pid);
    for (; slot < FAKE_SLOTS; slot = slot_from(slot, FAKE_FOREIGN, pid))
        empty_slot(slot);
}

/* Of one moment: what a process gives another may take at once. */
static void print_unit(uint32_t unit)
{
    const struct fake_unit *of = &driver.page->unit[unit];
    page_lock(driver.page);
    printf(" %s used_mib=%" PRIu64 " limit_mib=%" PRIu64 " busy_percent=%u\n", of->uuid, page_sum(driver.page, unit) / FAKE_MIB,
           of->limit_bytes / FAKE_MIB, gpu_time_busy(driver.page, unit));
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *its = &driver.page->slot[slot];
        if (of->used_bytes[slot] > 0 || its->contexts[unit] > 0)
            printf("  pid=%d used_mib=%" PRIu64 " contexts=%u %.63s\n", (int)its->pid, of->used_bytes[slot] / FAKE_MIB,
                   its->contexts[unit], its->name);
    }
    page_unlock(driver.page);
}

void print_status(char **word)
{
    (void)word;
    for (uint32_t gpu = 0; gpu < driver.page->gpus; gpu++) {
        const struct fake_gpu *of = &driver.page->gpu[gpu];
        printf("GPU %u %s mig=%s xid=%u", gpu, of->model, of->mig_on ? "on" : "off", atomic_load(&of->xid));
        print_unit(gpu);
        for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
            const struct fake_unit *instance = &driver.page->unit[fake_unit_of_instance(gpu, i)];
            if (!instance->live)
                continue;
            printf("GPU %u instance %u %s", gpu, i, fake_profile_of(driver.page, instance)->name);
            print_unit(fake_unit_of_instance(gpu, i));
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
    printf("pid=%d unit=%u channels=%u enables_owed=%u held=%u copies_held=%u queued_us=%" PRIu64 " ran_us=%" PRIu64 "\n", (int)of->pid, unit, channels, owed,
           atomic_load(&of->held[unit]), atomic_load(&of->copies_held[unit]), atomic_load(&of->queued_ns[unit]) / 1000, atomic_load(&of->ran_ns[unit]) / 1000);
}

void print_kernel(char **word)
{
    (void)word;
    const struct fake_page *page = driver.page;
    printf("misuses=%" PRIu64 " %s\n", atomic_load(&page->kernel_misuses), page->kernel_misuse);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS && page->slot[slot].kind == FAKE_CUDA; unit++)
            print_process(slot, unit);
}

void disable_process(char **word)
{
    const int32_t pid = read_pid(word[0]);
    uint32_t channels = 0;
    page_lock(driver.page);
    for (uint32_t slot = 0; (slot = slot_from(slot, FAKE_CUDA, pid)) < FAKE_SLOTS; slot++) {
        struct fake_kernel_object *object = driver.page->slot[slot].object;
        for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
            if (channel_is_compute(&object[i])) {
                channels++;
                object[i].disables++;
            }
        channels_apply(driver.page, slot);
    }
    page_unlock(driver.page);
    if (channels == 0)
        fail("pid: found %d, must be a process with compute channels", (int)pid);
}

/* As if a kernel of the process had ended in that CUresult, on every device where it has a context. */
void trap_process(char **word)
{
    const int32_t pid = read_pid(word[0]);
    const uint32_t error = (uint32_t)read_number("error", word[1], 1, 999);
    uint32_t contexts = 0;
    page_lock(driver.page);
    for (uint32_t slot = 0; (slot = slot_from(slot, FAKE_CUDA, pid)) < FAKE_SLOTS; slot++)
        for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
            if (driver.page->slot[slot].contexts[unit] > 0) {
                atomic_store(&driver.page->slot[slot].error[unit], error);
                contexts++;
            }
    page_unlock(driver.page);
    if (contexts == 0)
        fail("pid: found %d, must be a process with a CUDA context", (int)pid);
}

#define XID_FALLEN_OFF 79u /* "GPU has fallen off the bus" */

void raise_xid(char **word)
{
    struct fake_page *page = driver.page;
    const uint32_t gpu = read_gpu(word[0]), xid = (uint32_t)read_number("XID", word[1], 1, 65535);
    page_lock(page);
    page->event[atomic_load(&page->events) % FAKE_EVENTS] = (struct fake_event){gpu, xid};
    atomic_store(&page->gpu[gpu].xid, xid);
    if (xid == XID_FALLEN_OFF)
        atomic_store(&page->gpu[gpu].lost, 1);
    bell_ring(&page->events);
    page_unlock(page);
}

void recover_gpu(char **word)
{
    struct fake_gpu *gpu = &driver.page->gpu[read_gpu(word[0])];
    atomic_store(&gpu->xid, 0);
    atomic_store(&gpu->lost, 0);
}
