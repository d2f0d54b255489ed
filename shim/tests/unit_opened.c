/* unit_opened.c - memory of other processes that is open here: what happens to it while another thread is in the driver with it.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. The driver is a few functions of this file, the arbiter a thread at the other
 * end of a pair of sockets, which hands each answer to the library as the helper would. What another thread does meanwhile happens within the driver's
 * call, at which no lock is held. */
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../src/hooks/hook.h"
#include "answering.h"
#include "bursting.h"

#undef NDEBUG

enum { REFUSED = 999 };

static struct {
    uint64_t next;
    CUdevice device;          /* of the current context, whose handle is one more */
    CUstreamCaptureMode mode; /* of the thread */
    unsigned mapped, waits, waits_on[2]; /* of each device */
    CUdevice below;           /* that context on the stack */
    struct {
        CUdeviceptr at;
        uint64_t access; /* devices, a bit each */
    } mapping[64];
    unsigned mappings; /* that were ever made */
    bool refuses;    /* the next access */
    void (*meanwhile)(void), (*while_looked_at)(void), (*while_imported)(void); /* done once */
} fake = {.next = UINT64_C(0x7f0000000000)};

static void once(void (**what)(void))
{
    void (*does)(void) = *what;
    *what = NULL;
    if (does != NULL)
        does();
}

static CUresult get_current(CUcontext *context)
{
    *context = (CUcontext)(uintptr_t)(fake.device + 1);
    once(&fake.while_looked_at);
    return CUDA_SUCCESS;
}
static CUresult get_device(CUdevice *device)
{
    *device = fake.device;
    return CUDA_SUCCESS;
}
static CUresult push(CUcontext context)
{
    fake.below = fake.device;
    fake.device = (CUdevice)(uintptr_t)context - 1;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *context)
{
    *context = (CUcontext)(uintptr_t)(fake.device + 1);
    fake.device = fake.below;
    return CUDA_SUCCESS;
}
static CUresult alloc(CUdeviceptr *at, size_t bytes)
{
    *at = bytes;
    fake.waits++;
    fake.waits_on[fake.device]++;
    return CUDA_SUCCESS;
}
static CUresult free_one(CUdeviceptr at)
{
    (void)at;
    return CUDA_SUCCESS;
}
static CUresult exchange(CUstreamCaptureMode *mode)
{
    const CUstreamCaptureMode was = fake.mode;
    fake.mode = *mode;
    *mode = was;
    return CUDA_SUCCESS;
}
static CUresult import(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
    (void)os_handle, (void)type;
    *handle = ++fake.next;
    once(&fake.while_imported);
    return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle)
{
    (void)handle;
    return CUDA_SUCCESS;
}
static uint64_t *access_at(CUdeviceptr at)
{
    unsigned i = 0;
    while (fake.mapping[i].at != at)
        assert(++i < fake.mappings);
    return &fake.mapping[i].access;
}
static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)bytes, (void)offset, (void)handle, (void)flags;
    fake.mapped++;
    fake.mapping[fake.mappings++].at = at;
    return CUDA_SUCCESS;
}
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    fake.mapped--;
    return CUDA_SUCCESS;
}
static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    assert(at != 0 && bytes == PAGE && count == 1 && fake.mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    const bool refuses = fake.refuses;
    fake.refuses = false;
    once(&fake.meanwhile);
    *access_at(at) |= refuses ? 0 : (uint64_t)1 << access->location.id;
    return refuses ? (CUresult)REFUSED : CUDA_SUCCESS;
}
static CUresult reserve_addresses(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)alignment, (void)wish, (void)flags;
    *at = fake.next += bytes;
    return CUDA_SUCCESS;
}
static CUresult free_addresses(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    return CUDA_SUCCESS;
}

/* The arbiter. */

static int arbiter;
static struct gpu *gpu;
static _Atomic unsigned drops;

static void pass(uint32_t seq)
{
    struct wire_passed passed = {.count = 1, .fd = {(int)syscall(SYS_memfd_create, "block", 1u)}};
    passing_came(seq, &(struct wire_exported){.count = 1, .total = 1, .bytes = PAGE, .block_bytes = {PAGE}}, &passed);
}

static void *answer(void *unused)
{
    struct wire_packet packet;
    while (recv(arbiter, &packet, sizeof packet, 0) > 0) {
        const enum wire_type type = (enum wire_type)packet.header.type;
        const struct wire_packet leased = {.header = {.type = WIRE_LEASED, .seq = packet.header.seq}};
        if (type == WIRE_OPEN) {
            pass(packet.header.seq);
            continue;
        }
        assert(type == WIRE_HOLD || type == WIRE_DROP);
        atomic_fetch_add(&drops, type == WIRE_DROP);
        assert(link_handle(&leased));
    }
    return unused;
}

static void set_up(void)
{
    gpu = bursting_gpu(0, 0);
    atomic_store(connect_arbiter(&arbiter, answer), WIRE_UNDERSTANDS_OPEN);
    tangram.driver.cuCtxGetCurrent = get_current;
    tangram.driver.cuCtxGetDevice = get_device;
    tangram.driver.cuCtxPushCurrent_v2 = push;
    tangram.driver.cuCtxPopCurrent_v2 = pop;
    tangram.driver.cuMemAlloc_v2 = alloc;
    tangram.driver.cuMemFree_v2 = free_one;
    tangram.driver.cuThreadExchangeStreamCaptureMode = exchange;
    tangram.driver.cuMemImportFromShareableHandle = import;
    tangram.driver.cuMemRelease = release;
    tangram.driver.cuMemMap = map;
    tangram.driver.cuMemUnmap = unmap;
    tangram.driver.cuMemSetAccess = set_access;
    tangram.driver.cuMemAddressReserve = reserve_addresses;
    tangram.driver.cuMemAddressFree = free_addresses;
}

