/* real.c - finding the functions that stand behind our hooks.
 *
 * The driver is found by the name that every program loads it under. Nothing is locked while libraries are loaded: their
 * constructors may look symbols up, which calls our dlsym. Two threads that arrive together find the same addresses.
 */
#include "process.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

typedef void *(*dlsym_function)(void *handle, const char *name);
typedef void *(*dlvsym_function)(void *handle, const char *name, const char *version);

static _Atomic(dlsym_function) next_dlsym;
static _Atomic(dlvsym_function) next_dlvsym;

/* By the tables of the objects, since neither function can look itself up. glibc has them in libdl, or since 2.34 in libc. */
static dlsym_function find_dlsym(void)
{
    void *found = next_definition("dlsym");
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

dlvsym_function real_dlvsym_function(void);
dlvsym_function real_dlvsym_function(void)
{
    dlvsym_function function = atomic_load_explicit(&next_dlvsym, memory_order_acquire);
    if (function == NULL) {
        void *found = next_definition("dlvsym");
        memcpy(&function, &found, sizeof function);
        atomic_store_explicit(&next_dlvsym, function, memory_order_release);
    }
    return function;
}

bool is_driver_symbol(void *at, const char *library)
{
    const struct link_map *object = object_of(at);
    return object != NULL && object_is(object, library);
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

/* Reported where there is a grant: memory that this function would have shown may not be counted. */
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
#define HOOK_NEEDED(name, base, since, ptds, params) NEEDED(name, params)
#include "hooks/hooks.def"
}

bool driver_find(void)
{
    struct quiet quiet = quiet_begin();
    void *handle = open_library("libcuda.so.1");
    if (handle != NULL) {
        struct driver found = tangram.driver;
#define HOOK(name, base, since, ptds, params) fetch(handle, #name, &found.name);
#define REAL(name, params) fetch(handle, #name, &found.name);
#include "hooks/hooks.def"
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
#include "hooks/hooks.def"
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
