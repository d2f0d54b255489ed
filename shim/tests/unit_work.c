/* unit_work.c - when work and idleness are reported, with the time between them. A part of unit_time. */
#include <assert.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../src/gputime/launching.h"
#include "double.h"

#undef NDEBUG

/* What was reported of work since the last call of this. */
static void count_activity(unsigned *works, unsigned *idles)
{
    struct {
        struct wire_header header;
        struct wire_work report;
    } packet;
    *works = *idles = 0;
    while (recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet) {
        *works += packet.report.what == WIRE_WORK;
        *idles += packet.report.what == WIRE_IDLE;
    }
}

static uint64_t us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void launch_and_wait(CUstream stream)
{
    activity_launch(stream, 0);
    struct activity_before before = activity_sync_begins(stream, 0);
    activity_synced(before);
}

/* A launch and a wait, as fast as it goes: a latency-critical process reports all of it, the others at most once a millisecond. */
void idleness_is_reported_once_a_millisecond(bool urgent)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.time_link.urgent, urgent);
    CUstream stream = (CUstream)0x1000;
    unsigned works = 0, idles = 0, all_works = 0, all_idles = 0, rounds = 0;
    uint64_t began = us();
    while (us() - began < 50000) {
        launch_and_wait(stream);
        rounds++;
        count_activity(&works, &idles);
        all_works += works;
        all_idles += idles;
    }
    uint64_t took_ms = (us() - began) / 1000;
    if (urgent)
        assert(all_works == rounds && all_idles == rounds);
    else
        assert(all_idles >= 2 && all_idles <= took_ms + 1 && all_works <= took_ms + 2);
    if (!urgent && atomic_load(&tangram.hot.work_reported)) { /* what the thread of time_link.c does */
        while (us() - tangram.activity.idle_reported_us < 1000)
            continue;
        assert(activity_report_later() && !activity_work_reported());
        count_activity(&works, &idles);
        assert(works == 0 && idles == 1);
    }
    assert(!activity_report_later());
    activity_launch(stream, 0); /* and work after that is reported at once */
    count_activity(&works, &idles);
    assert(works == 1 && idles == 0);
    activity_forget();
}

void idleness_that_ended_is_not_reported_later(void)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.time_link.urgent, false);
    CUstream stream = (CUstream)0x1000;
    unsigned works, idles;
    launch_and_wait(stream);
    launch_and_wait(stream); /* within the millisecond, mostly */
    activity_launch(stream, 0);
    while (us() - tangram.activity.idle_reported_us < 1000)
        continue;
    count_activity(&works, &idles);
    activity_report_later();
    count_activity(&works, &idles);
    assert(idles == 0 && activity_work_reported());
    activity_forget();
}

/* The arbiter does not read: nothing fits into its socket any more. */
static void fill_up(void)
{
    while (time_link_activity(WIRE_HINT, 1) == TIME_LINK_SENT)
        continue;
}

/* The first that comes after all hints; 0 = nothing. */
static uint32_t first_reported(void)
{
    struct {
        struct wire_header header;
        struct wire_work report;
    } packet;
    while (recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet)
        if (packet.report.what != WIRE_HINT)
            return packet.report.what;
    return 0;
}

static void begin(void)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.time_link.urgent, true);
}

static void end(void)
{
    while (first_reported() != 0)
        continue;
    activity_forget();
}

void work_that_did_not_fit_is_reported_by_the_next_launch(void)
{
    begin();
    fill_up();
    activity_launch((CUstream)0x1000, 0);
    activity_launch((CUstream)0x1000, 0);
    assert(!activity_work_reported() && first_reported() == 0);
    activity_launch((CUstream)0x1000, 0);
    assert(activity_work_reported() && first_reported() == WIRE_WORK && first_reported() == 0);
    assert(activity_report_later()); /* to repeat a report does no harm */
    assert(activity_work_reported() && first_reported() != WIRE_IDLE && !activity_report_later());
    end();
}

