/* memory.c - device memory, counted before it is taken.
 *
 * An allocation is three steps, always in this order:
 *     reserve   take the size from the lease, or refuse
 *     call      the driver's own function
 *     settle    return the reservation if the driver failed, else own the pointer
 * What is reserved is what the GPU loses: pages of 2 MiB, which small requests share (pages.c). Whether a small request needs a
 * page is known when its address is: so one is reserved for it, or, near the limit, a free range in a page that is charged already.
 *
 * A free is the same backwards; what the driver does not free stays counted. A pointer that we do not own is passed to
 * the driver, which returns the error for it.
 */
#include "memory/memory.h"

#include "hooks/hook.h"
#include "memory/pool.h"

/* Nothing that others do could grant it: the program sees only that the GPU is out of memory, while cuMemGetInfo has some free. */
static void warn_ceiling(struct gpu *gpu, uint64_t bytes)
{
    const uint32_t by = atomic_load(&gpu->ceiling_by);
    if (by == WIRE_GRANTED)
        return;
    const uint64_t guarantee_mib = lease_limit_bytes(gpu, WIRE_RESIDENT) / MIB, size_mib = atomic_load(&gpu->ceiling_bytes) / MIB;
    const uint64_t limit = atomic_load(&gpu->limit_bytes), free_bytes = lease_free_bytes(gpu);
    const unsigned long long mib = (bytes + MIB - 1) / MIB, has_mib = (limit > free_bytes ? limit - free_bytes : 0) / MIB;
    if (by == WIRE_BY_POOL)
        warn(WARN_CEILING,
             "an allocation of %llu MiB on GPU %u fails: the container has %llu MiB, its guarantee is %llu MiB, and what is above it must fit into the "
             "host pool of %llu MiB (burst.hostPool)",
             mib, gpu->at, has_mib, (unsigned long long)guarantee_mib, (unsigned long long)size_mib);
    else
        warn(WARN_CEILING, "an allocation of %llu MiB on GPU %u fails: the container has %llu MiB, and the GPU has %llu MiB for containers", mib, gpu->at,
             has_mib, (unsigned long long)size_mib);
}

static bool reserve_somehow(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    if (lease_reserve_as(gpu, kind, bytes))
        return true;
    if (lease_limit_bytes(gpu, kind) < bytes)
        return false;
    if ((elastic_trim(gpu, bytes) > 0 && lease_reserve_as(gpu, kind, bytes)) || (pools_reclaim(gpu) && lease_reserve_as(gpu, kind, bytes)))
        return true;
    if (bound_settle(gpu) && lease_reserve_as(gpu, kind, bytes)) /* reserved for code and streams, and not needed */
        return true;
    if (discard_wait(gpu) && lease_reserve_as(gpu, kind, bytes))
        return true;
    warn_ceiling(gpu, bytes);
    return false;
}

bool reserve_as(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes)
{
    lease_allocation_begin();
    const bool reserved = reserve_somehow(gpu, kind, bytes);
    lease_allocation_end();
    return reserved;
}

bool reserve(struct gpu *gpu, uint64_t bytes)
{
    return reserve_as(gpu, WIRE_RESIDENT, bytes);
}

bool taking_begin(struct taking *taking, struct gpu *gpu, enum linear what, uint64_t bytes)
{
    const void *group = what == MANAGED ? (const void *)&gpu->closed : gpu; /* two addresses of the GPU's own */
    uint64_t mark = what == MANAGED ? OWNED_MANAGED : 0;
    *taking = (struct taking){.gpu = gpu, .group = group, .bytes = pages_rounded(bytes > 0 ? bytes : 1), .mark = mark};
    uint64_t most = taking->bytes < PAGE ? PAGE : taking->bytes;
    bool paid = lease_take(gpu, most);
    if (!paid && taking->bytes < PAGE && !gpu->closed && pages_fit(&tangram.pages, group, taking->bytes))
        return true;
    if (paid || reserve(gpu, most))
        taking->reserved = most;
    return taking->reserved > 0;
}

void taking_cancel(const struct taking *taking)
{
    lease_give_back(taking->gpu, taking->reserved);
}

