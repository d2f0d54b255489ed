/* unit.c - the parts of the library that need neither a driver nor an arbiter: the grant's text, the pointer table, and
 * what a fork does to the locks.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/link/link.h"
#include "../src/memory/pool.h"

#undef NDEBUG

static const char good[] = "tangram-grant 1\npod default/a\nuid 1-2\ncontainer main\nclass standard\nlevel 2\n"
                           "card GPU-01234567-89ab-cdef-0123-456789abcdef mib=8192 core_percent=30\nend\n";

static bool reads(const char *text, size_t length, struct grant *grant, char *why)
{
    memset(grant, 0, sizeof *grant);
    return grant_read(text, length, grant, why, 256);
}

static void a_good_grant_is_read(void)
{
    static struct grant grant;
    char why[256];
    assert(reads(good, strlen(good), &grant, why));
    assert(grant.gpus == 1 && grant.gpu[0].limit_bytes == 8192 * MIB);
    assert(grant.gpu[0].uuid[0] == 0x01 && grant.gpu[0].uuid[15] == 0xef);
}

static void a_bad_grant_is_refused(const char *from, const char *to, const char *reason)
{
    static struct grant grant;
    char text[1024], why[256];
    const char *at = strstr(good, from);
    assert(at != NULL);
    int length = snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    if (reads(text, (size_t)length, &grant, why) || strstr(why, reason) == NULL) {
        fprintf(stderr, "\"%s\" -> \"%s\": expected a refusal with \"%s\", got \"%s\"\n", from, to, reason, why);
        exit(1);
    }
}

static void a_cut_grant_is_refused_wherever_it_is_cut(void)
{
    static struct grant grant;
    char why[256];
    for (size_t length = 0; length < strlen(good); length++) {
        char *exact = malloc(length + 1); /* so that a read past the end is seen */
        assert(exact != NULL);
        memcpy(exact, good, length);
        assert(!reads(exact, length, &grant, why));
        free(exact);
    }
}

static void any_changed_byte_never_makes_the_parser_misbehave(void)
{
    static struct grant grant;
    char text[sizeof good], why[256];
    for (size_t i = 0; i < strlen(good); i++)
        for (int byte = 0; byte < 256; byte++) {
            memcpy(text, good, sizeof good);
            text[i] = (char)byte;
            if (!reads(text, strlen(good), &grant, why))
                assert(strstr(why, "expected") != NULL);
        }
}

static void grants(void)
{
    a_good_grant_is_read();
    a_bad_grant_is_refused("tangram-grant 1", "tangram-grant 2", "line 1: found \"tangram-grant 2\", expected tangram-grant 1");
    a_bad_grant_is_refused("pod default/a", "pod default", "line 2");
    a_bad_grant_is_refused("uid 1-2", "uid ", "line 3: found \"uid \", expected uid <pod uid>");
    a_bad_grant_is_refused("container", "countainer", "line 4");
    a_bad_grant_is_refused("standard", "silver", "line 5: found \"class silver\", expected class latency-critical");
    a_bad_grant_is_refused("level 2", "level 5", "line 6: found \"level 5\", expected level 0-4");
    a_bad_grant_is_refused("mib=8192", "mib=-1", "line 7");
    a_bad_grant_is_refused("mib=8192", "mib=99999999999", "line 7");
    a_bad_grant_is_refused("core_percent=30", "core_percent=101", "line 7");
    a_bad_grant_is_refused("core_percent=30", "core_percent=30 more=1", "line 7");
    a_bad_grant_is_refused("GPU-0", "GPU-G", "line 7");
    a_bad_grant_is_refused("end\n", "end\nmore\n", "line 9");
    a_bad_grant_is_refused("end\n", "card GPU-01234567-89ab-cdef-0123-456789abcdef mib=1 core_percent=0\nend\n", "each GPU once");
    a_cut_grant_is_refused_wherever_it_is_cut();
    any_changed_byte_never_makes_the_parser_misbehave();
}

enum { POINTERS = 20000 };

