/* unit_copies.c - copies and fills are work as launches are: it is reported before the driver has them, and ends when it has nothing
 * left. A part of unit_time. */
#include <assert.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../src/hooks/hook.h"
#include "../src/gputime/launching.h"
#include "double.h"

#undef NDEBUG

static bool left;     /* has the driver anything in any stream? */
static bool reported; /* was work reported when the driver had its last call? */
static CUresult answer;

static CUresult query(CUstream stream)
{
    (void)stream;
    return left ? (CUresult)600 : CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr at, unsigned char value, size_t bytes)
{
    (void)at, (void)value, (void)bytes;
    reported = activity_work_reported();
    left = answer == CUDA_SUCCESS; /* a fill is not waited for */
    return answer;
}

static CUresult copy(void *to, CUdeviceptr from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    reported = activity_work_reported();
    left = false; /* what is read on the CPU was waited for */
    return answer;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *how, CUstream stream)
{
    (void)how, (void)stream;
    reported = activity_work_reported();
    left = true;
    return answer;
}

static CUresult wait_value(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags)
{
    (void)stream, (void)at, (void)value, (void)flags;
    reported = activity_work_reported();
    left = true;
    return answer;
}

static void begin(void)
{
    fresh();
    activity_forget();
    activity_watch();
    atomic_store(&tangram.time_link.urgent, true);
    atomic_store(&tangram.hot.driver_found, true);
    forget_driver();
    tangram.driver.cuStreamQuery = query;
    tangram.driver.cuMemsetD8_v2 = fill;
    tangram.driver.cuMemcpyDtoH_v2 = copy;
    tangram.driver.cuMemcpyDtoH_v2_ptds = copy;
    tangram.driver.cuMemcpy2DAsync_v2 = copy_2d;
    tangram.driver.cuStreamWaitValue32_v2 = wait_value;
    left = reported = false;
    answer = CUDA_SUCCESS;
}

static void end(void)
{
    forget_driver();
    atomic_store(&tangram.hot.driver_found, false);
    atomic_store(&tangram.time_link.urgent, false);
    activity_forget();
    char packet[1024];
    while (recv(peer, packet, sizeof packet, MSG_DONTWAIT) > 0)
        ;
}

static void a_copy_to_the_cpu_is_reported_and_has_ended_when_it_returns(void)
{
    begin();
    assert(cuMemcpyDtoH_v2(NULL, 0, 1) == CUDA_SUCCESS);
    assert(reported && !activity_work_reported());
    reported = false;
    assert(cuMemcpyDtoH_v2_ptds(NULL, 0, 1) == CUDA_SUCCESS);
    assert(reported && !activity_work_reported());
    end();
}

static _Atomic bool inside, let;

/* As where the driver waits for the GPU by poll: there a thread is cancelled. */
static CUresult slow_copy(void *to, CUdeviceptr from, size_t bytes)
{
    atomic_store(&inside, true);
    while (!atomic_load(&let))
        usleep(1000);
    return copy(to, from, bytes);
}

static void *copies(void *unused)
{
    assert(cuMemcpyDtoH_v2(NULL, 0, 1) == CUDA_SUCCESS);
    pthread_testcancel();
    return unused;
}

static void a_thread_that_is_cancelled_in_a_copy_does_not_count_as_work_for_ever(void)
{
    pthread_t thread;
    void *ended = NULL;
    begin();
    tangram.driver.cuMemcpyDtoH_v2 = slow_copy;
    atomic_store(&inside, false);
    atomic_store(&let, false);
    assert(pthread_create(&thread, NULL, copies, NULL) == 0);
    for (unsigned ms = 0; !atomic_load(&inside); ms++)
        assert(ms < 2000 && usleep(1000) == 0);
    assert(atomic_load(&tangram.activity.waiting) == 1 && pthread_cancel(thread) == 0);
    atomic_store(&let, true);
    assert(pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED);
    assert(atomic_load(&tangram.activity.waiting) == 0 && !activity_work_reported());
    end();
}

static void a_fill_that_is_not_waited_for_is_work_until_the_driver_is_done(void)
{
    begin();
    assert(cuMemsetD8_v2(0, 0, 1) == CUDA_SUCCESS);
    assert(reported && activity_work_reported());
    assert(cuMemcpyDtoH_v2(NULL, 0, 1) == CUDA_SUCCESS);
    assert(!activity_work_reported());
    end();
}

