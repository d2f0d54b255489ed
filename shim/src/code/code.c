/* code.c - functions and kernels by their handles: what they load when they are first used, and the stack that they need.
 *
 * Where modules are loaded lazily, which is the driver's default, a function's code is loaded to the GPU when its handle is read from a module
 * (cuModuleGetFunction, cuKernelGetFunction), or at the first launch of a kernel of a library; that loads the library's variables, too
 * (measured: bench/granularity). Each such call may load a function, at most all that is left of its image: so
 * much is reserved before it. A launch of a kernel that has not been used loads it first, so that the bound covers only that.
 */
#include "gputime/launching.h"
#include "hooks/hook.h"
#include "memory/memory.h"
#include "memory/pool.h"

#include <stdlib.h>

enum {
    LOCAL_BYTES = 3, /* CUfunction_attribute */
    UNIT = 8 * 1024,
    MOST = 0xffff,       /* units: half a GiB */
    FUNCTION_MOST = 2048 /* units: 16 MiB, a million instructions; guessed */
};

/* Of an image that is loaded lazily, in `of` of its entry, with the library that a module was made of in `bytes`: what its code takes, what
 * its largest function, and what was held in which period, in units. */
struct late {
    uint16_t bound, function, held, period;
};

static void *packed(struct late late)
{
    return (void *)((uintptr_t)late.period << 48 | (uintptr_t)late.held << 32 | (uintptr_t)late.function << 16 | late.bound);
}

static struct late unpacked(const void *of)
{
    uintptr_t word = (uintptr_t)of;
    return (struct late){.bound = (uint16_t)word, .function = (uint16_t)(word >> 16), .held = (uint16_t)(word >> 32), .period = (uint16_t)(word >> 48)};
}

static uint16_t units_of(uint64_t bytes, uint64_t most)
{
    uint64_t units = (bytes + UNIT - 1) / UNIT;
    return (uint16_t)(units < most ? units : most);
}

static void loads_late(const void *image, const void *library, uint64_t bytes, uint64_t function_bytes)
{
    struct late late = {.bound = units_of(bytes, MOST), .function = units_of(function_bytes, FUNCTION_MOST)};
    struct owned entry = {OWNED_AS(OWNED_CODE, (uintptr_t)image), (uintptr_t)library, NULL, packed(late)};
    if (bytes > 0 && table_own(entry))
        atomic_store(&tangram.late_code, true);
}

void code_loads_late(const void *image, uint64_t bytes, uint64_t function_bytes)
{
    loads_late(image, NULL, bytes, function_bytes);
}

/* A function, a kernel, or a module that was made of a library: its entry names the image. */
static bool is_of(const struct owned *entry, const void *image)
{
    switch ((enum owned_kind)(entry->at >> 59)) {
    case OWNED_FUNCTION:
    case OWNED_CODE: return entry->bytes == (uintptr_t)image;
    case OWNED_LATE: return entry->of == image;
    default: return false;
    }
}

struct owned_list code_forget(const void *image)
{
    struct owned_list list = {.count = 0};
    struct owned was;
    bool late = atomic_load(&tangram.late_code);
    if (image == NULL || (!late && !atomic_load(&tangram.hot.noted)))
        return list;
    if (late && table_disown(OWNED_AS(OWNED_CODE, (uintptr_t)image), &was))
        owned_list_add(&list, &was);
    table_take(is_of, image, &list);
    for (size_t i = 0, count = list.count; i < count; i++)
        if (list.entry[i].at >> 59 == OWNED_CODE && list.entry[i].bytes == (uintptr_t)image)
            table_take(is_of, (const void *)(uintptr_t)OWNED_HANDLE(list.entry[i].at), &list);
    return list;
}

void code_forgotten(struct owned_list list, CUresult rc)
{
    for (size_t i = 0; i < list.count; i++)
        if (rc != CUDA_SUCCESS)
            table_own(list.entry[i]);
        else if (list.entry[i].at >> 59 == OWNED_LATE)
            kernel_gone(&list.entry[i]);
    free(list.entry);
}