/* Against the obvious slow version: an array of what should be in the table. */
static void the_table_agrees_with_an_array(void)
{
    static uint64_t size[POINTERS];
    struct owned was;
    unsigned seed = 1;
    for (unsigned step = 0; step < 400000; step++) {
        unsigned i = (unsigned)rand_r(&seed) % POINTERS;
        uint64_t at = UINT64_C(0x7f0000000000) + (uint64_t)i * (i % 3 ? 512 : 2 * MIB);
        at += (uint64_t)i << 40; /* the strides overlap otherwise */
        if (size[i] == 0) {
            assert(!table_disown(at, &was));
            size[i] = 1 + step;
            assert(table_own((struct owned){.at = at, .bytes = size[i]}));
        } else {
            assert(table_disown(at, &was) && was.at == at && was.bytes == size[i]);
            size[i] = 0;
        }
    }
    size_t live = 0, used = 0;
    for (unsigned i = 0; i < POINTERS; i++)
        live += size[i] != 0;
    for (unsigned i = 0; i < SHARDS; i++)
        used += tangram.shard[i].used;
    assert(live == used);
    assert(!table_own((struct owned){.bytes = 1}) && !table_disown(0, &was));
}

/* The driver's numbers of memory: what is at an address now. */
static uint64_t buffer_there;
static unsigned numbers_requested;
static const struct owned *own_meanwhile; /* by another thread, during the query of the driver */
static const struct owned *own_now;       /* the same, when the driver has looked and not answered yet */