static void what_the_driver_refuses_is_no_work(void)
{
    begin();
    answer = (CUresult)1;
    assert(cuMemsetD8_v2(0, 0, 1) == (CUresult)1);
    assert(reported && !activity_work_reported());
    end();
}

static void copies_and_waits_in_a_stream_are_reported(void)
{
    begin();
    assert(cuMemcpy2DAsync_v2(NULL, (CUstream)0x1000) == CUDA_SUCCESS);
    assert(reported && activity_work_reported());
    left = reported = false;
    activity_something_synced();
    assert(!activity_work_reported());
    assert(cuStreamWaitValue32_v2((CUstream)0x1000, 0, 1, 0) == CUDA_SUCCESS);
    assert(reported && activity_work_reported());
    end();
}

/* What was reported last since the last call of this, and how often anything was reported. */
static struct wire_work last_reported(unsigned *times)
{
    struct {
        struct wire_header header;
        struct wire_work report;
    } packet;
    struct wire_work last = {.what = 0};
    for (*times = 0; recv(peer, &packet, sizeof packet, MSG_DONTWAIT) == (ssize_t)sizeof packet; ++*times)
        last = packet.report;
    return last;
}

/* The arbiter may treat work as done that the driver's count does not show, but that count has only kernels. */
static void work_reports_whether_there_is_more_than_kernels(void)
{
    static struct {
        char before[WIRE_GPU_TIME_AT];
        struct wire_gpu_time gpu_time;
    } page = {.gpu_time = {.features = WIRE_UNDERSTANDS_STILL}};
    unsigned times;
    begin();
    atomic_store(&tangram.link.page, (const _Atomic uint64_t *)(const void *)&page);
    activity_launch((CUstream)0x1000, 0);
    struct wire_work report = last_reported(&times);
    assert(times == 1 && report.what == WIRE_WORK && report.value == WIRE_KERNELS_ONLY);
    assert(cuStreamWaitValue32_v2((CUstream)0x1000, 0, 1, 0) == CUDA_SUCCESS);
    report = last_reported(&times);
    assert(times == 1 && report.what == WIRE_STILL && report.value == 0);
    assert(cuMemcpy2DAsync_v2(NULL, (CUstream)0x1000) == CUDA_SUCCESS);
    last_reported(&times);
    assert(times == 0);
    left = false;
    activity_something_synced();
    assert(!activity_work_reported());
    last_reported(&times);
    assert(cuMemcpy2DAsync_v2(NULL, (CUstream)0x1000) == CUDA_SUCCESS);
    report = last_reported(&times);
    assert(times == 1 && report.what == WIRE_WORK && report.value == 0);
    left = false;
    activity_something_synced();
    last_reported(&times);
    activity_launch((CUstream)0x1000, 0);
    assert(last_reported(&times).value == WIRE_KERNELS_ONLY);
    atomic_store(&tangram.link.page, NULL);
    end();
}

static CUresult open_event(CUevent *event, CUipcEventHandle handle)
{
    (void)event, (void)handle;
    return CUDA_SUCCESS;
}

static void kernels_behind_another_process_are_never_taken_for_done(void)
{
    unsigned times;
    begin();
    tangram.driver.cuIpcOpenEventHandle = open_event;
    assert(cuIpcOpenEventHandle(NULL, (CUipcEventHandle){{0}}) == CUDA_SUCCESS);
    activity_launch((CUstream)0x1000, 0);
    struct wire_work report = last_reported(&times);
    assert(report.what == WIRE_WORK && report.value == 0);
    end();
}

void copies_are_work(void)
{
    work_reports_whether_there_is_more_than_kernels();
    kernels_behind_another_process_are_never_taken_for_done();
    a_copy_to_the_cpu_is_reported_and_has_ended_when_it_returns();
    a_thread_that_is_cancelled_in_a_copy_does_not_count_as_work_for_ever();
    a_fill_that_is_not_waited_for_is_work_until_the_driver_is_done();
    what_the_driver_refuses_is_no_work();
    copies_and_waits_in_a_stream_are_reported();
}
