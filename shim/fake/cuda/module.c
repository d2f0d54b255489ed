/* module.c - modules, libraries, functions, launches.
 *
 * Any image loads. Of a text (PTX) the entries are known by name, and comments say how long a kernel takes:
 *     //fake NAME us=250          250 microseconds
 *     //fake NAME us=param0       as its first parameter says, an unsigned 32-bit number of microseconds
 *     //fake NAME us=250 error=719   and ends in that error
 *     //fake NAME us=250 counter=param0   and counts meanwhile (counter.c)
 * Variables (.global .align 4 .b8 name[SIZE]) lose memory at load, in blocks of their own, as measured; those of binary images
 * are not read. All other kernels take the description's kernel_us. A kernel computes nothing.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

bool function_ok(const void *function)
{
    return handle_is(function, HANDLE_FUNCTION);
}

/* The bytes of the .global lines of bytes (.b8): arrays, as a compiler writes every variable of more than one word. */
static uint64_t variables_of(const char *text)
{
    uint64_t bytes = 0;
    static const char mark[] = ".global ";
    for (const char *at = strstr(text, mark); at != NULL; at = strstr(at + 1, mark)) {
        const char *end = at + strcspn(at, ";=\n"), *type = strstr(at, " .b8 "), *open = memchr(at, '[', (size_t)(end - at));
        if (type != NULL && type < end && open != NULL)
            bytes += strtoull(open + 1, NULL, 10);
    }
    return bytes;
}

/* False: the card is full. */
static bool variables_new(CUmodule module)
{
    const uint64_t bytes = module->text == NULL ? 0 : variables_of(module->text);
    if (bytes == 0)
        return true;
    CHECK(bytes <= ARENA_BYTES / 2, false);
    lock();
    module->variables = place_new(&module->ctx->pages[PAGES_MODULES], module->ctx->device, bytes);
    unlock();
    return module->variables != NULL;
}

