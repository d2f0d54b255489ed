/* ipc.c - elastic memory that this process lets others open: its handles, and the export of its blocks.
 *
 * With its first handle a region becomes resident: its blocks are never swapped out again, because others have them mapped. So its lease becomes
 * resident too, within the guarantee (CONVERT). HOLD states the region's key, so that the arbiter finds this process, and charges the memory to
 * others when it is gone. A region is resident until it has no live request; then it is released, not kept, because others may still write into it.
 */
#include "memory/memory.h"

#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef GRND_NONBLOCK
enum { GRND_NONBLOCK = 1 };
#endif
enum { RESIDENT_MS = 30000 }; /* so long memory that is away is waited for: others have the GPU meanwhile; guessed */

static struct elastic *const elastic = &tangram.elastic;

bool ipc_is_emulated(const void *handle)
{
    return handle != NULL && memcmp(handle, WIRE_HANDLE_MAGIC, sizeof((struct ipc_handle *)0)->magic) == 0;
}

/* Locked. The region and range of a live request, and what its handle has but for the token. */
static struct elastic_region *described(CUdeviceptr at, struct ipc_handle *handle)
{
    struct elastic_region *region = region_of(at);
    const struct range *range = region != NULL ? region_range(region, at) : NULL;
    if (range == NULL)
        return NULL;
    *handle = (struct ipc_handle){.offset = range->at - region->base, .requested = range->requested, .number = range->number};
    memcpy(handle->magic, WIRE_HANDLE_MAGIC, sizeof handle->magic);
    return region;
}

/* From here on none of its blocks is chosen. False: some is not back. */
static bool stays(struct elastic_region *region)
{
    lock_acquire(&elastic->lock);
    region->ipc.resident = region->moving == 0;
    const bool resident = region->ipc.resident;
    lock_release(&elastic->lock);
    return resident;
}

/* The same, when it is back: the arbiter brings it back as for a launch. False: not in time. */
static bool stays_in_time(struct elastic_region *region)
{
    const struct timespec moment = {0, 2000000};
    bool resident = stays(region);
    if (resident)
        return true;
    activity_waits_for_memory();
    for (const uint64_t until_ms = now_ms() + RESIDENT_MS; !resident && now_ms() < until_ms && !helper_ended(); resident = stays(region))
        nanosleep(&moment, NULL);
    activity_has_memory();
    return resident;
}

static struct ipc_handle key_of(const uint8_t token[24])
{
    struct ipc_handle key = {.zero = 0};
    memcpy(key.magic, WIRE_HANDLE_MAGIC, sizeof key.magic);
    memcpy(key.token, token, sizeof key.token);
    return key;
}

/* Not locked; it is not released meanwhile. NULL: others may open it from now on. Else why they may not. */
static const char *share(struct elastic_region *region)
{
    uint8_t token[sizeof region->ipc.token];
    if (!passing_is_understood())
        return "the arbiter does not answer, or is of an earlier release";
    if (syscall(SYS_getrandom, token, sizeof token, GRND_NONBLOCK) != (long)sizeof token)
        return "the kernel has no random numbers yet";
    if (!stays_in_time(region))
        return "its memory is in host memory, and did not return in time";
    const struct ipc_handle key = key_of(token);
    shared_made(region->gpu, WIRE_IPC, region->base, region->bytes, &key); /* before CONVERT: when that is answered, the arbiter knows the key */
    const bool fits = lease_convert(region->gpu, region->bytes);
    if (!fits)
        shared_end(region->base);
    lock_acquire(&elastic->lock);
    region->ipc.resident = region->ipc.converted = fits;
    memcpy(region->ipc.token, token, sizeof token);
    if (fits)
        atomic_fetch_sub(&region->gpu->elastic_bytes, region->bytes);
    lock_release(&elastic->lock);
    return fits ? NULL : "memory that others open stays on the GPU, and that does not fit into the container's guarantee";
}

/* Locked on entry. */
static void unneeded(struct elastic_region *region)
{
    region->ipc.exporting--;
    lock_release(&elastic->lock);
    ipc_release_ended();
}

static const char *name(struct ipc_handle *handle, CUdeviceptr at)
{
    lock_acquire(&elastic->lock);
    struct elastic_region *region = described(at, handle);
    if (region == NULL) {
        lock_release(&elastic->lock);
        return "it was freed meanwhile";
    }
    const bool shared = region->ipc.converted;
    region->ipc.exporting++;
    lock_release(&elastic->lock);
    const char *why = shared ? NULL : share(region);
    lock_acquire(&elastic->lock);
    memcpy(handle->token, region->ipc.token, sizeof handle->token);
    unneeded(region);
    return why;
}