static CUresult pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr at)
{
    (void)at;
    assert(attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID);
    const struct owned *meanwhile = own_meanwhile;
    struct owned was;
    own_meanwhile = NULL;
    numbers_requested++;
    if (meanwhile != NULL) {
        buffer_there = 3;
        assert(table_disown(meanwhile->at, &was) && table_own(*meanwhile));
        return CUDA_ERROR_INVALID_VALUE; /* the query came while nothing was there */
    }
    memcpy(data, &buffer_there, sizeof buffer_there);
    meanwhile = own_now;
    own_now = NULL;
    if (meanwhile != NULL)
        assert(table_disown(meanwhile->at, &was) && table_own(*meanwhile));
    return buffer_there == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static struct gpu *gpu_of_the_table(void)
{
    static struct gpu gpu;
    atomic_store(&gpu.unused_bytes, 0);
    tangram.driver.cuPointerGetAttribute = pointer_attribute;
    return &gpu;
}

static void forget(uintptr_t context, struct gpu *gpu)
{
    struct table_moment before;
    table_now(&before);
    table_forget_context((CUcontext)context, gpu, &before);
}

static const uint64_t address = UINT64_C(0x7f1234000000);

static void memory_is_forgotten_with_its_context_though_its_address_is_taken_again(void)
{
    struct gpu *gpu = gpu_of_the_table();
    struct owned was;
    buffer_there = 1;
    assert(table_own((struct owned){.at = address, .bytes = 10 * MIB, .gpu = gpu}));
    forget(8, gpu);
    assert(atomic_load(&gpu->unused_bytes) == 0);  /* it was another context's */
    buffer_there = 2;                              /* of a node of a graph, which is in no table */
    forget(8, gpu);
    assert(atomic_load(&gpu->unused_bytes) == 10 * MIB && !table_disown(address, &was));
}

static void what_another_thread_owns_meanwhile_is_not_forgotten(void)
{
    struct gpu *gpu = gpu_of_the_table();
    struct owned was, other = {.at = address, .bytes = 4 * MIB, .gpu = gpu};
    buffer_there = 1;
    assert(table_own((struct owned){.at = address, .bytes = 10 * MIB, .gpu = gpu}));
    struct table_moment before;
    table_now(&before);
    own_meanwhile = &other;
    table_forget_context((CUcontext)8, gpu, &before);
    assert(table_disown(address, &was) && was.bytes == 4 * MIB && atomic_load(&gpu->unused_bytes) == 0);
}

static void the_driver_is_queried_for_a_number_once_and_not_by_an_allocation(void)
{
    struct gpu *gpu = gpu_of_the_table();
    struct owned was;
    struct table_moment moment;
    buffer_there = 1;
    numbers_requested = 0;
    assert(table_own((struct owned){.at = address, .bytes = 10 * MIB, .gpu = gpu}));
    assert(numbers_requested == 0);
    table_now(&moment);
    table_now(&moment);
    assert(numbers_requested == 1);
    buffer_there = 0; /* it cannot be queried now */
    assert(table_own((struct owned){.at = address + PAGE, .bytes = 10 * MIB, .gpu = gpu}));
    table_now(&moment);
    buffer_there = 2;
    table_now(&moment);
    assert(numbers_requested == 3);
    assert(table_disown(address, &was) && table_disown(address + PAGE, &was));
}

static void a_number_is_not_given_to_what_another_thread_owns_meanwhile(void)
{
    struct gpu *gpu = gpu_of_the_table();
    struct owned was, other = {.at = address, .bytes = 4 * MIB, .gpu = gpu};
    struct table_moment moment;
    assert(table_own((struct owned){.at = address, .bytes = 10 * MIB, .gpu = gpu}));
    own_now = &other;
    buffer_there = 1; /* the old one's, though the new one is there when the answer comes */
    table_now(&moment);
    buffer_there = 2; /* the new one's */
    table_forget_context((CUcontext)8, gpu, &moment);
    assert(table_disown(address, &was) && was.bytes == 4 * MIB && atomic_load(&gpu->unused_bytes) == 0);
}

static void an_array_of_the_next_context_of_that_handle_is_not_forgotten(void)
{
    const uint64_t of_old = OWNED_AS(OWNED_ARRAY, 0x1000), of_new = OWNED_AS(OWNED_ARRAY, 0x2000);
    struct gpu *gpu = gpu_of_the_table();
    struct table_moment before;
    struct owned was;
    assert(table_own((struct owned){of_old, 4 * MIB, gpu, (void *)8}));
    table_now(&before);
    assert(table_own((struct owned){of_new, 6 * MIB, gpu, (void *)8}));
    table_forget_context((CUcontext)8, gpu, &before);
    assert(!table_disown(of_old, &was) && table_disown(of_new, &was) && was.bytes == 6 * MIB);
}

static unsigned pools_listed(void)
{
    unsigned count = 0;
    for (struct pool *pool = atomic_load(&tangram.pools); pool != NULL; pool = pool->next)
        count++;
    return count;
}

/* What an allocation searches must not grow with a program's earlier calls. */
static void a_destroyed_pool_leaves_its_place_to_the_next(void)
{
    static struct gpu gpu;
    struct pool *kept = pool_record((CUmemoryPool)(uintptr_t)1, 0, &gpu, false);
    atomic_store(&kept->live, 1); /* destroyed while the program has a pointer of it */
    atomic_store(&kept->gone, true);
    for (uintptr_t i = 2; i < 40000; i++) {
        struct pool *pool = pool_record((CUmemoryPool)i, (CUdevice)(i % 3), &gpu, false);
        assert(pool != NULL && pool != kept && pool_known((CUmemoryPool)i) == pool && pool->device == (CUdevice)(i % 3));
        atomic_store(&pool->gone, true);
        assert(pool_known((CUmemoryPool)i) == NULL);
    }
    assert(pools_listed() == 2);
    struct pool *listed = atomic_load(&tangram.pools);
    pools_forget_all();
    for (struct pool *next; listed != NULL; listed = next) {
        next = listed->next;
        free(listed);
    }
}

/* The thread that held them is not in the child, and would never unlock them. All at once here, in whatever order. */
#undef pthread_mutex_lock
#undef pthread_mutex_trylock
#undef pthread_mutex_unlock
static void every_lock_is_free_in_a_forked_child_that_has_no_memory(void)
{
    pthread_mutex_t *lock[] = {&tangram.setup, &tangram.requesting, &tangram.vmm.lock, &tangram.pools_lock, &tangram.late_lock, &tangram.stack_lock,
                               &tangram.contexts.beginning, &tangram.contexts.lock, &tangram.time_link.meeting, &tangram.capture.lock, &tangram.capture.reporting, &tangram.time_link.lock,
                               &tangram.activity.reporting, &tangram.warm.lock, &tangram.link.listing, &tangram.link.sharing,
                               &tangram.link.lock};
    struct lock *innermost[] = {&tangram.pages.lock, &tangram.array_pages.lock, &tangram.module_pages.lock, &tangram.shard[0].lock,
                           &tangram.shard[SHARDS - 1].lock};
    const size_t locks = sizeof lock / sizeof *lock, innermosts = sizeof innermost / sizeof *innermost;
    struct gpu *gpu = &tangram.grant.gpu[0];
    atomic_store(&gpu->managed_bytes, 3 * MIB + 1);
    atomic_store(&gpu->stated_managed_mib, lease_managed_mib(gpu));
    assert(atomic_load(&gpu->stated_managed_mib) == 4);
    process_check();
    for (size_t i = 0; i < locks; i++)
        assert(pthread_mutex_lock(lock[i]) == 0);
    for (size_t i = 0; i < innermosts; i++)
        assert(lock_try(innermost[i]));
    pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        int held = lease_managed_mib(gpu) != 0 || atomic_load(&gpu->stated_managed_mib) != 0;
        for (size_t i = 0; i < locks; i++)
            held += pthread_mutex_trylock(lock[i]) != 0;
        for (size_t i = 0; i < innermosts; i++)
            held += !lock_try(innermost[i]);
        _exit(held);
    }
    int status;
    assert(waitpid(child, &status, 0) == child && status == 0);
    for (size_t i = locks; i-- > 0;)
        pthread_mutex_unlock(lock[i]);
    for (size_t i = 0; i < innermosts; i++)
        lock_release(innermost[i]);
}

