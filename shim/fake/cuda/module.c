/* module.c - modules, libraries, functions, launches.
 *
 * Any image loads. Of a text (PTX) the entries are known by name, and comments say how long a kernel takes:
 *     //fake NAME us=250          250 microseconds
 *     //fake NAME us=param0       as its first parameter says, an unsigned 32-bit number of microseconds
 *     //fake NAME us=250 error=719   and ends in that error
 *     //fake NAME us=250 counter=param0   and counts meanwhile (counter.c)
 *     //fake NAME local=4096      bytes of local memory, if not those of its .local arrays
 * Variables lose memory at load, in blocks of their own, as measured (image.c). All other kernels take the description's kernel_us. A kernel computes nothing.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

bool function_ok(const void *function)
{
    return handle_is(function, HANDLE_FUNCTION);
}

static void module_end(CUmodule module)
{
    image_free(&module->image);
    free(module->text);
    handle_free(module);
}

static CUresult module_new(CUmodule *made, const void *image)
{
    CUcontext ctx;
    TRY(current(&ctx));
    CHECK(made != NULL && image != NULL, CUDA_ERROR_INVALID_VALUE);
    CUmodule module = handle_new(HANDLE_MODULE, sizeof *module);
    CHECK(module != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    module->ctx = ctx;
    module->ctx_id = ctx->id;
    module->text = image_is_text(image) ? strdup(image) : NULL;
    const struct fake_card *card = card_of(ctx->device);
    CUresult rc = image_read(&module->image, image, card->cc_major * 10 + card->cc_minor) ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (rc == CUDA_SUCCESS && module->image.runtime && !losses_runtime(ctx))
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS && module->image.bytes > 0)
        rc = memory_by_pages(SPAN_VARIABLES, ctx, PAGES_MODULES, module->image.bytes, &module->variables);
    if (rc == CUDA_SUCCESS)
        *made = module;
    else
        module_end(module);
    return rc;
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

static bool has_context(CUmodule module)
{
    return context_ok(module->ctx) && module->ctx->id == module->ctx_id;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    TRY(ready());
    CHECK(handle_is(module, HANDLE_MODULE), CUDA_ERROR_INVALID_HANDLE);
    lock();
    if (module->variables != NULL && has_context(module))
        memory_gone(module->variables);
    unlock();
    module_end(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *at, size_t *bytes, CUmodule module, const char *name)
{
    TRY(ready());
    CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    CHECK(handle_is(module, HANDLE_MODULE) && has_context(module), CUDA_ERROR_INVALID_HANDLE);
    const struct variable *variable = module->image.variables;
    while (variable != NULL && strcmp(variable->name, name) != 0)
        variable = variable->next;
    CHECK(variable != NULL, CUDA_ERROR_NOT_FOUND);
    if (at != NULL)
        *at = (CUdeviceptr)(module->variables->base + variable->at);
    if (bytes != NULL)
        *bytes = variable->bytes;
    return CUDA_SUCCESS;
}

/* Where the word stands behind `before`, or NULL. */
static const char *find_word(const char *text, const char *before, const char *word)
{
    const size_t length = strlen(word);
    for (const char *at = strstr(text, before); at != NULL; at = strstr(at, before)) {
        at += strlen(before);
        at += strspn(at, " \t");
        if (strncmp(at, word, length) == 0 && strcspn(at + length, " \t\r\n({") == 0)
            return at;
    }
    return NULL;
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
    const char *entry = text == NULL ? NULL : find_word(text, ".entry", name);
    CHECK(text == NULL || strstr(text, ".entry") == NULL || entry != NULL, CUDA_ERROR_NOT_FOUND);
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
    const char *local = text == NULL ? NULL : fake_word(text, name, " local=");
    function->local = local == NULL ? image_local(entry) : strtoull(local, NULL, 10);
    function->runtime = module->image.runtime;
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
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = (int)function->local; break;
    default: *value = 0;
    }
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