static CUresult undo(CUdeviceptr at, struct gpu *gpu, uint64_t charged)
{
    tangram.driver.cuMemFree_v2(at); /* memory that cannot be counted is not returned */
    lease_give_back(gpu, charged);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Counted after the lease is charged, until before the charge is returned: it is never more than what is used. */
static void managed_more(const struct taking *taking, uint64_t charged)
{
    if (UNLIKELY(taking->mark != 0))
        atomic_fetch_add(&taking->gpu->managed_bytes, charged);
}

static void managed_less(struct gpu *gpu, uint64_t mark, uint64_t charged)
{
    if (UNLIKELY(mark != 0))
        atomic_fetch_sub(&gpu->managed_bytes, charged);
}

/* What the request is charged, now that its address is known. False: no charged page had a free range after all, and no page is left. */
static bool taking_settle(const struct taking *taking, CUdeviceptr at)
{
    bool fresh = pages_put(&tangram.pages, taking->group, at, taking->bytes);
    if (!fresh && taking->reserved > 0)
        lease_give_back(taking->gpu, taking->reserved);
    if (!fresh || taking->reserved > 0 || reserve(taking->gpu, PAGE)) {
        managed_more(taking, fresh ? PAGE : 0);
        return true;
    }
    pages_end(&tangram.pages, at);
    return false;
}

CUresult taking_end(const struct taking *taking, CUresult rc, CUdeviceptr at)
{
    bool shares = taking->bytes < PAGE;
    if (rc != CUDA_SUCCESS) {
        taking_cancel(taking);
        return rc;
    }
    if (shares && !taking_settle(taking, at))
        return undo(at, taking->gpu, 0);
    if (!shares)
        managed_more(taking, taking->reserved);
    if (table_own((struct owned){.at = at, .bytes = taking->bytes | taking->mark, .gpu = taking->gpu}))
        return rc;
    uint64_t charged = !shares ? taking->reserved : pages_end(&tangram.pages, at) == PAGE_EMPTY ? PAGE : 0;
    managed_less(taking->gpu, taking->mark, charged);
    return undo(at, taking->gpu, charged);
}

/* Measured: rows of 512 bytes, whatever the elements are. */
uint64_t pitch_planned(uint64_t width)
{
    return (width + PAGE_GRAIN - 1) / PAGE_GRAIN * PAGE_GRAIN;
}

CUresult taking_end_pitch(struct taking *taking, CUresult rc, CUdeviceptr at, uint64_t pitch, uint64_t planned, uint64_t rows)
{
    uint64_t bytes;
    if (rc != CUDA_SUCCESS || pitch <= planned)
        return taking_end(taking, rc, at);
    struct taking wider; /* another driver, another rule */
    if (__builtin_mul_overflow(pitch, rows, &bytes) || !taking_begin(&wider, taking->gpu, PLAIN, bytes))
        return undo(at, taking->gpu, taking->reserved);
    taking_cancel(taking);
    return taking_end(&wider, rc, at);
}

static struct pages *pages_of(unsigned kind)
{
    if (kind == OWNED_MODULE || kind == OWNED_LIBRARY || kind == OWNED_THERE)
        return &tangram.module_pages;
    return kind == OWNED_ARRAY || kind == OWNED_MIPMAP ? &tangram.array_pages : NULL;
}

/* Memory that shares a page frees the page if it was the last in it. */
void memory_gone(const struct owned *was)
{
    struct owned left = *was;
    unsigned kind = (unsigned)(was->at >> 59);
    if (kind == OWNED_ELASTIC) {
        elastic_gone(OWNED_AS(OWNED_ELASTIC, was->at));
        return;
    }
    uint64_t mark = kind == 0 ? was->bytes & OWNED_MANAGED : 0;
    enum page_end end = PAGE_UNKNOWN;
    left.bytes ^= mark;
    if (kind == 0 && was->of == NULL && left.bytes < PAGE)
        end = pages_end(&tangram.pages, was->at);
    else if ((was->bytes & PLACED) != 0 && pages_of(kind) != NULL) {
        end = pages_end(pages_of(kind), was->bytes & ~PLACED);
        left.bytes = 0;
    }
    if (end != PAGE_UNKNOWN)
        left.bytes = end == PAGE_EMPTY ? PAGE : 0;
    managed_less(left.gpu, mark, left.bytes);
    shared_end_or_give_back(&left);
}

void settle_free(CUresult rc, const struct owned *was)
{
    if (rc != CUDA_SUCCESS)
        table_own(*was);
    else if (was->of != NULL) {
        shared_end(was->at);
        pool_freed(was->of);
    } else
        memory_gone(was);
}

void settle_handle(CUresult rc, const struct owned *was)
{
    if (rc == CUDA_SUCCESS)
        memory_gone(was);
    else
        table_own(*was);
}

/* Memory that cannot be zeroed is not returned. */
static CUresult cleared(CUresult rc, CUdeviceptr *at, uint64_t bytes)
{
    if (!UNLIKELY(tangram.grant.clear) || rc != CUDA_SUCCESS)
        return rc;
    rc = clear_now(*at, bytes);
    if (rc != CUDA_SUCCESS)
        cuMemFree_v2(*at);
    return rc;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    NEEDS(cuMemAlloc_v2);
    struct gpu *gpu = current_gpu();
    if (gpu == NULL) /* this GPU is not shared: stay out of the way */
        return tangram.driver.cuMemAlloc_v2(at, bytes);
    CUresult rc;
    if (elastic_wanted(gpu) && elastic_alloc(gpu, at, bytes, &rc))
        return cleared(rc, at, bytes);
    struct taking taking;
    if (!taking_begin(&taking, gpu, PLAIN, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    rc = tangram.driver.cuMemAlloc_v2(at, bytes);
    return cleared(taking_end(&taking, rc, rc == CUDA_SUCCESS ? *at : 0), at, bytes);
}

/* Charged in full where it is made, wherever its pages are: a GPU that is oversubscribed through managed memory would slow
 * other containers down. The GPU allocates it page by page at the first access, by the rules of plain memory. Its pages come from the driver zeroed. */
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned int flags)
{
    NEEDS(cuMemAllocManaged);
    struct gpu *gpu = current_gpu();
    if (gpu == NULL)
        return tangram.driver.cuMemAllocManaged(at, bytes, flags);
    struct taking taking;
    if (!taking_begin(&taking, gpu, MANAGED, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuMemAllocManaged(at, bytes, flags);
    return taking_end(&taking, rc, rc == CUDA_SUCCESS ? *at : 0);
}

/* What the driver accepts; anything else is left to it. */
static bool is_pitch_element(unsigned int element)
{
    return element == 4 || element == 8 || element == 16;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    NEEDS(cuMemAllocPitch_v2);
    struct gpu *gpu = current_gpu();
    if (gpu == NULL)
        return tangram.driver.cuMemAllocPitch_v2(at, pitch, width, height, element);
    struct taking taking;
    CUresult rc;
    uint64_t bytes, planned = pitch_planned(width);
    if (planned < width || __builtin_mul_overflow(planned, height, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (elastic_wanted(gpu) && is_pitch_element(element) && pitch != NULL && elastic_alloc(gpu, at, bytes, &rc)) {
        *pitch = rc == CUDA_SUCCESS ? planned : *pitch;
        return cleared(rc, at, bytes);
    }
    if (!taking_begin(&taking, gpu, PLAIN, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    rc = tangram.driver.cuMemAllocPitch_v2(at, pitch, width, height, element);
    bool taken = rc == CUDA_SUCCESS;
    rc = taking_end_pitch(&taking, rc, taken ? *at : 0, taken ? *pitch : 0, planned, height);
    return cleared(rc, at, taken ? *pitch * height : 0);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr at)
{
    NEEDS(cuMemFree_v2);
    struct owned was;
    CUresult rc;
    if (!table_disown(at, &was))
        return elastic_free(at, &rc) ? rc : tangram.driver.cuMemFree_v2(at);
    rc = tangram.driver.cuMemFree_v2(at);
    settle_free(rc, &was);
    return rc;
}