static struct lock awaited;
static _Atomic bool waits;

static void *wait_for_it(void *sleeps)
{
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    atomic_store(&waits, true);
    lock_acquire(&awaited);
    getrusage(RUSAGE_THREAD, &after);
    lock_release(&awaited);
    *(long *)sleeps = after.ru_nvcsw - before.ru_nvcsw;
    return NULL;
}

/* A thread that retries from time to time finds it locked by threads that do not sleep, for seconds. */
static void who_waits_for_a_lock_sleeps_until_it_is_woken(void)
{
    pthread_t thread;
    long sleeps = -1;
    assert(lock_try(&awaited));
    assert(pthread_create(&thread, NULL, wait_for_it, &sleeps) == 0);
    while (!atomic_load(&waits))
        sched_yield();
    usleep(50000); /* hundreds of tries of 20 us */
    lock_release(&awaited);
    assert(pthread_join(thread, NULL) == 0);
    assert(sleeps >= 0 && sleeps < 10);
    assert(lock_try(&awaited));
    lock_release(&awaited);
}

static long larger_page;
long __sysconf(int name); /* libc's, by its other name */

/* In place of libc's, for all of the program, before a sanitizer is ready too. */
__attribute__((no_sanitize("address"), no_sanitize("thread"), no_sanitize("undefined"))) long sysconf(int name)
{
    return name == _SC_PAGESIZE && larger_page != 0 ? larger_page : __sysconf(name);
}

/* A kernel with pages of 64 KiB maps, protects and replaces no less: as much as is mapped by the one, and protected, is by the other. */
static void maps_are_whole_pages_of_any_kernel(void)
{
    const size_t page = (size_t)__sysconf(_SC_PAGESIZE);
    char byte = 0;
    int made[2];
    larger_page = 65536;
    char *before = mmap(NULL, 3 * 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *at = (char *)(((uintptr_t)before + 65535) / 65536 * 65536);
    assert(before != MAP_FAILED && pipe(made) == 0 && wire_map_page(at, -1) == at);
    for (size_t i = 0; i < 65536; i += page) {
        assert(write(made[1], at + i, 1) == 1);                  /* it can be read */
        assert(read(made[0], at + i, 1) < 0 && errno == EFAULT); /* and not written */
        assert(read(made[0], &byte, 1) == 1 && byte == 0);
    }
    assert(write(made[1], at + 65536, 1) == 1 && read(made[0], at + 65536, 1) == 1); /* and no more than that */
    larger_page = 0;
    close(made[0]);
    close(made[1]);
    munmap(before, 3 * 65536);
}

int main(void)
{
    maps_are_whole_pages_of_any_kernel();
    grants();
    the_table_agrees_with_an_array();
    memory_is_forgotten_with_its_context_though_its_address_is_taken_again();
    what_another_thread_owns_meanwhile_is_not_forgotten();
    the_driver_is_queried_for_a_number_once_and_not_by_an_allocation();
    a_number_is_not_given_to_what_another_thread_owns_meanwhile();
    an_array_of_the_next_context_of_that_handle_is_not_forgotten();
    a_destroyed_pool_leaves_its_place_to_the_next();
    every_lock_is_free_in_a_forked_child_that_has_no_memory();
    who_waits_for_a_lock_sleeps_until_it_is_woken();
    puts("ok");
    return 0;
}
