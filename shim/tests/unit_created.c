/* unit_created.c - memory of cuMemCreate that is swapped, against the same calls of a driver without the library.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. Two drivers of device.c get the same calls: one directly, one
 * through the library, which swaps between and within them. Each call has to return the same, and whenever all is resident, the same
 * content has to be at the same addresses with the same access, and the same memory has to be in use. What is exported is resident, and so is its
 * lease: it fits into the guarantee, or is not exported.
 */
#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bursting.h"
#include "device.h"

#undef NDEBUG

enum { HANDLES = 24, STEPS = 60000, LEASE_PAGES = 64, GUARANTEE_PAGES = 6, MOST = 8 };

/* The program: what it has of each driver. */
static struct held {
    CUmemGenericAllocationHandle library, alone;
} held[HANDLES];
static unsigned handles, refused; /* exports */

static unsigned below(unsigned bound)
{
    return (unsigned)rand() % bound;
}

static bool is_away(CUmemGenericAllocationHandle handle)
{
    const struct elastic_block *block = block_of(created_id(handle));
    return block != NULL && block->state == BLOCK_AWAY;
}

static bool is_made(CUmemGenericAllocationHandle handle)
{
    const struct elastic_block *block = block_of(created_id(handle));
    return block != NULL && block->state == BLOCK_MADE;
}

static void program_creates(void)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = (CUmemAllocationHandleType)below(2),
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAllocationProp seen;
    const size_t bytes = (1 + below(PAGES_IN_BLOCK)) * PAGE;
    struct held *one = &held[handles];
    if (handles == HANDLES)
        return;
    const CUresult rc = cuMemCreate(&one->library, bytes, &prop, 0);
    assert(rc == CUDA_SUCCESS || rc == CUDA_ERROR_OUT_OF_MEMORY);
    if (rc != CUDA_SUCCESS)
        return;
    assert(dev_create(&alone, &one->alone, bytes, &prop) == CUDA_SUCCESS && created_is(one->library));
    assert(cuMemGetAllocationPropertiesFromHandle(&seen, one->library) == CUDA_SUCCESS && memcmp(&seen, &prop, sizeof prop) == 0);
    handles++;
}

static void program_releases(void)
{
    if (handles == 0)
        return;
    const unsigned which = below(handles);
    const struct held one = held[which];
    held[which] = held[--handles];
    assert(cuMemRelease(one.library) == CUDA_SUCCESS && dev_release(&alone, one.alone) == CUDA_SUCCESS);
    const CUresult again = physical_of(&alone, one.alone) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    CUmemAllocationProp seen;
    assert(cuMemGetAllocationPropertiesFromHandle(&seen, one.library) == again);
}

static void program_maps(void)
{
    if (handles == 0)
        return;
    const struct held one = held[below(handles)];
    const CUdeviceptr at = BASE + below(PAGES) * PAGE;
    const size_t bytes = (1 + below(PAGES_IN_BLOCK)) * PAGE, offset = below(20) == 0 ? PAGE : 0;
    if (!is_away(one.library)) /* it would wait */
        assert(cuMemMap(at, bytes, offset, one.library, 0) == dev_map(&alone, at, bytes, offset, one.alone));
}

static void range(CUdeviceptr *at, size_t *bytes)
{
    unsigned first = below(PAGES), pages = 1 + below(8);
    const struct place *place = &alone.place[first];
    if (place->physical != 0 && below(5) > 0) { /* mostly some whole mappings */
        first = place->first;
        for (pages = place->pages; first + pages < PAGES && alone.place[first + pages].physical != 0 && below(2) > 0;)
            pages += alone.place[first + pages].pages;
    }
    *at = BASE + first * PAGE;
    *bytes = pages * PAGE;
}

/* A refused call of a range with holes may be carried out in part where memory is away. So it is refused only where nothing is. */
static bool is_comparable(struct gpu *gpu, CUdeviceptr at, size_t bytes)
{
    return atomic_load(&gpu->away_bytes) == 0 || is_covered(&alone, (unsigned)((at - BASE) / PAGE), (unsigned)(bytes / PAGE));
}

