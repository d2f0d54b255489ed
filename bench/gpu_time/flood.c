/* flood.c - a container's program that requests memory of the arbiter all the time, or prints how long it waits for it.
 *
 * One line in, one line of JSON out, as load.c.
 *   flood THREADS MIB    {"ok": 1}           threads that allocate and free MIB each, as fast as they can, from now on. What is refused is tried again
 *   requests N MIB       {"us": [...]}       what each of N allocations of MIB took; none is freed before the last
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 4096 };

static int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
static void *context;
static size_t bytes;

static void take(void *library, const char *name, void *slot)
{
    void *at = dlsym(library, name);
    if (at == NULL) {
        fprintf(stderr, "flood: no %s\n", name);
        exit(1);
    }
    memcpy(slot, &at, sizeof at);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void *flood(void *unused)
{
    use(context);
    for (uint64_t at;;)
        if (allocate(&at, bytes) == 0)
            release(at);
    return unused;
}

static void requests(unsigned count)
{
    static uint64_t at[MOST];
    static double took[MOST];
    unsigned made = 0;
    for (; made < count && made < MOST; made++) {
        double began = now_us();
        if (allocate(&at[made], bytes) != 0)
            break;
        took[made] = now_us() - began;
    }
    printf("{\"us\": [");
    for (unsigned i = 0; i < made; i++) {
        printf("%s%.1f", i > 0 ? ", " : "", took[i]);
        release(at[i]);
    }
    puts("]}");
}

int main(void)
{
    char line[256], word[16];
    double first, mib;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return 1;
    take(library, "cuInit", &init);
    take(library, "cuDevicePrimaryCtxRetain", &retain);
    take(library, "cuCtxSetCurrent", &use);
    take(library, "cuMemAlloc_v2", &allocate);
    take(library, "cuMemFree_v2", &release);
    if (init(0) != 0 || retain(&context, 0) != 0 || use(context) != 0)
        return 1;
    puts("{\"ready\": true}");
    for (fflush(stdout); fgets(line, sizeof line, stdin) != NULL; fflush(stdout)) {
        if (sscanf(line, " [ \"%15[a-z]\" , %lf , %lf", word, &first, &mib) != 3)
            return 1;
        bytes = (size_t)mib << 20;
        if (strcmp(word, "requests") == 0) {
            requests((unsigned)first);
            continue;
        }
        for (unsigned i = 0; i < (unsigned)first; i++) {
            pthread_t thread;
            if (pthread_create(&thread, NULL, flood, NULL) != 0)
                return 1;
        }
        puts("{\"ok\": 1}");
    }
    return 0;
}
