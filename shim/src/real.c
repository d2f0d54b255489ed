/* real.c - finding the functions that stand behind our hooks.
 *
 * The driver is found by the name that every program loads it under. Nothing is locked while libraries are loaded: their
 * constructors may look symbols up, which comes back to us. Two threads that arrive together find the same addresses.
 */
#include "process.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

typedef void *(*dlsym_function)(void *handle, const char *name);

static _Atomic(dlsym_function) next_dlsym;

#pragma weak dlvsym /* musl has none, and its loader ends a program over a symbol that is missing */

/* glibc moved dlsym from libdl (2.2.5, or the port's first version) to libc (2.34). */
static dlsym_function find_dlsym(void)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    void *found = NULL;
    for (unsigned i = 0; dlvsym != NULL && i < sizeof versions / sizeof *versions && found == NULL; i++)
        found = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (found == NULL)
        found = next_definition("dlsym");
    dlsym_function function;
    memcpy(&function, &found, sizeof function);
    atomic_store_explicit(&next_dlsym, function, memory_order_release);
    return function;
}

void *real_dlsym(void *handle, const char *name)
{
    dlsym_function function = atomic_load_explicit(&next_dlsym, memory_order_acquire);
    if (UNLIKELY(function == NULL) && (function = find_dlsym()) == NULL)
        return NULL;
    return function(handle, name);
}

/* Where the dlsym of our own jumps to. dlsym.c */
dlsym_function real_dlsym_function(void);
dlsym_function real_dlsym_function(void)
{
    dlsym_function function = atomic_load_explicit(&next_dlsym, memory_order_acquire);
    return function != NULL ? function : find_dlsym();
}

/* Does this address lie in the library of that name (any version suffix, any folder)? */
bool is_driver_symbol(void *at, const char *library)
{
    Dl_info where;
    if (dladdr(at, &where) == 0 || where.dli_fname == NULL)
        return false;
    const char *slash = strrchr(where.dli_fname, '/');
    const char *file = slash ? slash + 1 : where.dli_fname;
    return strncmp(file, library, strlen(library)) == 0;
}

static void *open_library(const char *name)
{
    void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    return handle != NULL ? handle : dlopen(name, RTLD_LAZY);
}

/* What is missing keeps what stands in the slot. missing.h */
static void fetch(void *handle, const char *name, void *slot)
{
    void *found = real_dlsym(handle, name);
    if (found != NULL)
        memcpy(slot, &found, sizeof found);
}

/* Reported where there is a grant: memory that this function would have told of may not be counted. */
static void driver_lacks(const char *name)
{
    if (grant_ready() == GRANT_NONE)
        return;
    state_set(WIRE_UNKNOWN_FUNCTION, true);
    warn(WARN_LACKS_FUNCTION, "this driver lacks %s: not all memory is counted; the oldest supported driver is 535", name);
}

static void report_missing(void)
{
#define NEEDED(name, params)                                                                                                   \
    if (!HAS(name))                                                                                                            \
        driver_lacks(#name);
#include "hooks.def"
}

bool driver_find(void)
{
    struct quiet quiet = quiet_begin();
    void *handle = open_library("libcuda.so.1");
    if (handle != NULL) {
        struct driver found = tangram.driver;
#define HOOK(name, base, since, ptds, params) fetch(handle, #name, &found.name);
#define REAL(name, params) fetch(handle, #name, &found.name);
#include "hooks.def"
        pthread_mutex_lock(&tangram.setup);
        if (!atomic_load(&tangram.hot.driver_found)) {
            tangram.driver = found;
            atomic_store_explicit(&tangram.hot.driver_found, true, memory_order_release);
        }
        pthread_mutex_unlock(&tangram.setup);
        report_missing();
    }
    quiet_end(quiet);
    return handle != NULL;
}

bool management_ready(void)
{
    if (!UNLIKELY(!atomic_load_explicit(&tangram.management_found, memory_order_acquire)))
        return true;
    struct quiet quiet = quiet_begin();
    void *handle = open_library("libnvidia-ml.so.1");
    if (handle != NULL) {
        struct management found = tangram.management;
#define NVML(name, params) fetch(handle, #name, &found.name);
#define REAL_NVML(name, params) fetch(handle, #name, &found.name);
#include "hooks.def"
        pthread_mutex_lock(&tangram.setup);
        if (!atomic_load(&tangram.management_found)) {
            tangram.management = found;
            atomic_store_explicit(&tangram.management_found, true, memory_order_release);
        }
        pthread_mutex_unlock(&tangram.setup);
    }
    quiet_end(quiet);
    return handle != NULL;
}
