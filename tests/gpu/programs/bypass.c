/* bypass.c - a GPU program that the library is not in: takes so many MiB of device memory until its input ends.
 *
 *   bypass MIB          prints "held MIB" or "refused CODE"
 *
 * Meant to be linked statically, where LD_PRELOAD does nothing; linked dynamically it is started without LD_PRELOAD.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;

static void take(const char *name, void *slot)
{
    void *at = dlsym(library, name);
    if (at == NULL) {
        printf("refused: no %s\n", name);
        exit(1);
    }
    memcpy(slot, &at, sizeof at);
}

int main(int count, char **words)
{
    int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*allocate)(unsigned long long *, size_t);
    void *context;
    unsigned long long at;
    char line[16];
    const size_t mib = count > 1 ? (size_t)strtoul(words[1], NULL, 10) : 1;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        printf("refused: %s\n", dlerror());
        return 1;
    }
    take("cuInit", &init);
    take("cuDevicePrimaryCtxRetain", &retain);
    take("cuCtxSetCurrent", &use);
    take("cuMemAlloc_v2", &allocate);
    int rc = init(0);
    rc = rc ? rc : retain(&context, 0);
    rc = rc ? rc : use(context);
    for (size_t got = 0; rc == 0 && got < mib; got += 64)
        rc = allocate(&at, 64u << 20);
    if (rc == 0)
        printf("held %zu\n", mib);
    else
        printf("refused %d\n", rc);
    fflush(stdout);
    return fgets(line, sizeof line, stdin) == NULL ? 0 : 1;
}
