/* page.c - memory on the shared page, and how processes lock it and wait for each other.
 *
 * What each slot has of a unit is one number; nothing else is kept, so that a process killed at any moment leaves no wrong sum.
 */
#define _GNU_SOURCE
#include "page.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void shared_mutex_init(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &how);
    pthread_mutexattr_destroy(&how);
}

void shared_mutex_lock(pthread_mutex_t *mutex)
{
    if (pthread_mutex_lock(mutex) == EOWNERDEAD)
        pthread_mutex_consistent(mutex);
}

void page_lock(struct fake_page *page)
{
    shared_mutex_lock(&page->lock);
}

void page_unlock(struct fake_page *page)
{
    pthread_mutex_unlock(&page->lock);
}

uint64_t page_sum(const struct fake_page *page, uint32_t unit)
{
    uint64_t sum = 0;
    for (uint32_t slot = 0; slot < page->slots && slot < FAKE_SLOTS; slot++)
        sum += page->unit[unit].used_bytes[slot];
    return sum;
}

bool page_take(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes, bool managed)
{
    struct fake_unit *of = &page->unit[unit];
    page_lock(page);
    const uint64_t used = page_sum(page, unit);
    const bool fits = of->live && used <= of->limit_bytes && bytes <= of->limit_bytes - used;
    of->used_bytes[slot] += fits ? bytes : 0;
    of->unlisted_bytes[slot] += fits && managed ? bytes : 0;
    page_unlock(page);
    return fits;
}

void page_give(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes, bool managed)
{
    struct fake_unit *of = &page->unit[unit];
    page_lock(page);
    const uint64_t given = bytes < of->used_bytes[slot] ? bytes : of->used_bytes[slot];
    of->used_bytes[slot] -= given;
    of->unlisted_bytes[slot] -= managed ? given : 0;
    page_unlock(page);
}

uint64_t page_unit_used(struct fake_page *page, uint32_t unit)
{
    page_lock(page);
    const uint64_t used = page_sum(page, unit);
    page_unlock(page);
    return used;
}

uint64_t page_gpu_used(struct fake_page *page, uint32_t gpu)
{
    uint64_t used = page_unit_used(page, gpu);
    for (uint32_t i = 0; i < FAKE_INSTANCES; i++)
        used += page_unit_used(page, fake_unit_of_instance(gpu, i));
    return used;
}

uint64_t page_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void bell_ring(_Atomic uint32_t *bell)
{
    atomic_fetch_add(bell, 1);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void bell_wait(const _Atomic uint32_t *bell, uint32_t seen, uint64_t most_ns)
{
    const struct timespec most = {.tv_sec = (time_t)(most_ns / 1000000000u), .tv_nsec = (long)(most_ns % 1000000000u)};
    syscall(SYS_futex, bell, FUTEX_WAIT, seen, &most, NULL, 0);
}

struct fake_page *page_map(int fd)
{
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (page->magic == FAKE_PAGE_MAGIC && page->version == FAKE_PAGE_VERSION)
        return page;
    munmap(page, FAKE_PAGE_BYTES);
    return NULL;
}

void file_wipe(int page_fd, uint64_t offset, uint64_t bytes)
{
    fallocate(page_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

int new_memfd(const char *name)
{
    return (int)syscall(SYS_memfd_create, name, 1u); /* MFD_CLOEXEC */
}