static void program_unmaps(struct gpu *gpu)
{
    CUdeviceptr at;
    size_t bytes;
    range(&at, &bytes);
    if (is_comparable(gpu, at, bytes))
        assert(cuMemUnmap(at, bytes) == dev_change(&alone, at, bytes, NULL, 0));
}

static void program_sets_access(struct gpu *gpu)
{
    static const unsigned choices[] = {0, 1, 3, 3, 3};
    CUmemAccessDesc access[DEVICES];
    const size_t count = atomic_load(&gpu->away_bytes) > 0 ? 1 : 1 + below(DEVICES); /* of another device it would wait */
    for (size_t i = 0; i < count; i++)
        access[i] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = count > 1 ? (int)below(DEVICES) : 0},
                                      .flags = (CUmemAccess_flags)choices[below(5)]};
    CUdeviceptr at;
    size_t bytes;
    range(&at, &bytes);
    if (is_comparable(gpu, at, bytes))
        assert(cuMemSetAccess(at, bytes, access, count) == dev_change(&alone, at, bytes, access, count));
}

static void program_looks(void)
{
    const CUdeviceptr at = BASE + below(PAGES) * PAGE + below(PAGE);
    const struct place *place = &alone.place[(at - BASE) / PAGE];
    const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)below(DEVICES)};
    unsigned long long flags = 99;
    assert(cuMemGetAccess(&flags, &here, at) == (place->physical != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
    assert(place->physical == 0 || flags == place->access[here.id]);
    struct held *one = &held[handles];
    if (handles == HANDLES)
        return;
    const CUresult rc = cuMemRetainAllocationHandle(&one->library, (void *)(uintptr_t)at); /* NOLINT */
    assert(rc == dev_retain(&alone, &one->alone, (void *)(uintptr_t)at));
    handles += rc == CUDA_SUCCESS;
}

/* Pages of that memory, as it would be without the library. */
static uint64_t pages_of(bool resident)
{
    uint64_t pages = 0;
    for (unsigned i = 1; i <= alone.made; i++)
        pages += is_there(&alone.physical[i]) && alone.physical[i].resident == resident ? alone.physical[i].pages : 0;
    return pages;
}

static void program_exports(void)
{
    if (handles == 0 || below(8) > 0)
        return;
    const struct held one = held[below(handles)];
    int fd = -1;
    if (is_away(one.library) || is_made(one.library)) /* it would wait */
        return;
    struct physical *physical = physical_of(&alone, one.alone);
    const bool exportable = physical->prop.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    const bool fits = physical->resident || pages_of(true) + physical->pages <= GUARANTEE_PAGES;
    const CUresult rc = cuMemExportToShareableHandle(&fd, one.library, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    assert(rc == (!exportable ? CUDA_ERROR_INVALID_VALUE : fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY));
    refused += exportable && !fits;
    physical->resident = physical->resident || rc == CUDA_SUCCESS;
    if (fd >= 0)
        close(fd);
}

static void program_steps(struct gpu *gpu, unsigned steps)
{
    for (; steps > 0; steps--)
        switch (below(8)) {
        case 0:
            program_creates();
            break;
        case 1:
            program_releases();
            break;
        case 2:
        case 3:
            program_maps();
            break;
        case 4:
            program_unmaps(gpu);
            break;
        case 5:
            program_sets_access(gpu);
            break;
        case 6:
            program_looks();
            break;
        default:
            program_exports();
        }
}

/* Kernels: only where nothing is away. */
static void kernels_write(void)
{
    for (unsigned i = 0; i < PAGES; i++) {
        const struct place *place = &alone.place[i];
        const uint64_t value = ((uint64_t)rand() << 32) ^ (uint64_t)rand();
        if (place->physical == 0)
            continue;
        alone.physical[place->physical].content[i - place->first] = value;
        library.physical[library.place[i].physical].content[i - place->first] = value;
    }
}

static void all_is_the_same(struct gpu *gpu)
{
    uint64_t pages[2] = {0};
    for (unsigned i = 0; i < PAGES; i++) {
        const struct place *one = &library.place[i], *other = &alone.place[i];
        assert((one->physical != 0) == (other->physical != 0));
        if (one->physical == 0)
            continue;
        assert(one->first == other->first && one->pages == other->pages && memcmp(one->access, other->access, sizeof one->access) == 0);
        assert(library.physical[one->physical].content[i - one->first] == alone.physical[other->physical].content[i - other->first]);
    }
    for (unsigned i = 1; i <= library.made; i++)
        pages[0] += is_there(&library.physical[i]) ? library.physical[i].pages : 0;
    for (unsigned i = 1; i <= alone.made; i++)
        pages[1] += is_there(&alone.physical[i]) ? alone.physical[i].pages : 0;
    assert(pages[0] == pages[1] && pages[0] == pages_of(false) + pages_of(true));
    assert(atomic_load(&gpu->unused_bytes) == (GUARANTEE_PAGES - pages_of(true)) * PAGE);
    assert(atomic_load(&gpu->elastic_unused_bytes) == (LEASE_PAGES - pages_of(false)) * PAGE);
    assert(atomic_load(&gpu->away_bytes) == 0 && atomic_load(&gpu->elastic_bytes) == pages_of(false) * PAGE && tangram.elastic.created.left == 0);
}

/* The copier, by the block's present handle. */
static uint64_t saved[PHYSICAL][PAGES_IN_BLOCK];

static void copy(uint64_t id, bool save)
{
    const int fd = elastic_export(id);
    const uint64_t at = id - tangram.elastic.ids_from;
    assert(fd >= 0 && at < PHYSICAL);
    close(fd);
    struct physical *physical = physical_of(&library, block_of(id)->handle);
    assert(physical != NULL);
    memcpy(save ? saved[at] : physical->content, save ? physical->content : saved[at], sizeof saved[at]);
}

static unsigned kept; /* neither mapped nor unmapped whole */

/* Calls of the driver, in the middle of a block. */
static void fail_soon(void)
{
    countdown = below(3) == 0 ? 1 + below(4) : 0;
    in_a_row = 1 + below(3);
}

static unsigned swap(struct gpu *gpu)
{
    struct elastic_choice chosen[MOST];
    bool away[MOST] = {false};
    unsigned swapped = 0;
    const size_t count = elastic_choose(gpu, below(30) * PAGE, chosen, MOST);
    for (size_t i = 0; i < count; i++)
        assert(!block_of(chosen[i].id)->region->created->resident);
    for (size_t i = 0; i < count; i++) {
        copy(chosen[i].id, true);
        program_steps(gpu, below(4));
    }
    if (below(6) == 0)
        elastic_stay(gpu);
    for (size_t i = 0; i < count; i++) {
        fail_soon();
        elastic_unmap(chosen[i].id);
        countdown = 0;
        away[i] = is_away(created_handle(chosen[i].id));
        kept += away[i] && block_of(chosen[i].id)->region->created->kept;
        assert(!away[i] || !block_of(chosen[i].id)->region->created->resident);
        program_steps(gpu, below(4));
    }
    elastic_stay(gpu); /* what was exported since */
    program_steps(gpu, below(6));
    for (size_t i = 0; i < count; i++) {
        if (!away[i])
            continue;
        for (fail_soon(); !elastic_make(chosen[i].id);) { /* the driver may refuse in the middle: again */
            assert(is_away(created_handle(chosen[i].id)));
            const unsigned left = countdown;
            countdown = 0;
            program_steps(gpu, below(2));
            countdown = left;
        }
        countdown = 0;
        if (below(3) == 0) { /* no descriptor is free */
            program_steps(gpu, below(4));
            fail_soon();
            elastic_unmake(chosen[i].id);
            countdown = 0;
            program_steps(gpu, below(4));
            while (is_away(created_handle(chosen[i].id)) && !elastic_make(chosen[i].id))
                program_steps(gpu, below(4));
        }
        program_steps(gpu, below(4));
        copy(chosen[i].id, false);
        program_steps(gpu, below(4));
        assert(elastic_filled(chosen[i].id));
        swapped++;
    }
    return swapped;
}

static CUresult bind_memory(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes,
                            unsigned long long flags)
{
    (void)object, (void)offset, (void)memory_offset, (void)bytes, (void)flags;
    return physical_of(&library, memory) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult bind_address(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr at, size_t bytes, unsigned long long flags)
{
    (void)object, (void)offset, (void)at, (void)bytes, (void)flags;
    return CUDA_SUCCESS;
}

static CUresult bind(CUmemGenericAllocationHandle handle, bool by_address)
{
    return by_address ? cuMulticastBindAddr(1, 0, BASE, PAGE, 0) : cuMulticastBindMem(1, 0, handle, 0, PAGE, 0);
}

/* By its handle, or by its address. Within the guarantee, where the block stays as it is. */
static void what_is_bound_to_a_multicast_object_is_resident(struct gpu *gpu, bool by_address)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    struct elastic_choice chosen;
    tangram.driver.cuMulticastBindMem = bind_memory;
    tangram.driver.cuMulticastBindAddr = bind_address;
    assert(cuMemCreate(&handle, PAGE, &prop, 0) == CUDA_SUCCESS && cuMemMap(BASE, PAGE, 0, handle, 0) == CUDA_SUCCESS);
    atomic_fetch_sub(&gpu->unused_bytes, GUARANTEE_PAGES * PAGE);
    assert(bind(handle, by_address) == CUDA_ERROR_OUT_OF_MEMORY && elastic_choose(gpu, PAGE, &chosen, 1) == 1);
    atomic_fetch_add(&gpu->unused_bytes, GUARANTEE_PAGES * PAGE);
    elastic_stay(gpu);
    assert(bind(handle, by_address) == CUDA_SUCCESS && elastic_choose(gpu, PAGE, &chosen, 1) == 0 && atomic_load(&gpu->elastic_bytes) == 0);
    assert(atomic_load(&gpu->unused_bytes) == (GUARANTEE_PAGES - 1) * PAGE && atomic_load(&gpu->elastic_unused_bytes) == LEASE_PAGES * PAGE);
    assert(cuMemUnmap(BASE, PAGE) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
    assert(cuMulticastBindMem(1, 0, handle, 0, PAGE, 0) == CUDA_ERROR_INVALID_VALUE);
}

static CUmemGenericAllocationHandle exported;
static atomic_bool export_returned, in_driver;

static void *exports(void *unused)
{
    int fd = -1;
    (void)unused;
    assert(cuMemExportToShareableHandle(&fd, exported, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS);
    atomic_store(&export_returned, true);
    close(fd);
    return NULL;
}

/* Another process may read it at once. */
static void what_is_exported_has_its_content(struct gpu *gpu)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    struct elastic_choice chosen;
    pthread_t thread;
    assert(cuMemCreate(&exported, PAGE, &prop, 0) == CUDA_SUCCESS && elastic_choose(gpu, PAGE, &chosen, 1) == 1);
    assert(elastic_unmap(chosen.id) && elastic_make(chosen.id));
    assert(pthread_create(&thread, NULL, exports, NULL) == 0);
    while (atomic_load(&tangram.activity.waiting) == 0 && !atomic_load(&export_returned))
        sched_yield();
    assert(!atomic_load(&export_returned) && elastic_filled(chosen.id));
    assert(pthread_join(thread, NULL) == 0 && cuMemRelease(exported) == CUDA_SUCCESS);
}

static CUresult takes_long(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at)
{
    (void)flags, (void)location, (void)at;
    atomic_store(&in_driver, true);
    for (unsigned ms = 0; ms < 50; ms++)
        usleep(1000); /* where a thread may be cancelled */
    return CUDA_SUCCESS;
}

static void *looks(void *unused)
{
    unsigned long long flags;
    const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
    (void)unused;
    cuMemGetAccess(&flags, &here, BASE);
    return NULL;
}

static void a_thread_that_is_cancelled_within_the_driver_leaves_nothing_locked(void)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    pthread_t thread;
    assert(cuMemCreate(&handle, PAGE, &prop, 0) == CUDA_SUCCESS && cuMemMap(BASE, PAGE, 0, handle, 0) == CUDA_SUCCESS);
    tangram.driver.cuMemGetAccess = takes_long;
    atomic_store(&in_driver, false);
    assert(pthread_create(&thread, NULL, looks, NULL) == 0);
    while (!atomic_load(&in_driver))
        sched_yield();
    assert(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
    assert(pthread_mutex_trylock(&tangram.elastic.created.lock) == 0 && pthread_mutex_unlock(&tangram.elastic.created.lock) == 0);
    assert(cuMemUnmap(BASE, PAGE) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
}

static CUmemGenericAllocationHandle away;

/* After the library's own handler: the arbiter's orders are not read any more, and the driver is not called for them. */
static void is_late(void)
{
    const unsigned there = library.physical[library.made].handles;
    elastic_stay(&tangram.grant.gpu[0]);
    assert(there == 1 && library.physical[library.made].handles == 1);
    assert(cuMemMap(BASE, PAGE, 0, away, 0) == CUDA_ERROR_INVALID_VALUE);
    printf("unit_created: at the end no call waits for memory\n");
}

static void the_program_ends_while_memory_is_away(struct gpu *gpu)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle let_go;
    struct elastic_choice chosen;
    assert(atexit(is_late) == 0);
    helper_watch_end();
    assert(cuMemCreate(&away, PAGE, &prop, 0) == CUDA_SUCCESS && elastic_choose(gpu, PAGE, &chosen, 1) == 1 && elastic_unmap(chosen.id));
    assert(cuMemCreate(&let_go, PAGE, &prop, 0) == CUDA_SUCCESS && elastic_choose(gpu, PAGE, &chosen, 1) == 1 && cuMemRelease(let_go) == CUDA_SUCCESS);
}

int main(int count, char **words)
{
    device_begin();
    struct gpu *gpu = bursting_gpu(GUARANTEE_PAGES * PAGE, LEASE_PAGES * PAGE);
    unsigned swapped = 0;
    srand(count > 1 ? (unsigned)atoi(words[1]) : 7);
    for (unsigned step = 0; step < STEPS && library.made < PHYSICAL - 100 && alone.made < PHYSICAL - 100 && tangram.elastic.ids - tangram.elastic.ids_from < PHYSICAL - 100; step++) {
        program_steps(gpu, below(12));
        kernels_write();
        if (below(3) == 0)
            swapped += swap(gpu);
        all_is_the_same(gpu);
    }
    while (handles > 0)
        program_releases();
    for (unsigned i = 0; i < PAGES; i++)
        if (alone.place[i].physical != 0)
            assert(cuMemUnmap(BASE + i * PAGE, alone.place[i].pages * PAGE) == dev_change(&alone, BASE + i * PAGE, alone.place[i].pages * PAGE, NULL, 0));
    all_is_the_same(gpu);
    assert(swapped > 300 && kept > 5 && refused > 20 && atomic_load(&gpu->elastic_bytes) == 0);
    what_is_bound_to_a_multicast_object_is_resident(gpu, false);
    what_is_bound_to_a_multicast_object_is_resident(gpu, true);
    what_is_exported_has_its_content(gpu);
    a_thread_that_is_cancelled_within_the_driver_leaves_nothing_locked();
    assert(atomic_load(&gpu->unused_bytes) == GUARANTEE_PAGES * PAGE && atomic_load(&gpu->elastic_unused_bytes) == LEASE_PAGES * PAGE);
    printf("unit_created: ok, %u swaps, %u exports refused\n", swapped, refused);
    the_program_ends_while_memory_is_away(gpu);
    return 0;
}