/* A call that may load something of the image. False: refuse it. After it: bound_end of *gpu. */
static bool begin(const void *image, struct gpu **gpu)
{
    struct owned found;
    *gpu = NULL;
    if (!atomic_load(&tangram.late_code) || !table_find(OWNED_AS(OWNED_CODE, (uintptr_t)image), &found))
        return true;
    struct gpu *of = current_gpu();
    if (of == NULL)
        return true;
    await_memory(); /* as module.c */
    struct late late = unpacked(found.of);
    uint16_t period = (uint16_t)(bound_period(of) * GPUS_LIMIT + of->at);
    if (late.period != period)
        late = (struct late){.bound = late.bound, .function = late.function, .period = period};
    uint16_t left = (uint16_t)(late.bound - late.held), more = left < late.function ? left : late.function;
    if (atomic_load(&tangram.hot.several_contexts)) /* each has code of its own */
        more = late.function;
    if (!bound_begin(of, (uint64_t)more * UNIT))
        return false;
    late.held = (uint16_t)(late.held + (more < left ? more : left));
    found.of = packed(late);
    table_own(found);
    *gpu = of;
    return true;
}

/* Its code comes with its first use: of a function once, of a kernel of a library in each context. */
static void note_late(enum comes_late what, const void *function, const void *image)
{
    struct owned found;
    if (atomic_load(&tangram.late_code) && table_find(OWNED_AS(OWNED_CODE, (uintptr_t)image), &found) &&
        table_own((struct owned){OWNED_AS(OWNED_LATE, (uintptr_t)function), what, NULL, (void *)(uintptr_t)image}))
        atomic_store(&tangram.hot.noted, true);
}

/* A kernel belongs to no context; its local memory is the same on every GPU of a kind. Asking for it loads nothing (measured). A driver
 * that lacks the function is reported. */
bool code_local(const void *function, enum kernel_handle what, int *local)
{
    CUdevice device = 0;
    *local = 0;
    if (what == OF_FUNCTION) {
        CUresult rc = tangram.driver.cuFuncGetAttribute(local, (CUfunction_attribute)LOCAL_BYTES, (CUfunction)(uintptr_t)function);
        return rc == CUDA_SUCCESS || !HAS(cuFuncGetAttribute);
    }
    if (tangram.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS)
        device = 0;
    CUresult rc = tangram.driver.cuKernelGetAttribute(local, (CUfunction_attribute)LOCAL_BYTES, (CUkernel)(uintptr_t)function, device);
    return rc == CUDA_SUCCESS || !HAS(cuKernelGetAttribute);
}

static void note(const void *function, enum kernel_handle what, const void *image)
{
    int local;
    if (grant_ready() == GRANT_GOOD)
        stack_note(function, what, image, code_local(function, what, &local) ? local : LOCAL_UNKNOWN);
}

static void note_function(CUfunction function, const void *image)
{
    note(function, OF_FUNCTION, image);
}

static void note_kernel(CUkernel kernel, CUlibrary library)
{
    if (grant_ready() != GRANT_GOOD)
        return;
    note(kernel, OF_KERNEL, library);
    note_late(LATE_KERNEL, kernel, library);
}

/* The first use of a kernel in a context. */
struct kernel_use {
    struct owned kernel; /* at 0: it was used there before */
    CUcontext context;
    struct placing variables;
    struct gpu *gpu;
};

static bool kernel_begin(const void *kernel, struct kernel_use *use)
{
    *use = (struct kernel_use){.gpu = NULL};
    struct owned found;
    if (!table_find(OWNED_AS(OWNED_LATE, (uintptr_t)kernel), &found) || kernel_is_used(&found, use->context = library_context()))
        return true;
    if (!library_begin(found.of, use->context, &use->variables))
        return false;
    if (!begin(found.of, &use->gpu)) {
        library_end(found.of, &use->variables, CUDA_ERROR_OUT_OF_MEMORY);
        return false;
    }
    use->kernel = found;
    return true;
}

static void kernel_end(const struct kernel_use *use, CUresult rc)
{
    bound_end(use->gpu);
    if (use->kernel.at == 0)
        return;
    library_end(use->kernel.of, &use->variables, rc);
    if (rc == CUDA_SUCCESS)
        kernel_used(use->kernel, use->context);
}

