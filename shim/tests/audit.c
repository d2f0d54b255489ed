/* audit.c - an auditor (rtld-audit(7)), as profilers are: it lets every binding pass and prints how many libraries it saw. */
#include <link.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

static unsigned objects;

EXPORT unsigned int la_version(unsigned int version);
EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie);
EXPORT uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned int index, uintptr_t *refcook, uintptr_t *defcook, unsigned int *flags,
                              const char *name);

unsigned int la_version(unsigned int version)
{
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie)
{
    (void)map, (void)namespace, (void)cookie;
    objects++;
    return LA_FLG_BINDTO | LA_FLG_BINDFROM;
}

uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned int index, uintptr_t *refcook, uintptr_t *defcook, unsigned int *flags,
                       const char *name)
{
    (void)index, (void)refcook, (void)defcook, (void)flags, (void)name;
    return symbol->st_value;
}

__attribute__((destructor)) static void report(void)
{
    fprintf(stderr, "audit: %u libraries\n", objects);
}
