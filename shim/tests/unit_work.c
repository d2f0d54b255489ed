/* unit_work.c - when work and idleness are told, with the time between them. A part of unit_time. */
#include <assert.h>
#include <sys/socket.h>
#include <time.h>

#include "../src/launching.h"
#include "double.h"

#undef NDEBUG

/* What was told of work since this was asked last. */
static void count_activity(unsigned *works, unsigned *idles)
{
    struct {
        struct wire_header header;
        struct wire_activity_said said;
    } packet;
    *works = *idles = 0;
    while (recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet) {
        *works += packet.said.what == WIRE_WORK;
        *idles += packet.said.what == WIRE_IDLE;
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

/* A launch and a wait, as fast as it goes: who is latency-critical says all of it, the others at most once a millisecond. */
void idleness_is_told_once_a_millisecond(bool urgent)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.turn.urgent, urgent);
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
    if (!urgent && atomic_load(&tangram.hot.told)) { /* what the thread of turn.c does */
        while (us() - tangram.activity.idle_told_us < 1000)
            continue;
        assert(activity_tell_later() && !activity_is_told());
        count_activity(&works, &idles);
        assert(works == 0 && idles == 1);
    }
    assert(!activity_tell_later());
    activity_launch(stream, 0); /* and work after that is told at once */
    count_activity(&works, &idles);
    assert(works == 1 && idles == 0);
    activity_forget();
}

void idleness_that_ended_is_not_told_later(void)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.turn.urgent, false);
    CUstream stream = (CUstream)0x1000;
    unsigned works, idles;
    launch_and_wait(stream);
    launch_and_wait(stream); /* within the millisecond, mostly */
    activity_launch(stream, 0);
    while (us() - tangram.activity.idle_told_us < 1000)
        continue;
    count_activity(&works, &idles);
    activity_tell_later();
    count_activity(&works, &idles);
    assert(idles == 0 && activity_is_told());
    activity_forget();
}