/* The library of a kernel that is deep or comes late; NULL: of another, whose functions are neither. */
static const void *library_of(CUkernel kernel)
{
    struct owned found;
    if (table_find(OWNED_AS(OWNED_LATE, (uintptr_t)kernel), &found))
        return found.of;
    return table_find(OWNED_AS(OWNED_FUNCTION, (uintptr_t)kernel), &found) ? (const void *)(uintptr_t)found.bytes : NULL;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    NEEDS(cuKernelGetFunction);
    struct kernel_use use;
    if (!kernel_begin(kernel, &use))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuKernelGetFunction(function, kernel);
    kernel_end(&use, rc);
    if (rc == CUDA_SUCCESS)
        note_function(*function, library_of(kernel));
    return rc;
}

EXPORT CUresult cuFuncLoad(CUfunction function)
{
    NEEDS(cuFuncLoad);
    struct owned was;
    struct gpu *gpu = NULL;
    bool unused = table_disown(OWNED_AS(OWNED_LATE, (uintptr_t)function), &was);
    if (unused && !begin(was.of, &gpu)) {
        table_own(was);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult rc = tangram.driver.cuFuncLoad(function);
    bound_end(gpu);
    if (unused && rc != CUDA_SUCCESS)
        table_own(was);
    return rc;
}

/* Before a launch. It loads what has not been used, so that the bound covers only that. */
bool code_fits(const void *function)
{
    struct owned found;
    CUfunction loaded;
    if (!table_find(OWNED_AS(OWNED_LATE, (uintptr_t)function), &found))
        return true;
    bool kernel = found.bytes != LATE_FUNCTION;
    if (kernel && kernel_is_used(&found, library_context()))
        return true;
    CUstreamCaptureMode mode = relax();
    CUresult rc = kernel ? cuKernelGetFunction(&loaded, (CUkernel)(uintptr_t)function) : cuFuncLoad((CUfunction)(uintptr_t)function);
    relax_end(mode);
    return rc != CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    NEEDS(cuModuleGetFunction);
    struct gpu *gpu;
    if (!begin(module, &gpu))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuModuleGetFunction(function, module, name);
    bound_end(gpu);
    if (rc == CUDA_SUCCESS)
        note_function(*function, module);
    return rc;
}

EXPORT CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int capacity, CUmodule module)
{
    NEEDS(cuModuleEnumerateFunctions);
    struct gpu *gpu;
    if (!begin(module, &gpu))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuModuleEnumerateFunctions(functions, capacity, module);
    bound_end(gpu);
    for (unsigned at = 0; rc == CUDA_SUCCESS && at < capacity && functions[at] != NULL; at++) {
        note_function(functions[at], module);
        note_late(LATE_FUNCTION, functions[at], module);
    }
    return rc;
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    NEEDS(cuLibraryGetModule);
    struct gpu *gpu;
    struct owned found;
    if (!begin(library, &gpu))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult rc = tangram.driver.cuLibraryGetModule(module, library);
    bound_end(gpu);
    if (rc == CUDA_SUCCESS && atomic_load(&tangram.late_code) && table_find(OWNED_AS(OWNED_CODE, (uintptr_t)library), &found))
        loads_late(*module, library, (uint64_t)unpacked(found.of).bound * UNIT, (uint64_t)unpacked(found.of).function * UNIT);
    return rc;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    NEEDS(cuLibraryGetKernel);
    CUresult rc = tangram.driver.cuLibraryGetKernel(kernel, library, name);
    if (rc == CUDA_SUCCESS)
        note_kernel(*kernel, library);
    return rc;
}

EXPORT CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int capacity, CUlibrary library)
{
    NEEDS(cuLibraryEnumerateKernels);
    CUresult rc = tangram.driver.cuLibraryEnumerateKernels(kernels, capacity, library);
    for (unsigned at = 0; rc == CUDA_SUCCESS && at < capacity && kernels[at] != NULL; at++)
        note_kernel(kernels[at], library);
    return rc;
}
