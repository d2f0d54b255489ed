/* module.c - modules and libraries, whose variables the driver allocates when it loads them.
 *
 * The size of the variables is read from the image (image.c), reserved, and then loaded; what does not fit is not loaded. Variables share
 * pages among themselves, as arrays do. Of a library it is charged to the GPU that is current, or to the first; the driver loads it into
 * contexts when it is first used there (library.c). What code takes, and variables that an image does not show, is bounded and settled (bound.c);
 * code that is loaded lazily is bounded when it is loaded (code.c).
 *
 * The driver brings code to the GPU over the channels, and waits for it: while memory is away these are suspended, and only work ends that. So a load
 * reports work and waits until the memory is back. One that is inside the driver when memory leaves is noticed by the helper (activity_is_inside).
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hooks/hook.h"
#include "code/image.h"
#include "gputime/launching.h"
#include "memory/memory.h"

enum { MAJOR = 75, MINOR = 76 /* CUdevice_attribute */ };
static const uint64_t UNSEEN = 32 * MIB; /* reserved until NVML is read, for variables that the image does not show; guessed */

/* One load: its variables, and what the context may grow by. */
struct loading {
    struct placing placing;
    struct gpu *gpu;   /* NULL: nothing to count */
    bool heap;         /* the first module that calls printf or malloc */
    uint64_t variables;
    struct image_needs late; /* code that is loaded by later calls */
};

static unsigned capability(void)
{
    CUdevice device = 0;
    int major = 0, minor = 0;
    if (tangram.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS)
        device = 0;
    if (tangram.driver.cuDeviceGetAttribute(&major, (CUdevice_attribute)MAJOR, device) != CUDA_SUCCESS ||
        tangram.driver.cuDeviceGetAttribute(&minor, (CUdevice_attribute)MINOR, device) != CUDA_SUCCESS)
        return 0;
    return (unsigned)(major * 10 + minor);
}

/* Is code loaded function by function, when it is first used? */
static bool is_lazy(void)
{
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return tangram.driver.cuModuleGetLoadingMode(&mode) == CUDA_SUCCESS && mode == CU_MODULE_LAZY_LOADING;
}

static bool begin_variables(struct loading *loading, uint64_t bytes)
{
    CUcontext context = NULL;
    if (bytes == 0)
        return true;
    tangram.driver.cuCtxGetCurrent(&context);
    return placing_begin(&loading->placing, &tangram.module_pages, loading->gpu, context, bytes);
}

/* False: refuse it. */
static bool begin_needs(struct gpu *gpu, struct image_needs needs, struct loading *loading)
{
    bool lazy = is_lazy();
    uint64_t bound = lazy ? 0 : needs.code;
    loading->gpu = gpu;
    loading->variables = needs.variables;
    loading->late = lazy ? needs : (struct image_needs){.code = 0};
    loading->heap = needs.heap && !atomic_load(&gpu->calls_heap);
    bound += loading->heap ? stack_of_calls() : 0;
    bound += !needs.known && bound_unseen(gpu) ? UNSEEN : 0;
    if (!begin_variables(loading, needs.variables))
        return false;
    if (bound_begin(gpu, bound))
        return true;
    placing_end(&loading->placing, CUDA_ERROR_OUT_OF_MEMORY, 0);
    return false;
}

static bool begin_image(struct gpu *gpu, const void *image, uint64_t length, struct loading *loading)
{
    *loading = (struct loading){.gpu = NULL};
    return gpu == NULL || image == NULL || begin_needs(gpu, image_read(image, length, capability()), loading);
}

static bool begin(struct gpu *gpu, const void *image, struct loading *loading)
{
    return begin_image(gpu, image, IMAGE_UNSTATED, loading);
}

/* False: undo what the driver loaded. */
static bool end(const struct loading *loading, CUresult rc, enum owned_kind kind, const void *handle)
{
    bound_end(loading->gpu);
    if (rc == CUDA_SUCCESS)
        code_loads_late(handle, loading->late.code, loading->late.function);
    if (rc == CUDA_SUCCESS && kind == OWNED_LIBRARY)
        library_loaded(handle, loading->variables);
    if (rc == CUDA_SUCCESS && loading->heap)
        atomic_store(&loading->gpu->calls_heap, true);
    return placing_end(&loading->placing, rc, OWNED_AS(kind, (uintptr_t)handle));
}

