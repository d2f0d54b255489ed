/* stop_locked.c - a process that stops itself (SIGSTOP) in the middle of work on the shared page, at a chosen place:
 *
 *     page      with the page's lock
 *     take      with it, after page_take found that 600 MiB fit and before it counts them
 *     time      with the lock of unit 0's time
 *     settle    with that, after the time that passed is its to record
 *
 * Once it goes on it prints "kept" or "lost": whether it still had the lock; of "take", whether it has the memory; of "settle", whether its kernels ran
 * for exactly as long as they should.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static const volatile void *stop_at;
static void stop_before(const volatile void *at)
{
    if (at == stop_at)
        raise(SIGSTOP);
}

#undef atomic_fetch_add
#define atomic_fetch_add(at, more) (stop_before(at), __atomic_fetch_add((at), (more), __ATOMIC_SEQ_CST))
#undef atomic_compare_exchange_strong
#define atomic_compare_exchange_strong(at, seen, value)                                                                        \
    (stop_before(at), __atomic_compare_exchange_n((at), (seen), (value), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
#include "gpu_time.c"
#undef _GNU_SOURCE
#include "page.c"
#include "client.h"

static void print(bool kept)
{
    puts(kept ? "kept" : "lost");
}

int main(int argc, char **argv)
{
    struct client client;
    if (argc != 2 || client_open(&client, FAKE_CUDA) != 0)
        return 1;
    struct fake_page *page = client.page;
    if (strcmp(argv[1], "page") == 0) {
        page_lock(page);
        raise(SIGSTOP);
        print(page_unlock(page));
    } else if (strcmp(argv[1], "take") == 0) {
        stop_at = &page->unit[0].used_bytes[client.slot];
        print(page_take(page, client.slot, 0, 600 * FAKE_MIB, false));
    } else if (strcmp(argv[1], "time") == 0) {
        const uint32_t its = lock_take(&page->unit[0].time_lock, PAGE_LEASE_NS);
        raise(SIGSTOP);
        print(lock_leave(&page->unit[0].time_lock, its));
    } else {
        gpu_time_queue(page, client.slot, 0, 50000000);
        stop_at = &page->slot[client.slot].ran_ns[0];
        gpu_time_wait(page, client.slot, 0, 1000000);
        stop_at = NULL;
        gpu_time_wait(page, client.slot, 0, 50000000);
        print(atomic_load(&page->slot[client.slot].ran_ns[0]) == 50000000);
    }
    return 0;
}
