/* module.c - modules and libraries, whose variables the driver allocates when it loads them.
 *
 * The size of the variables is read from the image (image.c), reserved, and then loaded; what does not fit is not loaded. Variables share
 * pages among themselves, as arrays do. Of a library it is charged to the card that is current, or to the first: the driver loads it into
 * contexts when it likes. What no image tells (compressed ones, code that is loaded later) grows the context: the room that is kept beside
 * it pays, and the arbiter's next reading of NVML charges it (docs/limits.md).
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hook.h"
#include "image.h"
#include "memory.h"

static bool begin_bytes(struct card *card, uint64_t bytes, struct placing *placing)
{
    CUcontext context = NULL;
    if (HAS(cuCtxGetCurrent))
        tangram.driver.cuCtxGetCurrent(&context);
    return placing_begin(placing, &tangram.module_pages, card, context, bytes);
}

/* False: refuse it. */
static bool begin(struct card *card, const void *image, struct placing *placing)
{
    bool known;
    *placing = (struct placing){.card = NULL};
    if (card == NULL || image == NULL)
        return true;
    uint64_t bytes = image_variables(image, &known);
    return bytes == 0 || begin_bytes(card, bytes, placing);
}

/* Of a file, which the driver reads after us: one that is changed in between deceives only this container. A page of zeros follows it
 * in memory, so that a text ends. */
static bool begin_file(struct card *card, const char *path, struct placing *placing)
{
    struct stat about;
    bool room = true;
    *placing = (struct placing){.card = NULL};
    if (card == NULL || path == NULL)
        return true;
    struct quiet quiet = quiet_begin();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char *at = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0
                   ? mmap(NULL, (size_t)about.st_size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                   : MAP_FAILED;
    bool read_all = at != MAP_FAILED && read(fd, at, (size_t)about.st_size) == about.st_size;
    if (fd >= 0)
        close(fd);
    quiet_end(quiet);
    if (read_all)
        room = begin(card, at, placing);
    if (at != MAP_FAILED)
        munmap(at, (size_t)about.st_size + PAGE);
    return room;
}

static struct card *card_of_library(void)
{
    CUdevice device;
    bool none = !HAS(cuCtxGetDevice) || tangram.driver.cuCtxGetDevice(&device) != CUDA_SUCCESS;
    return grant_ready() == GRANT_NONE ? NULL : none ? card_of_device(0) : card_of_device(device);
}

#define LOADS(name, handle, kind, undo, params, find_card, begins, image, ...)                                                 \
    EXPORT CUresult name params                                                                                                \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct placing placing;                                                                                                \
        if (!begins(find_card(), image, &placing))                                                                             \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                                   \
        CUresult rc = tangram.driver.name(__VA_ARGS__);                                                                        \
        if (placing_end(&placing, rc, OWNED_AS(kind, rc == CUDA_SUCCESS ? (uintptr_t)*handle : 0)))                            \
            return rc;                                                                                                         \
        tangram.driver.undo(*handle);                                                                                          \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                                       \
    }

LOADS(cuModuleLoad, module, OWNED_MODULE, cuModuleUnload, (CUmodule * module, const char *path), current_card, begin_file, path,
      module, path)
LOADS(cuModuleLoadData, module, OWNED_MODULE, cuModuleUnload, (CUmodule * module, const void *image), current_card, begin, image,
      module, image)
LOADS(cuModuleLoadDataEx, module, OWNED_MODULE, cuModuleUnload,
      (CUmodule * module, const void *image, unsigned int count, CUjit_option *options, void **values), current_card, begin, image,
      module, image, count, options, values)
LOADS(cuModuleLoadFatBinary, module, OWNED_MODULE, cuModuleUnload, (CUmodule * module, const void *image), current_card, begin, image,
      module, image)
LOADS(cuLibraryLoadData, library, OWNED_LIBRARY, cuLibraryUnload,
      (CUlibrary * library, const void *code, CUjit_option *jit, void **jit_values, unsigned int jits, CUlibraryOption *options,
       void **values, unsigned int count),
      card_of_library, begin, code, library, code, jit, jit_values, jits, options, values, count)
LOADS(cuLibraryLoadFromFile, library, OWNED_LIBRARY, cuLibraryUnload,
      (CUlibrary * library, const char *path, CUjit_option *jit, void **jit_values, unsigned int jits, CUlibraryOption *options,
       void **values, unsigned int count),
      card_of_library, begin_file, path, library, path, jit, jit_values, jits, options, values, count)

#define UNLOADS(name, type, kind)                                                                                              \
    EXPORT CUresult name(type handle)                                                                                          \
    {                                                                                                                          \
        NEEDS(name);                                                                                                           \
        struct owned was;                                                                                                      \
        bool ours = table_disown(OWNED_AS(kind, (uintptr_t)handle), &was);                                                     \
        CUresult rc = tangram.driver.name(handle);                                                                             \
        if (ours)                                                                                                              \
            settle_handle(rc, &was);                                                                                           \
        return rc;                                                                                                             \
    }

UNLOADS(cuModuleUnload, CUmodule, OWNED_MODULE)
UNLOADS(cuLibraryUnload, CUlibrary, OWNED_LIBRARY)
