/* hook.c - from a function of the driver to the hook in front of it, by name or by address.
 *
 * cuGetProcAddress may return other addresses than dlsym does for the same function, so each hook is also identified by the
 * address that the driver itself returns for the hook's own version and stream flavour. An address that is neither belongs
 * to a form of the function that this library does not know.
 */
#include "hooks/hook.h"

#include <stddef.h>
#include <string.h>

#include "process.h"

struct hook {
    const char *name, *base;
    int since, ptds;
    void *ours;
    size_t real; /* offset of the real pointer in `tangram` */
};

static const struct hook hooks[] = {
#define HOOK(name, base, since, ptds, params) {#name, base, since, ptds, (void *)name, offsetof(struct tangram, driver.name)},
#include "hooks/hooks.def"
};

static const struct hook management_hooks[] = {
#define NVML(name, params) {#name, "", 0, 0, (void *)name, offsetof(struct tangram, management.name)},
#include "hooks/hooks.def"
};

enum { HOOKS = sizeof hooks / sizeof *hooks, MANAGEMENT_HOOKS = sizeof management_hooks / sizeof *management_hooks };

static _Atomic(void *) handed_out[HOOKS]; /* by cuGetProcAddress for exactly this hook; NULL = not looked up yet, or it has none */

void *hook_for_name(const char *name)
{
    /* letter by letter: a sanitizer looks its own strncmp up through us before it has one */
    if (name[0] == 'c' && name[1] == 'u') {
        for (unsigned i = 0; i < HOOKS; i++)
            if (strcmp(hooks[i].name, name) == 0)
                return hooks[i].ours;
    } else if (name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l') {
        for (unsigned i = 0; i < MANAGEMENT_HOOKS; i++)
            if (strcmp(management_hooks[i].name, name) == 0)
                return management_hooks[i].ours;
    }
    return NULL;
}

static void *query_driver(const struct hook *hook)
{
    void *at = NULL;
    cuuint64_t flags = hook->ptds ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0;
    CUdriverProcAddressQueryResult status;
    if (HAS(cuGetProcAddress_v2))
        tangram.driver.cuGetProcAddress_v2(hook->base, &at, hook->since, flags, &status);
    else if (HAS(cuGetProcAddress))
        tangram.driver.cuGetProcAddress(hook->base, &at, hook->since, flags);
    return at;
}

/* A driver has hundreds of functions, and a program that looks all of them up would have the driver queried for each hook: so only those hooks are
 * queried to whose function the symbol can belong, in any form. */
static void *address_of(unsigned i, const char *symbol)
{
    void *at = atomic_load_explicit(&handed_out[i], memory_order_relaxed);
    if (at != NULL || strncmp(symbol, hooks[i].base, strlen(hooks[i].base)) != 0)
        return at;
    at = query_driver(&hooks[i]);
    atomic_store_explicit(&handed_out[i], at, memory_order_relaxed);
    return at;
}

void *hook_for_address(const char *symbol, void *at)
{
    for (unsigned i = 0; i < HOOKS; i++) {
        void *real;
        memcpy(&real, (const char *)&tangram + hooks[i].real, sizeof real);
        if (real == at || hooks[i].ours == at) /* ours: a driver that looks itself up calls our dlsym */
            return hooks[i].ours;
    }
    for (unsigned i = 0; i < HOOKS; i++)
        if (address_of(i, symbol) == at)
            return hooks[i].ours;
    return NULL;
}

/* The length of a name without _v2 and the like, and without the mark of the per-thread default stream. */
static size_t base_length(const char *name)
{
    size_t length = strlen(name);
    if (length > 5 && (strcmp(name + length - 5, "_ptsz") == 0 || strcmp(name + length - 5, "_ptds") == 0))
        length -= 5;
    size_t digits = length;
    while (digits > 2 && name[digits - 1] >= '0' && name[digits - 1] <= '9')
        digits--;
    return digits < length && digits > 2 && name[digits - 1] == 'v' && name[digits - 2] == '_' ? digits - 2 : length;
}

bool hook_is_newer_form(const char *name)
{
    const size_t length = base_length(name);
    if (name[0] != 'c' || name[1] != 'u' || name[length] == '\0')
        return false;
    bool known = false;
    for (unsigned i = 0; i < HOOKS; i++) {
        if (strcmp(hooks[i].name, name) == 0)
            return false;
        known = known || (strlen(hooks[i].base) == length && strncmp(hooks[i].base, name, length) == 0);
    }
    return known;
}

bool hook_has_base(const char *base)
{
    for (unsigned i = 0; i < HOOKS; i++)
        if (strcmp(hooks[i].base, base) == 0)
            return true;
    return false;
}
