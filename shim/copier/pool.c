/* pool.c - the pool's file: on a hugetlbfs, or on a tmpfs with or without huge pages.
 *
 * All memory is allocated before the pool is used, by calls that fail: a page that is first touched by a copy on a full host would end the process
 * by SIGBUS. Allocating again what is allocated changes nothing, so a start that was cut short is completed by the next one.
 */
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/stat.h> /* struct statx: the library is built against glibc 2.17, which has neither it nor the call */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "fail.h"

enum { HUGETLBFS = 0x958458f6, TMPFS = 0x01021994, POPULATE_WRITE = 23 /* MADV_POPULATE_WRITE, since Linux 5.14 */, PARTS_REPORTED = 10 };
#define HOST_RESERVE_BYTES (UINT64_C(512) << 20) /* stays free on the host and in the cgroup, if the pool is on a tmpfs. Guessed */

static double mib(uint64_t bytes)
{
    return (double)bytes / 1048576;
}

static uint64_t step_at(const struct pool *pool, uint64_t offset)
{
    return pool->bytes - offset < POOL_STEP ? pool->bytes - offset : POOL_STEP;
}

static void report(const struct pool *pool, const char *what, uint64_t before, uint64_t bytes)
{
    if (bytes == pool->bytes || bytes * PARTS_REPORTED / pool->bytes != before * PARTS_REPORTED / pool->bytes)
        say("%.0f of %.0f MiB of the pool are %s", mib(bytes), mib(pool->bytes), what);
}

/* The number behind `name` in a file of lines, times `unit`; UINT64_MAX if there is none. */
static uint64_t number_in(const char *path, const char *name, uint64_t unit)
{
    char line[256];
    uint64_t found = UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return found;
    while (found == UINT64_MAX && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, name, strlen(name)) == 0 && sscanf(line + strlen(name), "%" SCNu64, &found) == 1)
            found *= unit;
    fclose(file);
    return found;
}

/* What a tmpfs may take now, of the host's memory and of this cgroup's. */
static uint64_t room_bytes(void)
{
    uint64_t host = number_in("/proc/meminfo", "MemAvailable:", 1024);
    uint64_t limit = number_in("/sys/fs/cgroup/memory.max", "", 1), used = number_in("/sys/fs/cgroup/memory.current", "", 1);
    uint64_t group = limit == UINT64_MAX || used == UINT64_MAX ? UINT64_MAX : limit > used ? limit - used : 0;
    uint64_t least = host < group ? host : group;
    return least == UINT64_MAX ? least : least > HOST_RESERVE_BYTES ? least - HOST_RESERVE_BYTES : 0;
}

/* The file, locked. Ends the program if another copier has it; -1: there is none, or it cannot be made. */
static int open_file(const char *path, bool make)
{
    int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT : 0), 0600);
    if (file < 0) {
        if (make || errno != ENOENT)
            say("pool %s: %s", path, strerror(errno));
        return -1;
    }
    if (flock(file, LOCK_EX | LOCK_NB) != 0)
        fail("pool %s: another copier uses it", path);
    return file;
}

static bool allocate_step(const struct pool *pool, bool huge, uint64_t offset)
{
    uint64_t bytes = step_at(pool, offset);
    /* through the map first: a tmpfs with huge=advise gives huge pages to a map that is marked, and none to fallocate */
    if (!huge && madvise(pool->at + offset, bytes, POPULATE_WRITE) != 0 && errno != EINVAL) {
        errno = errno == EFAULT ? ENOSPC : errno; /* what would be SIGBUS for one who writes */
        return false;
    }
    return fallocate(pool->file, 0, (off_t)offset, (off_t)bytes) == 0;
}

/* Maps the file and allocates all of it. Otherwise it has its old size again, and `why` is a reason. */
static bool fill_file(struct pool *pool, bool huge, uint64_t old_bytes, const char **why)
{
    pool->at = MAP_FAILED;
    if (ftruncate(pool->file, (off_t)pool->bytes) == 0)
        pool->at = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool->file, 0);
    bool allocated = pool->at != MAP_FAILED;
    if (allocated) {
        madvise(pool->at, pool->bytes, MADV_DONTDUMP);
        if (!huge)
            madvise(pool->at, pool->bytes, MADV_HUGEPAGE);
    }
    for (uint64_t offset = 0; allocated && offset < pool->bytes; offset += POOL_STEP) {
        allocated = allocate_step(pool, huge, offset);
        if (allocated) {
            pool->allocated_bytes = offset + step_at(pool, offset);
            report(pool, "allocated", offset, pool->allocated_bytes);
        }
    }
    if (allocated)
        return true;
    *why = strerror(errno);
    pool->allocated_bytes = 0;
    if (pool->at != MAP_FAILED)
        munmap(pool->at, pool->bytes);
    if (ftruncate(pool->file, (off_t)old_bytes) != 0)
        *why = "it cannot be made smaller again";
    return false;
}

