/* page.c - memory on the shared page.
 *
 * What a slot holds is the truth; a unit's used_bytes is the sum over slots, kept so that a reader need not add up. Both
 * change under one robust lock: a process killed between the two leaves the lock to the next one, who adds up anew.
 */
#define _GNU_SOURCE
#include "page.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

void page_init_lock(struct fake_page *page)
{
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&page->lock, &how);
    pthread_mutexattr_destroy(&how);
}

static void add_up(struct fake_page *page)
{
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        uint64_t sum = 0;
        for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
            if (page->slot[slot].kind != FAKE_FREE)
                sum += page->slot[slot].used_bytes[unit];
        page->unit[unit].used_bytes = sum;
    }
}

void page_lock(struct fake_page *page)
{
    if (pthread_mutex_lock(&page->lock) != EOWNERDEAD)
        return;
    add_up(page);
    pthread_mutex_consistent(&page->lock);
}

void page_unlock(struct fake_page *page)
{
    pthread_mutex_unlock(&page->lock);
}

bool page_take(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes)
{
    if (slot >= FAKE_SLOTS || unit >= FAKE_UNITS)
        return false;
    struct fake_unit *of = &page->unit[unit];
    page_lock(page);
    const bool fits = of->live && of->used_bytes <= of->limit_bytes && bytes <= of->limit_bytes - of->used_bytes;
    if (fits) {
        page->slot[slot].used_bytes[unit] += bytes;
        of->used_bytes += bytes;
    }
    page_unlock(page);
    return fits;
}

void page_give(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes)
{
    if (slot >= FAKE_SLOTS || unit >= FAKE_UNITS)
        return;
    page_lock(page);
    uint64_t *held = &page->slot[slot].used_bytes[unit];
    const uint64_t back = bytes < *held ? bytes : *held;
    *held -= back;
    page->unit[unit].used_bytes -= back < page->unit[unit].used_bytes ? back : page->unit[unit].used_bytes;
    page_unlock(page);
}

uint64_t page_unit_used(struct fake_page *page, uint32_t unit)
{
    page_lock(page);
    const uint64_t used = page->unit[unit].used_bytes;
    page_unlock(page);
    return used;
}

uint64_t page_card_used(struct fake_page *page, uint32_t card)
{
    page_lock(page);
    uint64_t used = page->unit[card].used_bytes;
    for (uint32_t i = 0; i < FAKE_INSTANCES; i++)
        used += page->unit[fake_unit_of_instance(card, i)].used_bytes;
    page_unlock(page);
    return used;
}

#define CLOSE_ON_EXEC 1u /* MFD_CLOEXEC */

int new_memfd(const char *name)
{
    return (int)syscall(SYS_memfd_create, name, CLOSE_ON_EXEC);
}