void work_that_did_not_fit_is_reported_when_nothing_is_launched(void)
{
    begin();
    fill_up();
    activity_launch((CUstream)0x1000, 0);
    assert(activity_report_later() && !activity_work_reported() && first_reported() == 0);
    assert(activity_report_later() && activity_work_reported() && first_reported() == WIRE_WORK);
    assert(!activity_report_later());
    end();
}

void work_that_did_not_fit_and_has_ended_is_not_reported(void)
{
    begin();
    fill_up();
    launch_and_wait((CUstream)0x1000);
    assert(!activity_work_reported() && first_reported() == 0);
    assert(activity_report_later() && !activity_work_reported() && first_reported() == 0);
    assert(!activity_report_later());
    launch_and_wait((CUstream)0x1000);
    assert(first_reported() == WIRE_WORK && first_reported() == WIRE_IDLE && first_reported() == 0);
    end();
}

void idleness_that_did_not_fit_is_reported_later(bool urgent)
{
    begin();
    atomic_store(&tangram.time_link.urgent, urgent);
    activity_launch((CUstream)0x1000, 0);
    assert(first_reported() == WIRE_WORK);
    fill_up();
    activity_synced(activity_sync_begins((CUstream)0x1000, 0));
    assert(activity_work_reported() && first_reported() == 0);
    assert(activity_report_later() && !activity_work_reported() && first_reported() == WIRE_IDLE);
    assert(!activity_report_later());
    end();
}

void other_work_that_did_not_fit_is_reported_later(void)
{
    static _Atomic uint64_t page[WIRE_PAGE_BYTES / 8];
    begin();
    tangram.link.page = page;
    atomic_store(&page[(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) / 8], WIRE_UNDERSTANDS_STILL);
    activity_launch((CUstream)0x1000, 0);
    assert(first_reported() == WIRE_WORK);
    fill_up();
    activity_other((CUstream)0x1000, 0);
    assert(first_reported() == 0 && activity_report_later() && first_reported() == WIRE_STILL && !activity_report_later());
    tangram.link.page = NULL;
    end();
}

void a_flood_of_hints_displaces_no_work(void)
{
    begin();
    while (activity_announce(WIRE_HINT, 1))
        continue;
    activity_launch((CUstream)0x1000, 0);
    char packet[64];
    assert(!activity_work_reported() && recv(peer, packet, sizeof packet, MSG_DONTWAIT) > 0); /* space for one */
    assert(!activity_announce(WIRE_HINT, 1) && activity_work_reported());
    assert(first_reported() == WIRE_WORK);
    assert(activity_announce(WIRE_HINT, 1));
    end();
}

/* In a time namespace the arbiter's clock differs from ours. */
void a_heartbeat_is_alive_while_its_number_changes(uint64_t first)
{
    static struct wire_gpu_time page;
    begin();
    make_device(CLIENT, DEVICE);
    make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 2);
    atomic_store(&page.off, 1);
    atomic_store(&tangram.hot.page, &page);
    for (uint64_t beat = 0; beat < 4; beat++) {
        atomic_store(&page.beat_ms, first + beat);
        time_link_watch();
        usleep(200000);
    }
    assert(kernel.enables == 0); /* the helper does not resume what the arbiter keeps suspended */
    usleep(500000);
    time_link_watch();
    assert(kernel.enables > 0);
    atomic_store(&tangram.hot.page, NULL);
    capture_report();
    while (next_reported().any)
        continue;
    end();
}

void work_that_is_reported_late_is_marked_late(void)
{
    struct {
        struct wire_header header;
        struct wire_work report;
    } packet;
    begin();
    tangram.time_link.stage = LINK_APART;
    activity_launch((CUstream)0x1000, 0);
    usleep(20000);
    tangram.time_link.stage = LINK_CONNECTED;
    activity_arbiter_is_new();
    assert(recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet && packet.report.what == WIRE_WORK);
    assert(packet.report.value >> WIRE_LATE_SHIFT >= 20000 && (packet.report.value & UINT32_MAX) == WIRE_KERNELS_ONLY);
    activity_arbiter_is_new(); /* no arbiter limited the work while one restarted */
    assert(recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet && packet.report.value >> WIRE_LATE_SHIFT == 0);
    end();
}
