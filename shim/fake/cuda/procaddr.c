/* procaddr.c - cuGetProcAddress: the newest form of a name that is no newer than the version requested.
 *
 * The table is our own, never dlsym: a library in front of us may have taken dlsym over. With the per-thread flag the
 * per-thread twin is answered where there is one. The twins are the same code behind addresses of their own, because
 * every stream of a GPU shares one queue here.
 *
 * What comes back for names and versions that do not exist was measured on driver 580: version 2 of the call answers
 * CUDA_SUCCESS, a null pointer and a status; version 1 answers CUDA_ERROR_NOT_FOUND.
 */
#include "internal.h"
#include "calls.h"

#if defined(__x86_64__)
#define JUMP "jmp "
#elif defined(__aarch64__)
#define JUMP "b "
#else
#error "one line of assembly is missing for this architecture"
#endif
#define TWIN(symbol, suffix)                                                                                                   \
    __asm__(".pushsection .text\n.globl " #symbol suffix "\n.type " #symbol suffix ", @function\n" #symbol suffix ":\n" JUMP   \
            #symbol "\n.popsection\n");

#define S(name, version, symbol)
#define PTDS(name, version, symbol) TWIN(symbol, "_ptds")
#define PTSZ(name, version, symbol) TWIN(symbol, "_ptsz")
#include "symbols.def"

/* The symbols by other names, so that their prototypes need not be repeated here. */
#define S(name, version, symbol) extern const char plain_##name##_##version[] __asm__(#symbol);
#define PTDS(name, version, symbol) extern const char twin_##name##_##version[] __asm__(#symbol "_ptds");
#define PTSZ(name, version, symbol) extern const char twin_##name##_##version[] __asm__(#symbol "_ptsz");
#include "symbols.def"

#define NEWEST 13999 /* a version past the driver's is refused (measured at 99999); where exactly is guessed */

static const struct entry {
    const char *name, *symbol;
    int version;
    bool twin;
    const void *at;
} entries[] = {
#define S(name, version, symbol) {#name, #symbol, version, false, plain_##name##_##version},
#define PTDS(name, version, symbol) {#name, #symbol, version, true, twin_##name##_##version},
#define PTSZ PTDS
#include "symbols.def"
};

static const struct entry *newest(const char *name, int version, bool twin, bool *exists)
{
    const struct entry *best = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        const struct entry *entry = &entries[i];
        if (entry->twin != twin || strcmp(entry->name, name) != 0 || entry->version > driver_cuda_version() || symbol_missing(&cuda.client, entry->symbol))
            continue;
        *exists = true;
        if (entry->version <= version && (best == NULL || entry->version > best->version))
            best = entry;
    }
    return best;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **at, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
    const cuuint64_t known = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM | CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    CHECK(name != NULL && at != NULL && (flags & ~known) == 0 && version <= NEWEST, CUDA_ERROR_INVALID_VALUE);
    bool exists = false;
    const struct entry *found = NULL;
    if ((flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0)
        found = newest(name, version, true, &exists);
    if (found == NULL)
        found = newest(name, version, false, &exists);
    *at = found == NULL ? NULL : (void *)(uintptr_t)found->at;
    if (status != NULL)
        *status = found != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
                  : exists      ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS; /* also when nothing is found: measured, driver 580 */
}

#include "procaddr.def"