/* The whole file, of `*bytes`. NULL: it cannot be read. */
static void *file_read(const char *path, size_t *bytes)
{
    struct stat about;
    struct quiet quiet = quiet_begin();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *at = MAP_FAILED;
    size_t done = 0;
    if (fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0) {
        *bytes = (size_t)about.st_size;
        at = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    for (ssize_t got = 1; at != MAP_FAILED && done < (size_t)about.st_size && got > 0; done += got > 0 ? (size_t)got : 0)
        do
            got = read(fd, (char *)at + done, (size_t)about.st_size - done);
        while (got < 0 && errno == EINTR);
    if (fd >= 0)
        close(fd);
    quiet_end(quiet);
    if (at != MAP_FAILED && done == (size_t)about.st_size)
        return at;
    if (at != MAP_FAILED)
        munmap(at, *bytes);
    return NULL;
}

/* The driver reads the file after us: one that is changed in between affects only this container. A file that only the driver can read
 * is loaded as an image of unknown contents. */
static bool begin_file(struct gpu *gpu, const char *path, struct loading *loading)
{
    size_t bytes;
    *loading = (struct loading){.gpu = NULL};
    if (gpu == NULL || path == NULL)
        return true;
    void *image = file_read(path, &bytes);
    if (image == NULL)
        return begin_needs(gpu, (struct image_needs){.known = false}, loading);
    const bool admitted = begin_image(gpu, image, bytes, loading);
    munmap(image, bytes);
    return admitted;
}

static struct gpu *gpu_of_library(void)
{
    CUdevice device;
    bool none = tangram.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS;
    return grant_ready() == GRANT_NONE ? NULL : none ? gpu_of_device(0) : gpu_of_device(device);
}

#define LOADS(name, handle, kind, undo, params, find_gpu, begins, image, ...)                                                  \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct loading loading;                                                                                                \
        await_memory();                                                                                                        \
        if (!begins(find_gpu(), image, &loading))                                                                              \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        if (end(&loading, rc, kind, rc == CUDA_SUCCESS ? *handle : NULL))                                                      \
            return rc;                                                                                                         \
        tangram.driver.undo(*handle);                                                                                          \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                                       \
    }

LOADS(cuModuleLoad, module, OWNED_MODULE, cuModuleUnload, (CUmodule * module, const char *path), current_gpu, begin_file, path,
      module, path)
LOADS(cuModuleLoadData, module, OWNED_MODULE, cuModuleUnload, (CUmodule * module, const void *image), current_gpu, begin, image,
      module, image)
LOADS(cuModuleLoadDataEx, module, OWNED_MODULE, cuModuleUnload,
      (CUmodule * module, const void *image, unsigned int count, CUjit_option *options, void **values), current_gpu, begin, image,
      module, image, count, options, values)
LOADS(cuModuleLoadFatBinary, module, OWNED_MODULE, cuModuleUnload, (CUmodule * module, const void *image), current_gpu, begin, image,
      module, image)
LOADS(cuLibraryLoadData, library, OWNED_LIBRARY, cuLibraryUnload,
      (CUlibrary * library, const void *code, CUjit_option *jit, void **jit_values, unsigned int jits, CUlibraryOption *options,
       void **values, unsigned int count),
      gpu_of_library, begin, code, library, code, jit, jit_values, jits, options, values, count)
LOADS(cuLibraryLoadFromFile, library, OWNED_LIBRARY, cuLibraryUnload,
      (CUlibrary * library, const char *path, CUjit_option *jit, void **jit_values, unsigned int jits, CUlibraryOption *options,
       void **values, unsigned int count),
      gpu_of_library, begin_file, path, library, path, jit, jit_values, jits, options, values, count)

#define UNLOADS(name, type, kind)                                                                                              \
    EXPORT CUresult name(type handle)                                                                                          \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct owned was;                                                                                                      \
        await_memory();                                                                                                        \
        bool ours = table_disown(OWNED_AS(kind, (uintptr_t)handle), &was);                                                     \
        struct owned_list functions = code_forget(handle);                                                                     \
        const struct activity_call call = activity_call_begins();                                                              \
        CUresult rc = tangram.driver.name(handle);                                                                             \
        activity_call_ends(call);                                                                                              \
        code_forgotten(functions, rc);                                                                                         \
        if (rc == CUDA_SUCCESS && (kind) == OWNED_LIBRARY)                                                                     \
            library_unloaded(handle);                                                                                          \
        if (ours)                                                                                                              \
            settle_handle(rc, &was);                                                                                           \
        return rc;                                                                                                             \
    }

UNLOADS(cuModuleUnload, CUmodule, OWNED_MODULE)
UNLOADS(cuLibraryUnload, CUlibrary, OWNED_LIBRARY)
