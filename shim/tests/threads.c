/* threads.c - threads, signals and cancellation in the middle of leases. `threads CASE` prints codes, one line.
 *
 * CASE      what happens, in a container of 1000 MiB
 * start     16 threads start CUDA at the same moment and take 10 MiB each
 * tiny      16 threads with the smallest stack there is take and give back
 * signals   a signal every 500 us, without SA_RESTART, while 4 threads contend with a rival process for the same memory
 * cancel    threads are cancelled while they contend; then the rival goes, and the main thread takes 900 MiB
 * reload    libcuda is opened, used and closed again and again
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"

enum { THREADS = 16, CONTENDERS = 4, OUR_MIB = 200, RIVAL_MIB = 600, MOST_MIB = 900, LEASES = 300 };

static pthread_barrier_t together;
static atomic_uint signals;
static CUcontext shared;

static void *starts(void *unused)
{
    (void)unused;
    pthread_barrier_wait(&together);
    return (void *)(intptr_t)gpu_hold(10);
}

static void *churns_small(void *unused)
{
    (void)unused;
    p_cuCtxSetCurrent(shared);
    return (void *)(intptr_t)gpu_churn(200, 1);
}

/* Allocates and frees what a sibling wants too, so that it requests from the arbiter again and again. A refusal is no error. */
static int contend(size_t mib)
{
    int code = gpu_churn(1, mib);
    return code == CUDA_ERROR_OUT_OF_MEMORY ? 0 : code;
}

static void *contends(void *unused)
{
    (void)unused;
    intptr_t code = 0;
    p_cuCtxSetCurrent(shared);
    for (unsigned i = 0; i < LEASES && code == 0; i++)
        code = contend(OUR_MIB);
    return (void *)code;
}

static void *contends_for_ever(void *unused)
{
    (void)unused;
    p_cuCtxSetCurrent(shared);
    for (;;) {
        contend(OUR_MIB);
        pthread_testcancel();
    }
    return NULL;
}

/* Before CUDA is up in this process: a fork after that is no use. */
static pid_t start_rival(void)
{
    pid_t child = fork();
    if (child != 0)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int code = (int)gpu_begin(); code == 0;)
        code = contend(RIVAL_MIB);
    _exit(1);
}

static void end_rival(pid_t rival)
{
    kill(rival, SIGKILL);
    waitpid(rival, NULL, 0);
}

static int worst(pthread_t *thread, unsigned count)
{
    intptr_t worst = 0;
    for (unsigned i = 0; i < count; i++) {
        void *code;
        pthread_join(thread[i], &code);
        if ((intptr_t)code != 0)
            worst = (intptr_t)code;
    }
    return (int)worst;
}

static void on_alarm(int number)
{
    (void)number;
    atomic_fetch_add(&signals, 1);
    errno = ENOTTY; /* a handler that spoils errno */
}

static int begin(void)
{
    CUresult rc = gpu_begin();
    return (int)(rc == CUDA_SUCCESS ? p_cuDevicePrimaryCtxRetain(&shared, 0) : rc);
}

static void start(void)
{
    pthread_t thread[THREADS];
    pthread_barrier_init(&together, NULL, THREADS);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, starts, NULL);
    printf("%d\n", worst(thread, THREADS));
}

static void tiny(void)
{
    pthread_t thread[THREADS];
    pthread_attr_t small;
    int code = begin();
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, (size_t)sysconf(_SC_THREAD_STACK_MIN));
    for (unsigned i = 0; i < THREADS; i++)
        pthread_create(&thread[i], &small, churns_small, NULL);
    printf("%d %d\n", code, worst(thread, THREADS));
}

static void signals_all_the_time(void)
{
    pthread_t thread[CONTENDERS];
    pid_t rival = start_rival();
    struct sigaction action;
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    int code = begin();
    for (unsigned i = 0; i < CONTENDERS; i++)
        pthread_create(&thread[i], NULL, contends, NULL);
    int threads = worst(thread, CONTENDERS);
    while (atomic_load(&signals) < 100)
        pause();
    setitimer(ITIMER_REAL, &never, NULL);
    end_rival(rival);
    printf("%d %d\n", code, threads);
}

static void cancel(void)
{
    pthread_t thread[CONTENDERS];
    pid_t rival = start_rival();
    int code = begin();
    for (unsigned round = 0; round < 50; round++) {
        for (unsigned i = 0; i < CONTENDERS; i++)
            pthread_create(&thread[i], NULL, contends_for_ever, NULL);
        struct timespec moment = {0, (long)(round % 10) * 500000};
        nanosleep(&moment, NULL);
        for (unsigned i = 0; i < CONTENDERS; i++)
            pthread_cancel(thread[i]);
        for (unsigned i = 0; i < CONTENDERS; i++)
            pthread_join(thread[i], NULL);
    }
    end_rival(rival);
    printf("%d %d\n", code, gpu_churn(10, MOST_MIB));
}

static void reload(void)
{
    int code = begin();
    for (unsigned i = 0; i < 200 && code == 0; i++) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        void *at = library ? dlsym(library, "cuMemAlloc_v2") : NULL;
        memcpy(&p_cuMemAlloc_v2, &at, sizeof at);
        code = at == NULL ? -1 : gpu_churn(1, 1);
        dlclose(library);
    }
    printf("%d %d\n", code, (int)gpu_take(2000));
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    take_routes();
    if (strcmp(what, "start") == 0)
        start();
    else if (strcmp(what, "tiny") == 0)
        tiny();
    else if (strcmp(what, "signals") == 0)
        signals_all_the_time();
    else if (strcmp(what, "cancel") == 0)
        cancel();
    else if (strcmp(what, "reload") == 0)
        reload();
    else
        return 64;
    return 0;
}
