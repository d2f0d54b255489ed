/* first.c - what a process pays before it can compute: cuInit, a context, the first allocation. In nanoseconds.
 *
 *   first one           name,ns lines for this process
 *   first many N        N processes at once: the median of what each paid, and until the last was ready
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 256, BLOCK = 64 * 1024 };

struct paid {
    double init, context, allocation, end;
};

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void fail(const char *what, int rc)
{
    fprintf(stderr, "first: %s answered %d\n", what, rc);
    _exit(1);
}

static void *find(void *library, const char *name)
{
    void *at = dlsym(library, name);
    if (at == NULL)
        fail(name, -1);
    return at;
}

static struct paid pay(void)
{
    int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*allocate)(unsigned long long *, size_t);
    void *context, *at, *library = dlopen("libcuda.so.1", RTLD_NOW);
    unsigned long long block;
    int rc;
    if (library == NULL)
        fail(dlerror(), -1);
    at = find(library, "cuInit"), memcpy(&init, &at, sizeof at);
    at = find(library, "cuDevicePrimaryCtxRetain"), memcpy(&retain, &at, sizeof at);
    at = find(library, "cuCtxSetCurrent"), memcpy(&use, &at, sizeof at);
    at = find(library, "cuMemAlloc_v2"), memcpy(&allocate, &at, sizeof at);
    const double begin = now_ns();
    if ((rc = init(0)) != 0)
        fail("cuInit", rc);
    const double ready = now_ns();
    if ((rc = retain(&context, 0)) != 0 || (rc = use(context)) != 0)
        fail("cuDevicePrimaryCtxRetain", rc);
    const double made = now_ns();
    if ((rc = allocate(&block, BLOCK)) != 0)
        fail("cuMemAlloc", rc);
    const double end = now_ns();
    return (struct paid){ready - begin, made - ready, end - made, end};
}

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

/* Children wait at one pipe that the parent closes, and stay until all are ready. */
static void many(unsigned count)
{
    int start[2], ready[2], leave[2];
    double each[MOST], last = 0;
    char byte;
    if (count == 0 || count > MOST || pipe(start) != 0 || pipe(ready) != 0 || pipe(leave) != 0)
        fail("first many: processes must be 1 to 256", (int)count);
    for (unsigned i = 0; i < count; i++) {
        if (fork() != 0)
            continue;
        close(start[1]);
        close(leave[1]);
        (void)!read(start[0], &byte, 1);
        const struct paid paid = pay();
        (void)!write(ready[1], &paid, sizeof paid);
        (void)!read(leave[0], &byte, 1);
        _exit(0);
    }
    close(ready[1]);
    const double begin = now_ns();
    close(start[1]);
    for (unsigned i = 0; i < count; i++) {
        struct paid paid;
        if (read(ready[0], &paid, sizeof paid) != (ssize_t)sizeof paid)
            fail("a process of first many", -1);
        each[i] = paid.end - begin;
        last = paid.end - begin > last ? paid.end - begin : last;
    }
    close(leave[1]);
    while (wait(NULL) > 0)
        ;
    qsort(each, count, sizeof *each, by_size);
    printf("median_of_%u_at_once,%.0f\nlast_of_%u_at_once,%.0f\n", count, each[count / 2], count, last);
}

int main(int count, char **words)
{
    if (count == 3 && strcmp(words[1], "many") == 0) {
        many((unsigned)atoi(words[2]));
        return 0;
    }
    const struct paid paid = pay();
    printf("cuInit,%.0f\nfirst_context,%.0f\nfirst_cuMemAlloc_in_new_process,%.0f\n", paid.init, paid.context, paid.allocation);
    printf("first_call_all,%.0f\n", paid.init + paid.context + paid.allocation);
    return 0;
}