CUresult ipc_get(void *out, CUdeviceptr at)
{
    struct ipc_handle handle;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&tangram.passing.exporting);
    const char *why = name(&handle, at);
    pthread_mutex_unlock(&tangram.passing.exporting);
    quiet_end(quiet);
    if (why != NULL) {
        warn(WARN_ELASTIC_IPC, "no IPC handle for memory that can be swapped: %s", why);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

/* Locked. Of a handle that is valid now; NULL: none. */
static struct elastic_region *region_of_handle(const struct ipc_handle *handle)
{
    for (size_t i = 0; i < elastic->regions; i++) {
        struct elastic_region *region = elastic->region[i];
        if (!region->ipc.converted || memcmp(region->ipc.token, handle->token, sizeof handle->token) != 0)
            continue;
        const struct range *range = handle->offset < region->bytes ? region_range(region, region->base + handle->offset) : NULL;
        const bool same = range != NULL && range->at == region->base + handle->offset && range->requested == handle->requested &&
                          range->number == handle->number && handle->zero == 0;
        return same ? region : NULL;
    }
    return NULL;
}

bool ipc_is_ours(const void *handle)
{
    lock_acquire(&elastic->lock);
    const bool ours = region_of_handle(handle) != NULL;
    lock_release(&elastic->lock);
    return ours;
}

static void refuse(uint32_t seq, const struct gpu *gpu, enum wire_unopened_reason reason)
{
    const int gpu_wire = gpu != NULL ? atomic_load(&gpu->wire) : 0;
    passing_answer(seq, &(struct wire_exported){.gpu = gpu_wire > 0 ? (uint32_t)gpu_wire : 0, .reason = reason}, NULL);
}

/* Blocks from `first` on, as many as one packet can have. */
static enum wire_unopened_reason export_some(uint32_t seq, const struct elastic_region *region, unsigned first)
{
    int fd[WIRE_PASSED_LIMIT];
    struct wire_exported out = {.gpu = (uint32_t)atomic_load(&region->gpu->wire), .first = first, .total = region->blocks, .bytes = region->bytes};
    CUresult rc = CUDA_SUCCESS;
    while (rc == CUDA_SUCCESS && out.count < WIRE_PASSED_LIMIT && first + out.count < region->blocks) {
        const struct elastic_block *block = &region->block[first + out.count];
        rc = tangram.driver.cuMemExportToShareableHandle(&fd[out.count], block->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (rc != CUDA_SUCCESS)
            break;
        fcntl(fd[out.count], F_SETFD, FD_CLOEXEC);
        out.block_bytes[out.count++] = block->bytes;
    }
    if (rc == CUDA_SUCCESS)
        passing_answer(seq, &out, fd);
    for (uint32_t i = 0; i < out.count; i++)
        close(fd[i]);
    if (rc == CUDA_SUCCESS)
        return 0;
    return rc == CUDA_ERROR_OPERATING_SYSTEM ? WIRE_OUT_OF_DESCRIPTORS : WIRE_DRIVER_REFUSED;
}

void ipc_export(uint32_t seq, const void *handle)
{
    lock_acquire(&elastic->lock);
    struct elastic_region *region = helper_ended() ? NULL : region_of_handle(handle);
    if (region != NULL)
        region->ipc.exporting++;
    lock_release(&elastic->lock);
    enum wire_unopened_reason reason = region == NULL ? WIRE_UNKNOWN : region->blocks > WIRE_OPEN_BLOCKS_LIMIT ? WIRE_DRIVER_REFUSED : 0;
    for (unsigned first = 0; reason == 0 && first < region->blocks; first += WIRE_PASSED_LIMIT)
        reason = export_some(seq, region, first);
    if (reason != 0)
        refuse(seq, region != NULL ? region->gpu : NULL, reason);
    if (region == NULL)
        return;
    lock_acquire(&elastic->lock);
    unneeded(region);
}

void ipc_ended(struct elastic_region *region)
{
    region->next_kept = elastic->ipc.ended;
    elastic->ipc.ended = region;
    atomic_store(&elastic->ipc.any_ended, true);
}

/* Locked. One that no thread needs and that is not being swapped, in no list any more. */
static struct elastic_region *take_ended(void)
{
    struct elastic_region **place = &elastic->ipc.ended;
    while (*place != NULL && ((*place)->ipc.exporting > 0 || (*place)->moving > 0))
        place = &(*place)->next_kept;
    struct elastic_region *region = *place;
    if (region == NULL)
        return NULL;
    *place = region->next_kept;
    atomic_store(&elastic->ipc.any_ended, elastic->ipc.ended != NULL);
    if (region->ipc.converted)
        atomic_fetch_add(&region->gpu->elastic_bytes, region->bytes); /* which is subtracted with the region */
    region_unlist(region);
    return region;
}

void ipc_release_ended(void)
{
    while (atomic_load(&elastic->ipc.any_ended)) {
        lock_acquire(&elastic->lock);
        struct elastic_region *region = take_ended();
        lock_release(&elastic->lock);
        if (region == NULL)
            return;
        const struct owned was = {.at = region->base, .bytes = region->bytes, .gpu = region->gpu};
        const bool converted = region->ipc.converted;
        if (!region_end(region)) /* what the driver still has stays charged */
            shared_end(was.at);
        else if (converted)
            shared_end_or_give_back(&was);
        else
            lease_give_back_as(was.gpu, WIRE_ELASTIC, was.bytes);
    }
}