/* Which file it is. The number of an inode, and that of the file system's device, may be given again after a file was removed or a tmpfs mounted anew: so also the
 * identity of the mount (random for a tmpfs since Linux 5.13) and the inode's time of birth (on a tmpfs since Linux 6.0). */
static void identify(struct pool *pool, const char *path)
{
    struct statx is;
    struct statfs on;
    uint64_t file_system = 0;
    if (syscall(SYS_statx, pool->file, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &is) != 0 || fstatfs(pool->file, &on) != 0)
        fail("pool %s: %s", path, strerror(errno));
    memcpy(&file_system, &on.f_fsid, sizeof on.f_fsid < sizeof file_system ? sizeof on.f_fsid : sizeof file_system);
    pool->file_system = file_system;
    pool->inode = is.stx_ino;
    if ((is.stx_mask & STATX_BTIME) != 0)
        pool->born_ns = (uint64_t)is.stx_btime.tv_sec * UINT64_C(1000000000) + is.stx_btime.tv_nsec;
}

/* Uses the file that is open. On a failure it is as it was, and a sentence is on stderr. */
static bool use_file(struct pool *pool, const char *path)
{
    struct stat is;
    struct statfs on;
    const char *why = "";
    if (fstat(pool->file, &is) != 0 || fstatfs(pool->file, &on) != 0)
        fail("pool %s: %s", path, strerror(errno));
    bool huge = (uint32_t)on.f_type == HUGETLBFS;
    uint64_t taken = (uint64_t)is.st_blocks * 512;
    if (!S_ISREG(is.st_mode) || (!huge && on.f_type != TMPFS))
        why = "it is not a file on a hugetlbfs or tmpfs";
    else if (pool->bytes % (uint64_t)on.f_bsize != 0)
        why = "the size of the pool is no multiple of its pages";
    else if (!huge && pool->bytes > taken && pool->bytes - taken > room_bytes())
        why = "the host or the cgroup has not so much memory left";
    else if (fill_file(pool, huge, (uint64_t)is.st_size, &why)) {
        pool->pages = huge ? COPIER_HUGETLB_PAGES : COPIER_PLAIN_PAGES;
        identify(pool, path);
        return true;
    }
    say("pool %s of %.0f MiB: %s", path, mib(pool->bytes), why);
    return false;
}

/* Whether most of what is mapped at `at` is mapped by huge pages. */
static bool is_transparent(const struct pool *pool)
{
    char line[512], start[32];
    uint64_t kib = 0;
    bool inside = false;
    FILE *file = fopen("/proc/self/smaps", "re");
    snprintf(start, sizeof start, "%" PRIxPTR "-", (uintptr_t)pool->at);
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, start, strlen(start)) == 0)
            inside = true;
        else if (inside && sscanf(line, "ShmemPmdMapped: %" SCNu64, &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kib * 1024 > pool->bytes / 2;
}

static const char *find_file(struct pool *pool)
{
    const char *found = NULL;
    for (unsigned i = 0; i < pool->paths; i++) {
        struct stat is;
        if (stat(pool->path[i], &is) != 0 || is.st_size == 0)
            continue;
        if (found != NULL)
            fail("pools %s and %s both exist: remove the one that nothing was saved to", found, pool->path[i]);
        if ((uint64_t)is.st_size > pool->bytes)
            fail("pool %s has %.0f MiB, and %.0f are allowed", pool->path[i], mib((uint64_t)is.st_size), mib(pool->bytes));
        found = pool->path[i];
    }
    return found;
}

void pool_allocate(struct pool *pool)
{
    const char *path = find_file(pool);
    bool made = false;
    if (path != NULL) {
        pool->file = open_file(path, false);
        made = pool->file >= 0 && use_file(pool, path);
    }
    for (unsigned i = 0; path == NULL && !made && i < pool->paths; i++) {
        pool->file = open_file(pool->path[i], true);
        made = pool->file >= 0 && use_file(pool, pool->path[i]);
        if (!made && pool->file >= 0) {
            unlink(pool->path[i]);
            close(pool->file);
        }
    }
    if (!made)
        fail("there is no pool of %.0f MiB", mib(pool->bytes));
    if (pool->pages == COPIER_PLAIN_PAGES && is_transparent(pool))
        pool->pages = COPIER_TRANSPARENT_PAGES;
}

void pool_register(struct pool *pool, const struct driver *driver)
{
    for (uint64_t offset = 0; offset < pool->bytes; offset += POOL_STEP) {
        CUresult rc = driver->host_register(pool->at + offset, step_at(pool, offset), MAP_FOR_ALL_CONTEXTS);
        if (rc != CUDA_SUCCESS)
            fail("the driver cannot register the pool's memory after %.0f of %.0f MiB: CUDA error %d", mib(offset), mib(pool->bytes), (int)rc);
        pool->registered_bytes = offset + step_at(pool, offset);
        report(pool, "registered", offset, pool->registered_bytes);
    }
}