static CUresult module_new(CUmodule *made, const void *image)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(made != NULL && image != NULL, CUDA_ERROR_INVALID_VALUE);
    const char first = *(const char *)image;
    CUmodule module = handle_new(HANDLE_MODULE, sizeof *module);
    CHECK(module != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    module->ctx = ctx;
    if (first == '/' || first == '.' || first == '\n' || first == ' ' || first == '\t' || first == '\r')
        module->text = strdup(image);
    if (!variables_new(module)) {
        free(module->text);
        handle_free(module);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    FAULT(cuModuleLoadData, 0);
    return module_new(module, image);
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    return module_new(module, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return module_new(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    CHECK(path != NULL, CUDA_ERROR_INVALID_VALUE);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL, CUDA_ERROR_FILE_NOT_FOUND);
    static const size_t most = 1 << 20;
    char *text = calloc(1, most + 1);
    const size_t got = text == NULL ? 0 : fread(text, 1, most, file);
    fclose(file);
    const CUresult rc = got == 0 ? CUDA_ERROR_INVALID_IMAGE : module_new(module, text);
    free(text);
    return rc;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    TRY(ready());
    CHECK(handle_is(module, HANDLE_MODULE), CUDA_ERROR_INVALID_HANDLE);
    lock();
    if (module->variables != NULL && context_ok(module->ctx))
        place_free(&module->ctx->pages[PAGES_MODULES], module->ctx->device, module->variables);
    unlock();
    free(module->text);
    handle_free(module);
    return CUDA_SUCCESS;
}

static bool has_word(const char *text, const char *before, const char *word)
{
    const size_t length = strlen(word);
    for (const char *at = strstr(text, before); at != NULL; at = strstr(at, before)) {
        at += strlen(before);
        at += strspn(at, " \t");
        if (strncmp(at, word, length) == 0 && strcspn(at + length, " \t\r\n({") == 0)
            return true;
    }
    return false;
}

/* What follows KEY= on a line "//fake NAME ...", or NULL. */
static const char *fake_word(const char *text, const char *name, const char *key)
{
    static const char mark[] = "//fake ";
    for (const char *at = strstr(text, mark); at != NULL; at = strstr(at, mark)) {
        at += sizeof mark - 1;
        const size_t length = strlen(name);
        if (strncmp(at, name, length) != 0 || at[length] != ' ')
            continue;
        const char *end = at + strcspn(at, "\n"), *found = strstr(at + length, key);
        if (found != NULL && found < end)
            return found + strlen(key);
    }
    return NULL;
}

/* "param0" to "param9", kept as it stands in the module's text. */
static const char *parameter_word(const char *word)
{
    return word != NULL && strncmp(word, "param", 5) == 0 && word[5] >= '0' && word[5] <= '9' ? word : NULL;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *made, CUmodule module, const char *name)
{
    FAULT(cuModuleGetFunction, 0);
    TRY(ready());
    CHECK(made != NULL && name != NULL && name[0] != '\0', CUDA_ERROR_INVALID_VALUE);
    CHECK(handle_is(module, HANDLE_MODULE), CUDA_ERROR_INVALID_HANDLE);
    const char *text = module->text;
    CHECK(text == NULL || strstr(text, ".entry") == NULL || has_word(text, ".entry", name), CUDA_ERROR_NOT_FOUND);
    CUfunction function = handle_new(HANDLE_FUNCTION, sizeof *function);
    CHECK(function != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    snprintf(function->name, sizeof function->name, "%s", name);
    function->module = module;
    function->ns = cuda.client.page->kernel_ns;
    const char *word = text == NULL ? NULL : fake_word(text, name, " us=");
    const char *error = text == NULL ? NULL : fake_word(text, name, " error=");
    function->error = error == NULL ? 0 : (uint32_t)strtoul(error, NULL, 10);
    function->us_parameter = parameter_word(word);
    function->counter_parameter = parameter_word(text == NULL ? NULL : fake_word(text, name, " counter="));
    if (word != NULL && function->us_parameter == NULL)
        function->ns = strtoull(word, NULL, 10) * 1000;
    *made = function;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    CHECK(mode != NULL, CUDA_ERROR_INVALID_VALUE);
    const char *wanted = getenv("CUDA_MODULE_LOADING");
    *mode = wanted != NULL && strcmp(wanted, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    CHECK(function_ok(function) && module != NULL, CUDA_ERROR_INVALID_HANDLE);
    *module = function->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
    CHECK(function_ok(function) && name != NULL, CUDA_ERROR_INVALID_HANDLE);
    *name = function->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    FAULT(cuFuncGetAttribute, 0);
    CHECK(function_ok(function) && value != NULL, CUDA_ERROR_INVALID_HANDLE);
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    (void)attribute, (void)value;
    return function_ok(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    (void)config;
    return function_ok(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Libraries are modules that are loaded into every context at once; kernels are functions. */
EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned jits,
                                  CUlibraryOption *options, void **values, unsigned count)
{
    (void)jit, (void)jit_values, (void)jits, (void)options, (void)values, (void)count;
    TRY(ready());
    CHECK(library != NULL && code != NULL, CUDA_ERROR_INVALID_VALUE);
    CUcontext ctx;
    if (current(&ctx) == CUDA_SUCCESS)
        return module_new((CUmodule *)library, code);
    CUmodule module = handle_new(HANDLE_MODULE, sizeof *module);
    CHECK(module != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *library = (CUlibrary)module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    return cuModuleUnload((CUmodule)library);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return cuModuleGetFunction((CUfunction *)kernel, (CUmodule)library, name);
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    CHECK(handle_is(library, HANDLE_MODULE) && module != NULL, CUDA_ERROR_INVALID_HANDLE);
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CHECK(function_ok(kernel) && function != NULL, CUDA_ERROR_INVALID_HANDLE);
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

static CUresult occupancy(int *blocks, CUfunction function)
{
    CHECK(function_ok(function) && blocks != NULL, CUDA_ERROR_INVALID_VALUE);
    *blocks = 2;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared)
{
    (void)size, (void)shared;
    return occupancy(blocks, function);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int size, size_t shared, unsigned flags)
{
    (void)size, (void)shared, (void)flags;
    return occupancy(blocks, function);
}
