/* process.c - the struct, and what a fork does to it.
 *
 * A child has no reader thread, and its parent's socket and memory are not its own: it starts from nothing and connects
 * to the arbiter at its first CUDA call. The driver's functions and the grant stay as they are.
 *
 * A process that was cloned with CLONE_VM is no copy: the memory, its records and its connection are the parent's and stay so. Such a guest
 * requests memory over that connection as a thread of the parent would, and neither connects nor reads nor starts the helper: its
 * descriptors and threads may be its own, and end with it. A word that the kernel clears in a copy shows which of the two a process is
 * (Linux 4.14; before, a guest counts as a fork).
 */
#include "process.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <dlfcn.h>

#include "tangram.h"

enum { THREAD_STACK = 256 * 1024, STACK_LEAST = 16 * 1024 }; /* beside what the libc needs on it; guessed: the deepest use seen is 20 KiB */

/* Before the driver is found, and while a function is missing. missing.h */
struct tangram tangram = {
#define HOOK(name, base, since, ptds, params) .driver.name = missing_##name,
#define REAL(name, params) .driver.name = missing_##name,
#define NVML(name, params) .management.name = missing_##name,
#define REAL_NVML(name, params) .management.name = missing_##name,
#include "hooks/hooks.def"
    .setup = PTHREAD_MUTEX_INITIALIZER,
    .requesting = PTHREAD_MUTEX_INITIALIZER,
    .bounding = PTHREAD_MUTEX_INITIALIZER,
    .link = LINK_NEVER_MET,
    .spare_sockets = SPARE_SOCKETS_EMPTY,
    .socket_folder = {.fd = -1},
    .passing = PASSING_NEVER_MET,
    .contexts = {.beginning = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER},
    .vmm = {.lock = PTHREAD_MUTEX_INITIALIZER},
    .elastic = {.created = {.lock = PTHREAD_MUTEX_INITIALIZER, .back = PTHREAD_COND_INITIALIZER}, .peers = {.lock = PTHREAD_MUTEX_INITIALIZER}},
    .pools_lock = PTHREAD_MUTEX_INITIALIZER,
    .late_lock = PTHREAD_MUTEX_INITIALIZER,
    .stack_lock = PTHREAD_MUTEX_INITIALIZER,
    .capture = {.lock = PTHREAD_MUTEX_INITIALIZER, .reporting = PTHREAD_MUTEX_INITIALIZER},
    .time_link = TIME_LINK_NEVER_MET,
    .burst_link = BURST_LINK_NEVER_MET,
    .activity = {.reporting = PTHREAD_MUTEX_INITIALIZER, .placing = PTHREAD_MUTEX_INITIALIZER},
    .warm = {.lock = PTHREAD_MUTEX_INITIALIZER},
    /* a lock of lock.h is free where it is zero: the pages and the shards need no line here */
};

static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;

enum { WIPEONFORK = 18 }; /* specified: MADV_WIPEONFORK, which older headers lack */

/* When the library is loaded, for the parent may clone before either of them comes here. */
__attribute__((constructor)) static void note_owner_of_memory(void)
{
    int saved = errno;
    if (atomic_load(&tangram.pid) == 0) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        void *word = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (word != MAP_FAILED && madvise(word, page, WIPEONFORK) != 0) {
            munmap(word, page);
            word = MAP_FAILED;
        }
        if (word != MAP_FAILED) {
            atomic_store((_Atomic uint32_t *)word, 1);
            atomic_store(&tangram.unforked, (_Atomic uint32_t *)word);
        }
        atomic_store(&tangram.pid, getpid());
    }
    errno = saved;
}

static bool is_no_copy(void)
{
    _Atomic uint32_t *word = atomic_load_explicit(&tangram.unforked, memory_order_relaxed);
    return word != NULL && atomic_load_explicit(word, memory_order_relaxed) != 0;
}

bool process_owns(pid_t pid)
{
    return pid == getpid() || (pid == atomic_load_explicit(&tangram.pid, memory_order_relaxed) && is_no_copy());
}

bool process_is_guest(void)
{
    return atomic_load_explicit(&tangram.pid, memory_order_relaxed) != getpid() && is_no_copy();
}

