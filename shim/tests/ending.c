/* ending.c - a program ends while the library's thread and the program's own are in the middle of things.
 *
 *   ending HOW [busy]
 *
 * HOW: return from main, exit, thread (exit by another thread), quick (quick_exit), _exit, close (libcuda is closed before exit).
 * Work is under way that no thread waits for, so that the library's thread queries the driver. busy: four threads launch, allocate and
 * free memory meanwhile. A handler that was registered before CUDA started frees memory when the driver has ended already, or waits where
 * ENDING_LINGERS is set. Prints the code of
 * an allocation of 900 MiB, which fits into a container of 1000 for one process at a time.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "gpu.h"

enum { THREADS = 4, WORK_MS = 300, SPIN_US = 12000 };

static CUcontext context;
static CUfunction spin;
static CUdeviceptr kept;
static atomic_uint rounds;

static void spins(uint32_t us)
{
    void *parameters[] = {&us};
    p_cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
}

static void *works(void *unused)
{
    (void)unused;
    p_cuCtxSetCurrent(context);
    for (;;) { /* what it is answered while the program ends is its own affair */
        spins(100);
        gpu_churn(1, 2);
        atomic_fetch_add(&rounds, 1);
    }
    return NULL;
}

static void *exits(void *unused)
{
    (void)unused;
    exit(0);
}

static void wait_ms(unsigned ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

static void is_late(void)
{
    if (getenv("ENDING_LINGERS") != NULL)
        wait_ms(100);
    else if (kept != 0)
        p_cuMemFree_v2(kept);
}

static int begin(void)
{
    CUmodule module;
    int code = (int)gpu_begin();
    if (code == 0)
        code = (int)p_cuMemAlloc_v2(&kept, 900 * MIB);
    printf("%d\n", code);
    fflush(stdout);
    if (code != 0 || p_cuCtxGetCurrent(&context) != CUDA_SUCCESS ||
        p_cuModuleLoadData(&module, "//fake spin us=param0\n.entry spin() {}\n") != CUDA_SUCCESS)
        return 1;
    return p_cuModuleGetFunction(&spin, module, "spin") != CUDA_SUCCESS;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "";
    pthread_t thread;
    atexit(is_late);
    at_quick_exit(is_late);
    take_routes();
    if (begin() != 0)
        return 1;
    for (int i = 0; argc > 2 && i < THREADS; i++)
        if (pthread_create(&thread, NULL, works, NULL) != 0)
            return 1;
    while (argc > 2 && atomic_load(&rounds) < 100)
        wait_ms(1);
    for (unsigned ms = 0; ms < WORK_MS; ms += 10, wait_ms(10)) /* until the library's thread looks often */
        spins(SPIN_US);
    if (strcmp(how, "exit") == 0)
        exit(0);
    if (strcmp(how, "quick") == 0)
        quick_exit(0);
    if (strcmp(how, "_exit") == 0)
        _exit(0);
    if (strcmp(how, "close") == 0 && dlclose(dlopen("libcuda.so.1", RTLD_NOW)) != 0)
        return 1;
    if (strcmp(how, "thread") == 0) {
        pthread_create(&thread, NULL, exits, NULL);
        pthread_join(thread, NULL);
    }
    return 0;
}
