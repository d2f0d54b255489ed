/* hide.c - takes symbols out of the table in which the loader looks.
 *
 * A symbol whose value is 0 is not found by any kind of lookup (glibc and musl alike): dlsym, a later binding, a
 * program that reads the table itself. What was bound before keeps its address.
 */
#define _GNU_SOURCE
#include "missing.h"

#include <elf.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

extern const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden"))); /* the linker's: where the library begins */
extern const Elf64_Dyn _DYNAMIC[] __attribute__((visibility("hidden")));

/* An address out of the dynamic section, which a loader may have made absolute or not. */
static uintptr_t section(Elf64_Sxword tag)
{
    const uintptr_t base = (uintptr_t)&__ehdr_start;
    for (const Elf64_Dyn *entry = _DYNAMIC; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == tag)
            return entry->d_un.d_ptr < base ? base + entry->d_un.d_ptr : entry->d_un.d_ptr;
    return 0;
}

bool hide_symbols(bool (*hidden)(const char *symbol))
{
    const char *names = (const char *)section(DT_STRTAB);
    const uint32_t *hash = (const uint32_t *)section(DT_HASH); /* linked with --hash-style=both: its second word counts the symbols */
    Elf64_Sym *symbol = (Elf64_Sym *)section(DT_SYMTAB);
    if (names == NULL || hash == NULL || symbol == NULL)
        return false;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)symbol / page * page;
    const size_t bytes = (uintptr_t)(symbol + hash[1]) - first;
    bool writable = false;
    for (uint32_t i = 1; i < hash[1]; i++) {
        if (symbol[i].st_value == 0 || !hidden(names + symbol[i].st_name))
            continue;
        writable = writable || mprotect((void *)first, bytes, PROT_READ | PROT_WRITE | PROT_EXEC) == 0;
        if (!writable)
            return false;
        symbol[i].st_value = 0;
    }
    return !writable || mprotect((void *)first, bytes, PROT_READ | PROT_EXEC) == 0;
}