static void in_child(void)
{
    order_forget();
    if (atomic_load(&tangram.unforked) != NULL)
        atomic_store(atomic_load(&tangram.unforked), 1);
    atomic_store(&tangram.pid, getpid());
    atomic_store(&tangram.states, 0);
    tangram.setup = unlocked;
    tangram.requesting = unlocked;
    tangram.vmm.lock = unlocked;
    tangram.pools_lock = unlocked;
    tangram.late_lock = unlocked;
    tangram.stack_lock = unlocked;
    for (unsigned i = 0; i < SHARDS; i++)
        tangram.shard[i].lock = LOCK_FREE;
    table_forget_all();
    pages_forget_all(&tangram.pages);
    pages_forget_all(&tangram.array_pages);
    pages_forget_all(&tangram.module_pages);
    vmm_forget_all();
    elastic_forget_all();
    pools_forget_all();
    late_forget_all();
    shared_forget_all();
    atomic_store(&tangram.unsettled, false);
    atomic_store(&tangram.hot.swapped, false);
    atomic_store(&tangram.graphs, 0);
    atomic_store(&tangram.only_gpu, NULL);
    atomic_fetch_add(&tangram.contexts_gone, 1);

    link_forget();
    passing_forget();
    spare_sockets_forget();
    contexts_forget_all();
    bounds_forget_all();
    capture_forget_all();
    time_link_forget();
    burst_link_forget();
    activity_forget();
    warm_forget();

    for (unsigned i = 0; i < GPUS_LIMIT; i++) {
        atomic_store(&tangram.grant.gpu[i].unused_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].leased_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].elastic_unused_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].elastic_leased_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].limits_came, false);
        atomic_store(&tangram.grant.gpu[i].managed_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].elastic_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].kept_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].kept_least_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].away_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].discarding_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].stated_bytes, 0);
        atomic_store(&tangram.grant.gpu[i].stated_managed_mib, 0);
        atomic_store(&tangram.grant.gpu[i].wire, -1);
    }
    for (unsigned i = 0; i < DEVICES_LIMIT; i++) /* the child may choose its own CUDA_VISIBLE_DEVICES */
        atomic_store(&tangram.device_gpu[i], NULL);
}

/* What pthread_atfork is inside glibc (since 2.3.2). Called by its own name, weakly, because musl does not have it, and its
 * loader ends every program of a container over a symbol that is missing. */
extern void *__dso_handle __attribute__((visibility("hidden")));
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));

/* A fork by a bare system call runs no handlers: the child finds out at its first request to the arbiter. */
void process_check(void)
{
    if (__register_atfork != NULL && !atomic_exchange(&tangram.forks_watched, true))
        __register_atfork(NULL, NULL, in_child, __dso_handle);
    note_owner_of_memory();
    if (!process_owns(atomic_load_explicit(&tangram.pid, memory_order_relaxed)))
        in_child();
}

/* The thread-local variables of all libraries lie on the stack as well, which can be more than any guess of ours: libc knows how much. */
static size_t stack_bytes(pthread_attr_t *attributes)
{
    size_t (*least)(const pthread_attr_t *);
    void *found = real_dlsym(RTLD_DEFAULT, "__pthread_get_minstack");
    memcpy(&least, &found, sizeof least);
    return THREAD_STACK + (found != NULL ? least(attributes) : (size_t)STACK_LEAST);
}

/* A thread of our own, which a forked child has not. It takes no signals: those are the program's. */
bool thread_start(void *(*run)(void *))
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_attr_setstacksize(&attributes, stack_bytes(&attributes)) == 0 && pthread_create(&thread, &attributes, run, NULL) == 0;
    if (!started) /* whatever its stack is then: the program's own threads have that, too */
        started = (started = pthread_create(&thread, NULL, run, NULL) == 0) && pthread_detach(thread) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

uint64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

uint64_t now_ms(void)
{
    return now_us() / 1000;
}

EXPORT const char *tangram_version(void)
{
    return TANGRAM_VERSION;
}

EXPORT int tangram_memory(unsigned at, struct tangram_memory *out)
{
    if (grant_ready() != GRANT_GOOD || at >= tangram.grant.gpus)
        return -1;
    struct gpu *gpu = &tangram.grant.gpu[at];
    uint64_t unused = lease_unused_bytes(gpu) + atomic_load(&gpu->kept_bytes), leased = lease_leased_bytes(gpu);
    out->limit_bytes = atomic_load(&gpu->limit_bytes);
    out->leased_bytes = leased;
    out->used_bytes = leased > unused ? leased - unused : 0; /* read one after the other: never below zero */
    if (!link_unleased(gpu, &out->unleased_bytes))
        out->unleased_bytes = 0;
    return 0;
}
