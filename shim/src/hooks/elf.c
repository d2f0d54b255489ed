/* elf.c - what a loaded object defines and is called, read from its own tables: without dlsym, which the library replaces.
 *
 * LD_PRELOAD reaches every program of a container, also one that uses musl, where no NVIDIA driver runs and the library has nothing
 * to do. Such a program must find the library harmless: it needs its own dlsym behind ours. There is no list of objects to
 * read there (dladdr1), only one to be walked through.
 */
#include "process.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#pragma weak dladdr1 /* musl has none, and its loader ends a program over a symbol that is missing */

struct tables {
    const uint32_t *hash, *gnu_hash;
    const ElfW(Sym) * symbols;
    const char *names;
    size_t soname; /* within names; 0: it has none */
};

/* musl and the kernel leave the addresses in a dynamic section as they are in the file, glibc makes them absolute. */
static const void *absolute(ElfW(Addr) base, ElfW(Addr) at)
{
    return (const void *)(uintptr_t)(at < base ? base + at : at);
}

static struct tables tables_of(ElfW(Addr) base, const ElfW(Dyn) * entry)
{
    struct tables tables = {NULL, NULL, NULL, NULL, 0};
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        const void *at = absolute(base, entry->d_un.d_ptr);
        if (entry->d_tag == DT_HASH)
            tables.hash = at;
        else if (entry->d_tag == DT_GNU_HASH)
            tables.gnu_hash = at;
        else if (entry->d_tag == DT_SYMTAB)
            tables.symbols = at;
        else if (entry->d_tag == DT_STRTAB)
            tables.names = at;
        else if (entry->d_tag == DT_SONAME)
            tables.soname = (size_t)entry->d_un.d_val;
    }
    return tables;
}

/* Letter by letter: a sanitizer looks its own strcmp up through us before it has one. */
static bool same(const char *one, const char *other)
{
    while (*one != '\0' && *one == *other)
        one++, other++;
    return *one == *other;
}

static const ElfW(Sym) * by_hash(const struct tables *tables, const char *name)
{
    for (uint32_t i = 0, count = tables->hash[1]; i < count; i++) {
        const ElfW(Sym) *symbol = &tables->symbols[i];
        if (symbol->st_shndx != SHN_UNDEF && same(tables->names + symbol->st_name, name))
            return symbol;
    }
    return NULL;
}

/* Layout: buckets, index of the first hashed symbol, words of the filter, its shift; the filter; the buckets; a word for each symbol,
 * whose lowest bit ends a bucket. */
static const ElfW(Sym) * by_gnu_hash(const struct tables *tables, const char *name)
{
    const uint32_t *head = tables->gnu_hash, count = head[0], first = head[1];
    const uint32_t *buckets = head + 4 + head[2] * (sizeof(ElfW(Addr)) / sizeof *head), *chain = buckets + count;
    uint32_t wanted = 5381;
    for (const char *letter = name; *letter != '\0'; letter++)
        wanted = wanted * 33 + (unsigned char)*letter;
    uint32_t i = count == 0 ? 0 : buckets[wanted % count];
    for (; i >= first && i != 0; i++) {
        const ElfW(Sym) *symbol = &tables->symbols[i];
        if ((chain[i - first] | 1) == (wanted | 1) && symbol->st_shndx != SHN_UNDEF && same(tables->names + symbol->st_name, name))
            return symbol;
        if (chain[i - first] & 1)
            return NULL;
    }
    return NULL;
}

static void *defined(ElfW(Addr) base, const ElfW(Dyn) * dynamic, const char *name)
{
    const struct tables tables = tables_of(base, dynamic);
    const ElfW(Sym) *symbol = NULL;
    if (tables.symbols == NULL || tables.names == NULL)
        return NULL;
    if (tables.gnu_hash != NULL)
        symbol = by_gnu_hash(&tables, name);
    else if (tables.hash != NULL)
        symbol = by_hash(&tables, name);
    return symbol == NULL ? NULL : (void *)(uintptr_t)(base + symbol->st_value);
}

struct link_map *object_of(const void *at)
{
    Dl_info where;
    struct link_map *object = NULL;
    return dladdr1 != NULL && dladdr1(at, &where, (void **)&object, RTLD_DL_LINKMAP) != 0 ? object : NULL;
}

static bool begins(const char *text, const char *with)
{
    while (*with != '\0' && *text == *with)
        text++, with++;
    return *with == '\0';
}

bool object_is(const struct link_map *object, const char *library)
{
    const struct tables tables = tables_of(object->l_addr, object->l_ld);
    const char *file = object->l_name;
    for (const char *at = file; *at != '\0'; at++)
        if (*at == '/')
            file = at + 1;
    return begins(file, library) || (tables.names != NULL && tables.soname != 0 && begins(tables.names + tables.soname, library));
}

struct search {
    const char *name;
    void *found;
};

static int look(struct dl_phdr_info *object, size_t size, void *given)
{
    struct search *search = given;
    const ElfW(Dyn) *dynamic = NULL;
    const uintptr_t ours = (uintptr_t)&tangram;
    (void)size;
    for (unsigned i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        const uintptr_t begin = (uintptr_t)(object->dlpi_addr + part->p_vaddr);
        if (part->p_type == PT_LOAD && ours >= begin && ours - begin < part->p_memsz)
            return 0;
        if (part->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)begin;
    }
    search->found = defined(object->dlpi_addr, dynamic, search->name);
    return search->found != NULL;
}

void *next_definition(const char *name)
{
    struct link_map *us = object_of(&tangram);
    struct search search = {name, NULL};
    for (struct link_map *at = us; at != NULL && search.found == NULL; at = at->l_next)
        search.found = at == us ? NULL : defined(at->l_addr, at->l_ld, name);
    if (search.found == NULL) /* on musl, or where a program loaded the library itself */
        dl_iterate_phdr(look, &search);
    return search.found;
}
