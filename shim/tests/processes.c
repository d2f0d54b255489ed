/* processes.c - ways to create a process: fork, vfork, exec, many at once. `processes CASE` prints codes, one line.
 *
 * CASE     what happens, in a container of 1000 MiB
 * take N   takes N MiB
 * fork     the parent has no CUDA yet, forks, then both take 400 MiB
 * vfork    has 600 MiB, a child of vfork takes 300 after exec, another 600
 * exec     has 600 MiB, then becomes a new program that takes 900
 * ends     the library's thread queries a driver that takes a second to answer: prints how many of 20 forked children took 0.9 s to exit
 * shares W has 600 MiB, a process that shares its memory takes 300, then 300, then itself 100 and 1. W = files: it shares descriptors, too
 * first    a process that shares its memory takes 100 MiB before it has CUDA, then itself 1000
 * many     32 children at once take 40 MiB each and keep it until the last has tried: prints how many got it
 */
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"

enum { CHILDREN = 32, ENDS = 20, STACK = 1 << 18 };

static int ended(pid_t child)
{
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void after_fork(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(gpu_hold(400));
    int own = gpu_hold(400);
    printf("%d %d\n", own, ended(child));
}

static int vforked(const char *program, const char *mib)
{
    pid_t child = vfork();
    if (child == 0) {
        execl(program, program, "take", mib, (char *)NULL);
        _exit(99);
    }
    return ended(child);
}

static void after_vfork(const char *program)
{
    int own = gpu_hold(600);
    int fits = vforked(program, "300"), over = vforked(program, "600");
    printf("%d %d %d\n", own, fits, over);
}

static void after_exec(const char *program)
{
    int own = gpu_hold(600);
    if (own != 0)
        printf("%d\n", own);
    else
        execl(program, program, "take", "900", (char *)NULL);
}

static unsigned now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned)(now.tv_sec * 1000 + now.tv_nsec / 1000000);
}

static void ends(void)
{
    CUmodule module;
    CUfunction slow;
    int code = (int)gpu_begin(), late = 0;
    if (code == 0)
        code = (int)p_cuModuleLoadData(&module, "//fake slow us=20000000\n.entry slow() {}\n");
    if (code == 0)
        code = (int)p_cuModuleGetFunction(&slow, module, "slow");
    if (code == 0)
        code = (int)p_cuLaunchKernel(slow, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    for (int i = 0; i < ENDS; i++) {
        unsigned begun_ms = now_ms();
        pid_t child = fork();
        if (child == 0)
            exit(0);
        ended(child);
        late += now_ms() - begun_ms >= 900; /* a program that waits for the thread waits for a second */
        nanosleep(&(struct timespec){0, 70000000}, NULL); /* so that some are forked while the thread queries */
    }
    printf("%d %d\n", code, late);
    fflush(stdout);
    _exit(0);
}

struct guest {
    size_t mib[2];
    int code[2];
};

static int guest(void *given)
{
    struct guest *guest = given;
    for (int i = 0; i < 2; i++)
        guest->code[i] = guest->mib[i] == 0 ? 0 : (int)gpu_take(guest->mib[i]);
    return 0;
}

/* A process of its own in this one's memory, as sandboxes and runtimes without threads make them. */
static void run_guest(struct guest *of, int (*what)(void *), int flags)
{
    static char stack[STACK] __attribute__((aligned(64)));
    int child = clone(what, stack + STACK, CLONE_VM | SIGCHLD | flags, of);
    if (child < 0 || ended(child) != 0)
        of->code[0] = of->code[1] = -1;
}

static void shares(bool files)
{
    struct guest of = {.mib = {300, 300}};
    int own = gpu_hold(600);
    run_guest(&of, guest, files ? CLONE_FILES : 0);
    int fits = (int)gpu_take(100), over = (int)gpu_take(1);
    printf("%d %d %d %d %d\n", own, of.code[0], of.code[1], fits, over);
}

static int first_guest(void *given)
{
    struct guest *guest = given;
    guest->code[0] = gpu_hold(100);
    return 0;
}

static void shares_first(void)
{
    struct guest of = {.code = {-1}};
    run_guest(&of, first_guest, CLONE_FILES);
    printf("%d %d\n", of.code[0] == 0, gpu_hold(1000));
}

static int keep(int ready, int go)
{
    char byte = (char)gpu_hold(40);
    if (write(ready, &byte, 1) != 1 || read(go, &byte, 1) < 0)
        return 99;
    return 0;
}

static void many(void)
{
    int ready[2], go[2], got = 0, refused = 0;
    pid_t child[CHILDREN];
    if (pipe(ready) != 0 || pipe(go) != 0)
        return;
    for (int i = 0; i < CHILDREN; i++)
        if ((child[i] = fork()) == 0) {
            close(go[1]);
            _exit(keep(ready[1], go[0]));
        }
    for (int i = 0; i < CHILDREN; i++) {
        char code = 1;
        if (read(ready[0], &code, 1) == 1 && code == 0)
            got++;
        else if (code == (char)CUDA_ERROR_OUT_OF_MEMORY)
            refused++;
    }
    close(go[1]);
    for (int i = 0; i < CHILDREN; i++)
        ended(child[i]);
    printf("%d %d\n", got, refused);
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    take_routes();
    if (strcmp(what, "take") == 0 && count > 2) {
        int code = gpu_hold((size_t)atol(words[2]));
        printf("%d\n", code);
        fflush(stdout);
        return code;
    }
    if (strcmp(what, "fork") == 0)
        after_fork();
    else if (strcmp(what, "vfork") == 0)
        after_vfork(words[0]);
    else if (strcmp(what, "exec") == 0)
        after_exec(words[0]);
    else if (strcmp(what, "ends") == 0)
        ends();
    else if (strcmp(what, "shares") == 0)
        shares(count > 2 && strcmp(words[2], "files") == 0);
    else if (strcmp(what, "first") == 0)
        shares_first();
    else if (strcmp(what, "many") == 0)
        many();
    else
        return 64;
    return 0;
}
