/* peers.c - what a process does to its connections, and what its threads go through. `peers CASE` prints numbers, one line.
 *
 * CASE      what happens, in a container of 1000 MiB
 * reused    takes 10 MiB, closes the numbers that go to the arbiter, is given them again for sockets of its own, with a byte waiting on each;
 *           takes 500 MiB twice more. The codes, how many packets came to those sockets, how many of the bytes are still there
 * rawfork   takes 10 MiB; a child by the bare system call, which runs no handlers, takes 600 MiB and ends; then the parent takes 300. The codes
 * early     the same, but the parent has only initialised the driver: the arbiter's WELCOME is on its way
 * launches  threads that launch and wait are cancelled, again and again, while two others wait; then the main thread launches and waits: the codes
 * storm     while threads launch, take and give back, the main thread forks, and every child launches and requests memory; then it takes 900 MiB, and 300 more. The
 *           codes; and how many of the children did not end as they should
 * threads   takes 10 MiB; prints the code and how many helper threads there are
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"

#ifdef BIG_TLS /* more thread-local memory than fits into the stack of a small thread */
static _Thread_local volatile char big[8 << 20];
#endif

enum { MOST = 8, THREADS = 4, WAITERS = 2, ROUNDS = 60, FORKS = 300 };

static bool goes_to_arbiter(int fd)
{
    struct sockaddr_un peer = {.sun_family = AF_UNSPEC};
    socklen_t length = sizeof peer - 1;
    return getpeername(fd, (struct sockaddr *)&peer, &length) == 0 && strstr(peer.sun_path, "arbiter.sock") != NULL;
}

static int connections(int fds[MOST])
{
    int count = 0;
    for (int fd = 0; fd < 256 && count < MOST; fd++)
        if (goes_to_arbiter(fd))
            fds[count++] = fd;
    return count;
}

static void pause_ms(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static void reused(void)
{
    int fd[MOST], other[MOST], pair[2], packets = 0, bytes = 0;
    char byte = 'x';
    int before = gpu_hold(10), count = connections(fd);
    for (int i = 0; i < count; i++) {
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, pair) != 0 || dup2(pair[0], fd[i]) != fd[i])
            return;
        close(pair[0]);
        other[i] = pair[1];
        if (write(other[i], &byte, 1) != 1)
            return;
    }
    int first = (int)gpu_take(400), second = (int)gpu_take(400);
    pause_ms(1500); /* a report once a second would have come by now */
    for (int i = 0; i < count; i++) {
        char buffer[512];
        packets += recv(other[i], buffer, sizeof buffer, MSG_DONTWAIT) > 0;
        bytes += recv(fd[i], buffer, sizeof buffer, MSG_DONTWAIT) == 1;
    }
    printf("%d %d %d %d %d\n", before, first, second, packets, count - bytes);
}

/* The code of a child's calls after a fork without handlers. */
static int in_bare_child(int (*does)(void))
{
    int status = 0;
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        syscall(SYS_exit_group, does());
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int takes_600(void)
{
    return (int)gpu_take(600);
}

static int has_600(void)
{
    return gpu_hold(600);
}

static void rawfork(void)
{
    int before = gpu_hold(10), child = in_bare_child(takes_600);
    printf("%d %d %d\n", before, child, (int)gpu_take(300));
}

static void rawfork_early(void)
{
    int before = (int)p_cuInit(0), child = in_bare_child(has_600);
    printf("%d %d %d\n", before, child, gpu_hold(300));
}

static CUcontext shared;
static CUfunction kernel;

static atomic_bool enough;

static CUresult launch(void)
{
    return p_cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void *launches(void *unused)
{
    (void)unused;
    p_cuCtxSetCurrent(shared);
    while (!atomic_load(&enough)) {
        launch();
        p_cuCtxSynchronize();
        pthread_testcancel(); /* where nothing in between may be */
    }
    return NULL;
}

static void *waits(void *unused)
{
    intptr_t code = 0;
    (void)unused;
    p_cuCtxSetCurrent(shared);
    while (code == 0 && !atomic_load(&enough))
        code = (intptr_t)p_cuCtxSynchronize();
    return (void *)code;
}

static int begin_with_kernel(void)
{
    static const char image[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry k() { ret; }\n//fake k us=1\n";
    CUmodule module;
    int begun = gpu_hold(1);
    p_cuCtxGetCurrent(&shared);
    begun = begun != 0 ? begun : (int)p_cuModuleLoadData(&module, image);
    return begun != 0 ? begun : (int)p_cuModuleGetFunction(&kernel, module, "k");
}

static void cancelled_launches(void)
{
    pthread_t thread[THREADS], waiting[WAITERS];
    int begun = begin_with_kernel(), waited = 0;
    for (int i = 0; i < WAITERS; i++)
        pthread_create(&waiting[i], NULL, waits, NULL);
    for (int round = 0; begun == 0 && round < ROUNDS; round++) {
        for (int i = 0; i < THREADS; i++)
            pthread_create(&thread[i], NULL, launches, NULL);
        pause_ms(1 + round % 7);
        for (int i = 0; i < THREADS; i++)
            pthread_cancel(thread[i]);
        for (int i = 0; i < THREADS; i++)
            pthread_join(thread[i], NULL);
    }
    atomic_store(&enough, true);
    for (int i = 0; i < WAITERS; i++) {
        void *code;
        pthread_join(waiting[i], &code);
        waited |= (int)(intptr_t)code;
    }
    int launched = (int)launch();
    printf("%d %d %d %d\n", begun, waited, launched, (int)p_cuCtxSynchronize());
}

static void *storms(void *unused)
{
    (void)unused;
    p_cuCtxSetCurrent(shared);
    while (!atomic_load(&enough)) {
        launch();
        gpu_churn(1, 1);
    }
    return NULL;
}

/* CUDA does not survive a fork: an error is right, a signal or no end at all are not. */
static bool child_ends(void)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        alarm(5);
        exit(launch() == CUDA_SUCCESS || gpu_take(10) == CUDA_SUCCESS || p_cuCtxSynchronize() == CUDA_SUCCESS);
    }
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void forks_in_storm(void)
{
    pthread_t thread[THREADS];
    int begun = begin_with_kernel(), ended = 0;
    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, storms, NULL);
    for (int round = 0; round < FORKS; round++)
        ended += child_ends();
    atomic_store(&enough, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    int most = (int)gpu_take(900);
    printf("%d %d %d %d\n", begun, FORKS - ended, most, (int)gpu_take(300));
}

static void threads(void)
{
    int code = gpu_hold(10), count = 0;
    pause_ms(50);
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        char path[300], name[16] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "re");
        if (file != NULL) {
            count += fgets(name, sizeof name, file) != NULL && strcmp(name, "tangram\n") == 0;
            fclose(file);
        }
    }
#ifdef BIG_TLS
    big[0] = 1;
#endif
    printf("%d %d\n", code, count);
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    take_routes();
    if (strcmp(what, "reused") == 0)
        reused();
    else if (strcmp(what, "rawfork") == 0)
        rawfork();
    else if (strcmp(what, "early") == 0)
        rawfork_early();
    else if (strcmp(what, "launches") == 0)
        cancelled_launches();
    else if (strcmp(what, "storm") == 0)
        forks_in_storm();
    else if (strcmp(what, "threads") == 0)
        threads();
    else
        return 64;
    return 0;
}
