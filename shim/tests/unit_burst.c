/* unit_burst.c - the connection for bursts: random orders and random bytes against an obvious model of the blocks' states, with a driver that
 * fails at random.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. The driver is a few functions of this file, the arbiter the other
 * end of a pair of sockets. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../src/hooks/hook.h"
#include "../src/memory/memory.h"

#undef NDEBUG

enum { REGIONS = 90, ROUNDS = 20000, REFUSED = 999 };

static struct {
    uint64_t next, seed;
    unsigned blocks;  /* handles that there are */
    unsigned fails;   /* one call in so many; 0 = none */
    unsigned exports; /* so many more succeed */
} fake = {.next = UINT64_C(0x7f0000000000), .seed = 1, .exports = UINT32_MAX};

static uint32_t draw(uint32_t below)
{
    fake.seed = fake.seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(fake.seed >> 33) % below;
}

static CUresult step(void)
{
    return fake.fails > 0 && draw(fake.fails) == 0 ? (CUresult)REFUSED : CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    (void)bytes, (void)prop, (void)flags;
    if (step() != CUDA_SUCCESS)
        return (CUresult)REFUSED;
    *handle = ++fake.next;
    fake.blocks++;
    return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle)
{
    (void)handle;
    fake.blocks--;
    return CUDA_SUCCESS;
}
static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)at, (void)bytes, (void)offset, (void)handle, (void)flags;
    return step();
}
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    return step();
}
static CUresult give_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    (void)at, (void)bytes, (void)access, (void)count;
    return CUDA_SUCCESS;
}
static CUresult reserve_addresses(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)alignment, (void)wish, (void)flags;
    *at = fake.next += 1 << 30;
    fake.next += bytes;
    return CUDA_SUCCESS;
}
static CUresult export(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags)
{
    (void)handle, (void)type, (void)flags;
    if (fake.exports == 0 || step() != CUDA_SUCCESS)
        return (CUresult)REFUSED;
    fake.exports--;
    *(int *)out = (int)syscall(SYS_memfd_create, "block", 0u);
    return CUDA_SUCCESS;
}
static CUresult exchange(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

/* The arbiter's end. */

static int arbiter;
static struct gpu *gpu;

static struct answer {
    struct wire_header header;
    union {
        struct wire_blocks blocks;
        struct wire_ids ids;
        struct wire_unable unable;
        struct wire_swappable swappable;
    } body;
    unsigned fds;
} answer;

static bool receive(void)
{
    union {
        struct cmsghdr align;
        char buffer[CMSG_SPACE((WIRE_BLOCKS_LIMIT + 1) * sizeof(int))];
    } control;
    struct iovec part = {&answer, sizeof answer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(arbiter, &message, MSG_DONTWAIT) <= 0)
        return false;
    const struct cmsghdr *passed = CMSG_FIRSTHDR(&message);
    answer.fds = passed != NULL ? (unsigned)((passed->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
    for (unsigned i = 0; i < answer.fds; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(passed) + i * sizeof fd, sizeof fd);
        close(fd);
    }
    return true;
}

static void connect_again(void)
{
    int pair[2];
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    arbiter = pair[1];
    assert(wire_own(&tangram.burst_link.end, pair[0]));
    tangram.burst_link.stage = LINK_CONNECTED;
    tangram.burst_link.gpus = 2;
    tangram.burst_link.gpu[0] = gpu; /* the second one is not the grant's */
}

static bool is_over(void)
{
    if (tangram.burst_link.stage == LINK_CONNECTED)
        return false;
    while (receive())
        ;
    close(arbiter);
    connect_again();
    return true;
}

static void put(enum wire_type type, uint32_t seq, const void *body, size_t bytes)
{
    struct {
        struct wire_header header;
        char body[4096];
    } packet = {.header = {WIRE_MAGIC, WIRE_VERSION, (uint16_t)type, seq, (uint32_t)bytes}};
    memcpy(packet.body, body, bytes);
    assert(send(arbiter, &packet, sizeof packet.header + bytes, 0) == (ssize_t)(sizeof packet.header + bytes));
    burst_link_read();
}

/* The model. */

static enum block_state state[REGIONS];
static uint64_t ids[REGIONS];

static unsigned count_of(enum block_state wanted)
{
    unsigned count = 0;
    for (unsigned i = 0; i < REGIONS; i++)
        count += state[i] == wanted;
    return count;
}

static unsigned place(uint64_t id)
{
    unsigned i = 0;
    while (i < REGIONS && ids[i] != id)
        i++;
    return i;
}

static void stay(void)
{
    for (unsigned i = 0; i < REGIONS; i++)
        state[i] = state[i] == BLOCK_CHOSEN ? BLOCK_RESIDENT : state[i];
}

static void check(void)
{
    for (unsigned i = 0; i < REGIONS; i++) {
        enum block_state found;
        uint64_t bytes;
        assert(elastic_look(gpu, ids[i], &found, &bytes) && bytes == PAGE && found == state[i]);
    }
    assert(atomic_load(&tangram.hot.swapped) == (count_of(BLOCK_RESIDENT) < REGIONS));
    assert(fake.blocks == REGIONS - count_of(BLOCK_AWAY));
    assert(elastic_totals(gpu).away == (uint64_t)(count_of(BLOCK_AWAY) + count_of(BLOCK_MADE)) * PAGE && elastic_totals(gpu).bytes == REGIONS * PAGE);
}

static bool good_list(const struct wire_ids *list, enum block_state one, enum block_state other)
{
    bool good = list->count >= 1 && list->count <= WIRE_BLOCKS_LIMIT;
    for (unsigned i = 0; good && i < list->count; i++) {
        const unsigned at = place(list->id[i]);
        good = at < REGIONS && (state[at] == one || state[at] == other);
        for (unsigned j = 0; j < i; j++)
            good = good && list->id[i] != list->id[j];
    }
    return good;
}

/* Mostly of blocks in that state, which are different ones then. */
static struct wire_ids some(enum block_state wanted)
{
    struct wire_ids list = {.gpu = draw(50) == 0, .count = draw(8) == 0 ? draw(70) : 1 + draw(5)};
    const unsigned first = draw(REGIONS);
    unsigned at = 0;
    for (unsigned i = 0; i < REGIONS && at < list.count && at < WIRE_BLOCKS_LIMIT; i++)
        if (state[(first + i) % REGIONS] == wanted || draw(400) == 0)
            list.id[at++] = draw(300) == 0 ? draw(1000) : ids[(first + i) % REGIONS];
    return list;
}

static void expect_unable(uint32_t seq, enum wire_unable_reason one, enum wire_unable_reason other)
{
    assert(receive() && answer.header.type == WIRE_UNABLE && answer.header.seq == seq && answer.fds == 0);
    assert(answer.body.unable.reason == (uint32_t)one || answer.body.unable.reason == (uint32_t)other);
}

static void swap_out(uint32_t seq)
{
    struct wire_amount in = {.gpu = draw(50) == 0, .bytes = draw(4) == 0 ? UINT64_MAX : draw(200) * MIB};
    put(WIRE_SWAP_OUT, seq, &in, sizeof in);
    if (in.gpu != 0) {
        expect_unable(seq, WIRE_NO_ELASTIC_MEMORY, WIRE_NO_ELASTIC_MEMORY);
        return;
    }
    stay();
    bool more = true;
    while (more && receive()) {
        if (answer.header.type == WIRE_UNABLE) {
            assert(count_of(BLOCK_CHOSEN) == 0 && (answer.body.unable.reason != WIRE_NO_ELASTIC_MEMORY || in.bytes == 0 || count_of(BLOCK_RESIDENT) == 0));
            return;
        }
        const unsigned count = answer.body.blocks.count & ~WIRE_MORE_BLOCKS;
        more = (answer.body.blocks.count & WIRE_MORE_BLOCKS) != 0;
        assert(answer.header.type == WIRE_BLOCKS && answer.header.seq == seq && answer.fds == count && count >= 1 && count <= WIRE_BLOCKS_LIMIT);
        for (unsigned i = 0; i < count; i++) {
            assert(answer.body.blocks.block[i].bytes == PAGE && state[place(answer.body.blocks.block[i].id)] == BLOCK_RESIDENT);
            state[place(answer.body.blocks.block[i].id)] = BLOCK_CHOSEN;
        }
    }
    assert(!more && (fake.fails > 0 || count_of(BLOCK_RESIDENT) == 0 || count_of(BLOCK_CHOSEN) * PAGE >= in.bytes));
}

static void unmap_order(uint32_t seq)
{
    const struct wire_ids in = some(BLOCK_CHOSEN);
    const bool good = good_list(&in, BLOCK_CHOSEN, BLOCK_CHOSEN);
    put(WIRE_UNMAP, seq, &in, sizeof in);
    if (in.gpu != 0 || !good) {
        expect_unable(seq, in.gpu != 0 ? WIRE_NO_ELASTIC_MEMORY : WIRE_UNKNOWN_BLOCK, WIRE_UNKNOWN_BLOCK);
        return;
    }
    assert(receive() && answer.header.seq == seq);
    if (answer.header.type == WIRE_UNABLE)
        return;
    assert(answer.header.type == WIRE_UNMAPPED && answer.body.ids.count >= 1 && answer.body.ids.count <= in.count);
    for (unsigned i = 0; i < answer.body.ids.count; i++)
        state[place(answer.body.ids.id[i])] = BLOCK_AWAY;
}

/* A block that was made, could not be exported, and that the driver did not unmap then: the next SWAP_IN exports it. */
static void left_made(uint64_t id)
{
    enum block_state found;
    uint64_t bytes;
    assert(elastic_look(gpu, id, &found, &bytes));
    if (fake.fails > 0 && state[place(id)] == BLOCK_AWAY && found == BLOCK_MADE)
        state[place(id)] = BLOCK_MADE;
}

static void swap_in(uint32_t seq)
{
    const struct wire_ids in = some(draw(3) == 0 ? BLOCK_MADE : BLOCK_AWAY);
    const bool good = good_list(&in, BLOCK_AWAY, BLOCK_MADE);
    put(WIRE_SWAP_IN, seq, &in, sizeof in);
    if (in.gpu != 0 || !good) {
        expect_unable(seq, in.gpu != 0 ? WIRE_NO_ELASTIC_MEMORY : WIRE_UNKNOWN_BLOCK, WIRE_UNKNOWN_BLOCK);
        return;
    }
    assert(receive() && answer.header.seq == seq);
    const unsigned count = answer.header.type == WIRE_UNABLE ? 0 : answer.body.blocks.count;
    assert(answer.header.type == WIRE_UNABLE || (answer.header.type == WIRE_BLOCKS && count >= 1 && count <= in.count));
    assert(answer.fds == count);
    for (unsigned i = 0; i < count; i++) {
        assert(answer.body.blocks.block[i].id == in.id[i]);
        state[place(in.id[i])] = BLOCK_MADE;
    }
    if (count < in.count)
        left_made(in.id[count]);
}

static void filled(void)
{
    const struct wire_ids in = some(BLOCK_MADE);
    const bool good = in.gpu == 0 && good_list(&in, BLOCK_MADE, BLOCK_RESIDENT);
    put(WIRE_FILLED, 0, &in, sizeof in);
    for (unsigned i = 0; good && i < in.count; i++)
        state[place(in.id[i])] = BLOCK_RESIDENT;
    if (!good)
        stay();
    assert(is_over() == !good);
}

static void garbage(void)
{
    char body[600];
    const size_t bytes = draw(sizeof body);
    for (size_t i = 0; i < bytes; i++)
        body[i] = (char)draw(256);
    body[0] = body[1] = body[2] = body[3] = 0;
    const enum wire_type type = (enum wire_type)draw(30);
    if (bytes < 4 || (type >= WIRE_BURST && type != WIRE_SWAPPABLE && type != WIRE_BLOCKS && type != WIRE_UNMAPPED && type < WIRE_UNABLE))
        return; /* well-formed ones are above */
    put(type, 0, body, bytes);
    stay();
    assert(is_over());
}

static void burst(void)
{
    struct wire_burst in = {.gpu = draw(4) == 0 ? draw(4) : 0, .guarantee_bytes = draw(10) * MIB, .limit_bytes = draw(20) * MIB};
    const bool good = in.gpu < 2 && in.limit_bytes >= in.guarantee_bytes;
    put(WIRE_BURST, 0, &in, sizeof in);
    assert(is_over() == !good);
    if (!good)
        stay();
    else if (in.gpu == 0)
        assert(atomic_load(&gpu->limit_bytes) == in.limit_bytes && lease_limit_bytes(gpu, WIRE_RESIDENT) == in.guarantee_bytes &&
               burst_is_allowed(gpu) == (in.limit_bytes > in.guarantee_bytes));
}

static void one_round(uint32_t seq)
{
    const struct wire_gpu_only cancel = {0};
    switch (draw(12)) {
    case 0: case 1:
        swap_out(seq);
        break;
    case 2: case 3: case 4:
        unmap_order(seq);
        break;
    case 5: case 6: case 7:
        swap_in(seq);
        break;
    case 8: case 9:
        filled();
        break;
    case 10:
        put(WIRE_CANCEL, seq, &cancel, sizeof cancel);
        stay();
        break;
    default:
        if (draw(2) == 0)
            garbage();
        else
            burst();
    }
    assert(!receive());
}

static void set_up(void)
{
    pthread_condattr_t clock;
    gpu = &tangram.grant.gpu[0];
    tangram.grant.gpus = 1;
    process_check();
    pthread_condattr_init(&clock);
    pthread_cond_init(&tangram.link.changed, &clock);
    tangram.driver.cuMemCreate = create;
    tangram.driver.cuMemRelease = release;
    tangram.driver.cuMemMap = map;
    tangram.driver.cuMemUnmap = unmap;
    tangram.driver.cuMemSetAccess = give_access;
    tangram.driver.cuMemAddressReserve = reserve_addresses;
    tangram.driver.cuMemExportToShareableHandle = export;
    tangram.driver.cuThreadExchangeStreamCaptureMode = exchange;
    for (unsigned i = 0; i < REGIONS; i++) {
        CUresult rc;
        struct elastic_region *region = region_new(gpu, 0, NULL, PAGE, REGION_SMALL, &rc);
        assert(region != NULL && region_list(region));
        region->live = 1;
        ids[i] = region->block[0].id;
    }
    connect_again();
}

static void *exports(void *region)
{
    CUipcMemHandle handle;
    const CUdeviceptr at = ((struct elastic_region *)region)->base;
    assert(ipc_get(&handle, at) == CUDA_ERROR_INVALID_VALUE); /* this arbiter converts no lease */
    return NULL;
}

/* So the arbiter brings it back, also to a program that launches nothing. A thread that is cancelled meanwhile leaves nothing locked. */
static void an_export_of_memory_that_is_away_reports_work(void)
{
    static _Alignas(8) char page[WIRE_PAGE_BYTES];
    struct elastic_region *region = block_of(ids[0])->region;
    struct elastic_choice chosen;
    pthread_t thread;
    int pair[2];
    for (unsigned i = 1; i < REGIONS; i++)
        block_of(ids[i])->region->live = 0;
    region->first->state = RANGE_LIVE;
    region->first->requested = PAGE;
    *region_start(region, region->base) = region->first;
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0 && wire_own(&tangram.link.end, pair[0]));
    atomic_store(&tangram.link.page, (_Atomic uint64_t *)(void *)page);
    atomic_store(&((struct wire_gpu_time *)(void *)(page + WIRE_GPU_TIME_AT))->features, WIRE_UNDERSTANDS_OPEN);
    tangram.link.stage = LINK_CONNECTED;
    tangram.link.threaded = true;
    assert(elastic_choose(gpu, PAGE, &chosen, 1) == 1 && chosen.id == ids[0] && elastic_unmap(ids[0]));
    assert(pthread_create(&thread, NULL, exports, region) == 0);
    for (unsigned ms = 0; atomic_load(&tangram.activity.waiting) == 0; ms++)
        assert(ms < 2000 && usleep(1000) == 0);
    assert(pthread_cancel(thread) == 0 && elastic_make(ids[0]) && elastic_filled(ids[0]));
    close(pair[1]);
    assert(pthread_join(thread, NULL) == 0 && pthread_mutex_trylock(&tangram.passing.exporting) == 0);
    assert(atomic_load(&tangram.activity.waiting) == 0 && region->ipc.exporting == 0 && !region->ipc.resident);
}

static _Atomic unsigned freed; /* ranges of addresses */

static CUresult free_addresses(CUdeviceptr at, size_t bytes)
{
    (void)at, (void)bytes;
    atomic_fetch_add(&freed, 1);
    return CUDA_SUCCESS;
}

/* The program should not do that. The thread that exports it has the region still. */
static void what_is_freed_while_it_is_exported_is_released_afterwards(void)
{
    struct elastic_region *region = block_of(ids[0])->region;
    const unsigned blocks = fake.blocks;
    tangram.driver.cuMemAddressFree = free_addresses;
    region->ipc.exporting = 1;
    region->first->state = RANGE_LEAVING;
    elastic_gone(region->base);
    assert(elastic_trim(gpu, PAGE) == 0 && fake.blocks == blocks);
    block_move(&region->block[0], BLOCK_AWAY);
    region->ipc.exporting = 0;
    ipc_release_ended();
    assert(fake.blocks == blocks);
    block_move(&region->block[0], BLOCK_RESIDENT);
    ipc_release_ended();
    assert(fake.blocks == blocks - 1 && block_of(ids[0]) == NULL);
}

static unsigned open_descriptors(void)
{
    unsigned count = 0;
    for (int fd = 0; fd < 256; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* One block, away, without a request. */
static void *discard_one(void *unused)
{
    CUresult rc;
    uint64_t id;
    struct elastic_region *region = region_new(gpu, 0, NULL, PAGE, REGION_SMALL, &rc);
    assert(region != NULL && region_list(region));
    kept_add(region);
    region->rested = true;
    release(region->block[0].handle);
    block_move(&region->block[0], BLOCK_AWAY);
    discard_begin();
    assert(discard_next(gpu, &id, 1) == 1);
    discard_answered(&id, 1);
    return unused;
}

/* An allocation of another thread would take it: memory on the GPU that the arbiter counts as away until it is returned. Nothing is returned meanwhile. */
static void the_lease_of_what_is_discarded_is_never_unused(void)
{
    struct {
        struct wire_header header;
        struct wire_amount back;
    } packet;
    pthread_t thread;
    int pair[2];
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0 && wire_own(&tangram.link.end, pair[0]));
    atomic_store(&gpu->elastic_leased_bytes, PAGE);
    atomic_store(&gpu->elastic_unused_bytes, 0);
    atomic_store(&freed, 0);
    pthread_mutex_lock(&tangram.link.lock);
    assert(pthread_create(&thread, NULL, discard_one, NULL) == 0);
    for (unsigned ms = 0; atomic_load(&freed) == 0; ms++)
        assert(ms < 2000 && usleep(1000) == 0);
    for (unsigned ms = 0; ms < 50; ms++)
        assert(atomic_load(&gpu->elastic_unused_bytes) == 0 && usleep(1000) == 0);
    pthread_mutex_unlock(&tangram.link.lock);
    assert(pthread_join(thread, NULL) == 0 && recv(pair[1], &packet, sizeof packet, MSG_DONTWAIT) == sizeof packet);
    assert(packet.header.type == WIRE_RETURN && packet.back.kind == WIRE_ELASTIC && packet.back.bytes == PAGE);
    assert(atomic_load(&gpu->elastic_leased_bytes) == 0 && atomic_load(&gpu->discarding_bytes) == 0);
    close(pair[1]);
    discard_one(NULL);
    assert(atomic_load(&gpu->elastic_unused_bytes) == PAGE); /* without an arbiter */
}

/* What is being discarded is the parent's: a child that counted it as free would wait for it at each request that is refused. */
static void a_child_discards_nothing(void)
{
    int status = -1;
    atomic_store(&gpu->discarding_bytes, 2 * MIB);
    const pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        process_check();
        _exit(atomic_load(&gpu->discarding_bytes) == 0 && !discard_wait(gpu) ? 0 : 1);
    }
    assert(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
    set_up();
    const unsigned before = open_descriptors();
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        fake.fails = round % 2000 < 1000 ? 0 : 15;
        fake.exports = fake.fails > 0 && draw(4) == 0 ? draw(80) : UINT32_MAX;
        one_round(round);
        check();
    }
    assert(open_descriptors() == before);
    fake.fails = 0;
    for (unsigned i = 0; i < REGIONS; i++)
        if (!elastic_stay_block(ids[i]) && (elastic_make(ids[i]) || state[i] == BLOCK_MADE))
            elastic_filled(ids[i]);
    an_export_of_memory_that_is_away_reports_work();
    what_is_freed_while_it_is_exported_is_released_afterwards();
    the_lease_of_what_is_discarded_is_never_unused();
    a_child_discards_nothing();
    puts("ok");
    return 0;
}
