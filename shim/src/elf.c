/* elf.c - dlsym, found without dlsym: for programs on another libc than glibc.
 *
 * LD_PRELOAD reaches every program of a container, also one that stands on musl, where no NVIDIA driver runs and there is nothing
 * for us to do. Such a program must find the library harmless: it needs its own dlsym behind ours.
 */
#include "process.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>

struct search {
    const char *name;
    void *found;
};

struct tables {
    const uint32_t *hash;
    const ElfW(Sym) * symbols;
    const char *names;
};

/* musl leaves the addresses in a dynamic section as they are in the file, glibc makes them absolute. */
static const void *absolute(ElfW(Addr) base, ElfW(Addr) at)
{
    return (const void *)(uintptr_t)(at < base ? base + at : at);
}

static struct tables tables_of(const struct dl_phdr_info *object)
{
    struct tables tables = {NULL, NULL, NULL};
    const ElfW(Dyn) *entry = NULL;
    for (unsigned i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const ElfW(Dyn) *)(uintptr_t)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        const void *at = absolute(object->dlpi_addr, entry->d_un.d_ptr);
        if (entry->d_tag == DT_HASH)
            tables.hash = at;
        else if (entry->d_tag == DT_SYMTAB)
            tables.symbols = at;
        else if (entry->d_tag == DT_STRTAB)
            tables.names = at;
    }
    return tables;
}

static int look(struct dl_phdr_info *object, size_t size, void *given)
{
    struct search *search = given;
    struct tables tables = tables_of(object);
    void *(*our_dlsym)(void *, const char *) = dlsym;
    void *ours;
    memcpy(&ours, &our_dlsym, sizeof ours);
    (void)size;
    if (tables.hash == NULL || tables.symbols == NULL || tables.names == NULL)
        return 0;
    for (uint32_t i = 0, count = tables.hash[1]; i < count; i++) {
        const ElfW(Sym) *symbol = &tables.symbols[i];
        void *at = (void *)(uintptr_t)(object->dlpi_addr + symbol->st_value);
        if (symbol->st_shndx == SHN_UNDEF || strcmp(tables.names + symbol->st_name, search->name) != 0 ||
            at == ours)
            continue;
        search->found = at;
        return 1;
    }
    return 0;
}

void *next_definition(const char *name)
{
    struct search search = {name, NULL};
    dl_iterate_phdr(look, &search);
    return search.found;
}
