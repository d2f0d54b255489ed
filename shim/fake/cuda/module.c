/* module.c - modules, which are libraries, too, and functions, which are kernels.
 *
 * Any image loads. The entries of a text (PTX) are known by name, and comments set the duration of a kernel:
 *     //fake NAME us=250          250 microseconds
 *     //fake NAME us=param0       its first parameter, an unsigned 32-bit number of microseconds
 *     //fake NAME us=250 error=719   and ends in that error
 *     //fake NAME us=250 counter=param0   and counts meanwhile (launch.c)
 *     //fake NAME us=250 does=add at=param0 bytes=param1   and does that to memory (does.def, steps.c)
 *     //fake NAME local=4096      bytes of local memory, if not those of its .local arrays
 * Variables lose memory at load, in blocks of their own, as measured (image.c). All other kernels take the description's
 * kernel_us. A kernel computes nothing but what its comment says.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>

static CUresult module_end(CUmodule module)
{
    image_free(&module->image);
    free(module->text);
    handle_free(module);
    return CUDA_SUCCESS;
}

static CUresult load(CUmodule module, CUcontext ctx, const void *image)
{
    const struct fake_gpu *gpu = gpu_of(ctx->device);
    TRY(image_read(&module->image, image, gpu->cc_major * 10 + gpu->cc_minor));
    CHECK(!module->image.runtime || losses_runtime(ctx), CUDA_ERROR_OUT_OF_MEMORY);
    module->text = strdup(image_is_text(image) ? image : "");
    CHECK(module->text != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    return memory_own(ctx, SPAN_OWNED, PAGES_MODULES, module->image.bytes, &module->variables);
}

/* A library is a module that is loaded into every context at once: without one it is empty here. */
static CUresult module_new(CUmodule *made, const void *image, bool is_library)
{
    CUcontext ctx;
    CUmodule module;
    CUresult rc = current(&ctx);
    CHECK(rc == CUDA_SUCCESS || (is_library && ready() == CUDA_SUCCESS), rc);
    CHECK(made != NULL && image != NULL, CUDA_ERROR_INVALID_VALUE);
    TRY(MAKE(&module, HANDLE_MODULE, CUmod_st, .text = NULL));
    rc = rc == CUDA_SUCCESS ? load(module, ctx, image) : CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS)
        *made = module;
    else
        module_end(module);
    return rc;
}

static CUresult module_read(CUmodule *module, const char *path)
{
    static const size_t most = 1 << 20;
    FILE *file = fopen(path, "re");
    CHECK(file != NULL, CUDA_ERROR_FILE_NOT_FOUND);
    char *text = calloc(1, most + 1);
    const size_t got = text == NULL ? 0 : fread(text, 1, most, file);
    fclose(file);
    const CUresult rc = got == 0 ? CUDA_ERROR_INVALID_IMAGE : module_new(module, text, false);
    free(text);
    return rc;
}

static CUresult find_variable(CUmodule module, const char *name, CUdeviceptr *at, size_t *bytes)
{
    const struct variable *variable = module->image.variables;
    while (variable != NULL && strcmp(variable->name, name) != 0)
        variable = variable->next;
    CHECK(variable != NULL, CUDA_ERROR_NOT_FOUND);
    PUT(at, (CUdeviceptr)(module->variables.span->base + variable->at));
    PUT(bytes, variable->bytes);
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

static uint64_t fake_number(const char *text, const char *name, const char *key, uint64_t otherwise)
{
    const char *word = fake_word(text, name, key);
    return word != NULL ? strtoull(word, NULL, 10) : otherwise;
}

/* "param0" to "param9", kept as it stands in the module's text. */
static const char *parameter_word(const char *word)
{
    return word != NULL && strncmp(word, "param", 5) == 0 && word[5] >= '0' && word[5] <= '9' ? word : NULL;
}

/* What the comment says that it does to memory. */
static CUresult function_effect(CUfunction function, const char *text)
{
    static const char *const keys[WORDS] = {
#define WORD(name, key, bytes) " " key "=",
#include "does.def"
    };
    static const struct {
        const char *name;
        enum job_kind job;
        unsigned needs[3];
    } effects[] = {
#define DOES(name, job, ...) {#name, job, {__VA_ARGS__}},
#include "does.def"
    };
    const char *does = fake_word(text, function->name, " does=");
    if (does == NULL)
        return CUDA_SUCCESS;
    for (unsigned i = 0; i < WORDS; i++)
        function->word[i] = fake_word(text, function->name, keys[i]);
    for (size_t i = 0; i < sizeof effects / sizeof effects[0]; i++)
        if (strncmp(does, effects[i].name, strlen(effects[i].name)) == 0) {
            function->does = (int)effects[i].job;
            for (unsigned need = 0; need < 3; need++)
                CHECK(function->word[effects[i].needs[need]] != NULL, CUDA_ERROR_INVALID_IMAGE);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_IMAGE;
}

static CUresult function_new(CUfunction *made, CUmodule module, const char *name)
{
    const char *text = module->text != NULL ? module->text : "", *entry = find_word(text, ".entry", name);
    CHECK(strstr(text, ".entry") == NULL || entry != NULL, CUDA_ERROR_NOT_FOUND);
    const uint64_t us = fake_number(text, name, " us=", UINT64_MAX);
    TRY(MAKE(made, HANDLE_FUNCTION, CUfunc_st, .module = module, .runtime = module->image.runtime,
             .us_parameter = parameter_word(fake_word(text, name, " us=")),
             .counter_parameter = parameter_word(fake_word(text, name, " counter=")),
             .ns = us == UINT64_MAX ? cuda.client.page->kernel_ns : us * 1000,
             .error = (uint32_t)fake_number(text, name, " error=", 0),
             .local = fake_number(text, name, " local=", image_local(entry))));
    snprintf((*made)->name, sizeof (*made)->name, "%s", name);
    return function_effect(*made, text);
}

static int function_attribute(CUfunction function, CUfunction_attribute attribute)
{
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return 32;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: return (int)function->local;
    default: return 0;
    }
}

static bool loads_eagerly(void)
{
    const char *wanted = getenv("CUDA_MODULE_LOADING");
    return wanted != NULL && strcmp(wanted, "EAGER") == 0;
}

#include "module.def"