/* The program. */

static CUresult open_on(CUdevice device, CUdeviceptr *at)
{
    struct ipc_handle handle = {.requested = PAGE, .number = 1};
    const CUdevice was = fake.device;
    const CUstreamCaptureMode mode = fake.mode;
    memcpy(handle.magic, WIRE_HANDLE_MAGIC, sizeof handle.magic);
    fake.device = device;
    const CUresult rc = ipc_open(at, &handle, 1);
    fake.device = was;
    assert(fake.mode == mode);
    return rc;
}

static CUdeviceptr opened_on(CUdevice device)
{
    CUdeviceptr at = 0;
    assert(open_on(device, &at) == CUDA_SUCCESS && at != 0);
    return at;
}

static bool closed(CUdeviceptr at)
{
    CUresult rc;
    return ipc_close(at, &rc) && rc == CUDA_SUCCESS;
}

/* All is closed, nothing is mapped, and so many DROPs reached the arbiter since the last time. */
static void expect_nothing(CUdeviceptr at, unsigned count)
{
    struct elastic_found found;
    for (unsigned ms = 0; atomic_load(&drops) < count; ms++)
        assert(ms < 2000 && usleep(1000) == 0);
    assert(!closed(at) && fake.mapped == 0 && atomic_exchange(&drops, 0) == count && tangram.elastic.ipc.opened == NULL && !elastic_find(at, &found));
    fake.waits = fake.waits_on[0] = fake.waits_on[1] = 0;
}

static CUdeviceptr first;
static CUresult second;

static void close_first(void)
{
    struct elastic_found found;
    assert(closed(first) && !closed(first) && fake.mapped == 1 && !elastic_find(first, &found));
}

static void end_first_context(void)
{
    ipc_forget_context((CUcontext)(uintptr_t)1, NULL, UINT64_MAX);
    assert(fake.mapped == 1); /* a thread uses it */
}

static void open_on_second(void)
{
    CUdeviceptr at;
    fake.refuses = true;
    second = open_on(1, &at);
}

static void open_first_on_second(void)
{
    first = opened_on(1);
}

static void what_is_opened_on_two_gpus_is_mapped_until_it_is_closed_as_often(void)
{
    first = opened_on(0);
    assert(opened_on(1) == first && opened_on(1) == first && *access_at(first) == 3 && fake.mapped == 1);
    assert(closed(first) && closed(first) && fake.waits == 0 && closed(first) && fake.waits == 1);
    expect_nothing(first, 1);
}

static bool closed_on(CUdevice device, CUdeviceptr at)
{
    const CUdevice was = fake.device;
    fake.device = device;
    const bool closes = closed(at);
    assert(fake.device == device);
    fake.device = was;
    return closes;
}

static void what_each_context_closes_has_waited_for_its_work(void)
{
    for (CUdevice last = 0; last < 2; last++) {
        first = opened_on(0);
        assert(opened_on(1) == first);
        assert(closed_on(1 - last, first) && fake.mapped == 1 && closed_on(last, first));
        assert(fake.waits_on[0] == 1 && fake.waits_on[1] == 1);
        expect_nothing(first, 1);
    }
}

static void a_close_beside_an_open_that_the_driver_refuses_ends_it(void)
{
    CUdeviceptr at;
    first = opened_on(0);
    fake.meanwhile = close_first;
    fake.refuses = true;
    assert(open_on(1, &at) == (CUresult)REFUSED);
    expect_nothing(first, 1);
}

static void a_close_beside_an_open_leaves_it_open(void)
{
    first = opened_on(0);
    fake.meanwhile = close_first;
    assert(opened_on(1) == first && fake.mapped == 1 && closed(first));
    expect_nothing(first, 1);
}

static void an_open_of_what_ends_with_its_context_maps_it_anew(void)
{
    first = opened_on(0);
    fake.meanwhile = end_first_context;
    const CUdeviceptr again = opened_on(1);
    assert(again != first && !closed(first) && fake.mapped == 1 && *access_at(again) == 2);
    assert(closed(again));
    expect_nothing(again, 2);
}

static void two_opens_on_a_gpu_each_have_the_drivers_answer(void)
{
    first = opened_on(0);
    fake.meanwhile = open_on_second;
    assert(opened_on(1) == first && second == (CUresult)REFUSED && closed(first) && closed(first));
    expect_nothing(first, 1);
}

static void of_two_that_open_it_first_the_later_one_has_access_for_its_gpu(void)
{
    fake.while_imported = open_first_on_second;
    assert(opened_on(0) == first && *access_at(first) == 3 && fake.mapped == 1 && closed(first) && closed(first));
    expect_nothing(first, 1);
}

static void close_once(void)
{
    assert(closed(first));
}

static void of_two_closes_the_last_one_waits(void)
{
    first = opened_on(0);
    assert(opened_on(0) == first);
    fake.while_looked_at = close_once;
    assert(closed(first) && fake.waits == 1);
    expect_nothing(first, 1);
}

int main(void)
{
    set_up();
    what_is_opened_on_two_gpus_is_mapped_until_it_is_closed_as_often();
    what_each_context_closes_has_waited_for_its_work();
    a_close_beside_an_open_that_the_driver_refuses_ends_it();
    a_close_beside_an_open_leaves_it_open();
    an_open_of_what_ends_with_its_context_maps_it_anew();
    two_opens_on_a_gpu_each_have_the_drivers_answer();
    of_two_that_open_it_first_the_later_one_has_access_for_its_gpu();
    of_two_closes_the_last_one_waits();
    puts("ok");
    return 0;
}
