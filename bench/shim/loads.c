/* loads.c - the start of a program that loads 500 kernels one by one, as the driver does with lazily loaded modules. In nanoseconds.
 *
 *   loads               name,ns lines: from cuInit until all have run once, and the loads of it
 *
 * Once by cuModuleGetFunction, once as kernels of a library, which their first launch loads. The image is text: the driver keeps what it
 * compiled, so the first run of a machine is another.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { KERNELS = 500, LINES = 24, ROOM = KERNELS * (256 + LINES * 40) };

static void *library;
static char image[ROOM];

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void must(const char *what, int rc)
{
    if (rc == 0)
        return;
    fprintf(stderr, "loads: %s answered %d\n", what, rc);
    _exit(1);
}

static void find(const char *name, void *to)
{
    void *at = dlsym(library, name);
    must(name, at == NULL ? -1 : 0);
    memcpy(to, &at, sizeof at);
}

/* Each kernel another, so that none is compiled away. */
static void write_image(void)
{
    size_t at = (size_t)snprintf(image, ROOM, ".version 6.0\n.target sm_50\n.address_size 64\n");
    for (int i = 0; i < KERNELS; i++) {
        at += (size_t)snprintf(image + at, ROOM - at, ".visible .entry k%d(.param .u64 to)\n{\n.reg .b32 %%r<%d>;\n.reg .b64 %%d;\nld.param.u64 %%d, [to];\nmov.u32 %%r0, %d;\n", i, LINES + 2, i);
        for (int line = 0; line < LINES; line++)
            at += (size_t)snprintf(image + at, ROOM - at, "mad.lo.u32 %%r%d, %%r%d, %d, %d;\n", line + 1, line, i + 3, line);
        at += (size_t)snprintf(image + at, ROOM - at, "st.global.u32 [%%d], %%r%d;\nret;\n}\n", LINES);
    }
}

static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*synchronize)(void);

static double run_all(const char *getter, void *from, unsigned long long to)
{
    int (*get)(void **, void *, const char *);
    void *parameters[] = {&to}, *kernel;
    char name[16];
    find(getter, &get);
    const double began = now_ns();
    for (int i = 0; i < KERNELS; i++) {
        snprintf(name, sizeof name, "k%d", i);
        must(getter, get(&kernel, from, name));
        must("cuLaunchKernel", launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    }
    must("cuCtxSynchronize", synchronize());
    return now_ns() - began;
}

int main(void)
{
    int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*allocate)(unsigned long long *, size_t), (*load)(void **, const void *);
    int (*load_library)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
    unsigned long long block;
    void *context, *module;
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);
    library = dlopen("libcuda.so.1", RTLD_NOW);
    must("dlopen of libcuda.so.1", library == NULL ? -1 : 0);
    find("cuInit", &init), find("cuDevicePrimaryCtxRetain", &retain), find("cuCtxSetCurrent", &use), find("cuMemAlloc_v2", &allocate);
    find("cuModuleLoadData", &load), find("cuLibraryLoadData", &load_library), find("cuLaunchKernel", &launch);
    find("cuCtxSynchronize", &synchronize);
    write_image();
    const double began = now_ns();
    must("cuInit", init(0));
    must("cuDevicePrimaryCtxRetain", retain(&context, 0));
    must("cuCtxSetCurrent", use(context));
    must("cuMemAlloc", allocate(&block, 4096));
    must("cuModuleLoadData", load(&module, image));
    const double loads = run_all("cuModuleGetFunction", module, block), started = now_ns() - began;
    must("cuLibraryLoadData", load_library(&module, image, NULL, NULL, 0, NULL, NULL, 0));
    const double kernels = run_all("cuLibraryGetKernel", module, block);
    printf("start_with_500_functions,%.0f\n500_functions,%.0f\n500_kernels,%.0f\n", started, loads, kernels);
    return 0;
}
