/* branch.c - the tables of branches.def and cuda/symbols.def, read. */
#include "missing.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A branch with a release of it and its CUDA version, or one of NVML's functions with the branch that it came with. */
static const struct entry {
    const char *name, *driver;
    uint32_t number;
} entries[] = {
#define BRANCH(name, driver, cuda) {#name, driver, cuda},
#define NVML(branch, function) {#function, NULL, branch},
#include "branches.def"
};

/* What libcuda exports: the name by which cuGetProcAddress finds it, and the CUDA version that it came with. */
static const struct symbol {
    const char *symbol, *name;
    uint32_t cuda;
} symbols[] = {
#define S(name, version, symbol) {#symbol, #name, version},
#define PTDS(name, version, symbol)
#define PTSZ(name, version, symbol)
#include "../cuda/symbols.def"
};

static const struct entry *find_entry(const char *name)
{
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        if (strcmp(name, entries[i].name) == 0)
            return &entries[i];
    return NULL;
}

/* The exported symbol, or by_name: the first that is found by that name. */
static const struct symbol *find_symbol(const char *name, bool by_name)
{
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++)
        if (strcmp(name, by_name ? symbols[i].name : symbols[i].symbol) == 0)
            return &symbols[i];
    return NULL;
}

void branch_set(struct fake_page *page, const char *word)
{
    const struct entry *branch = find_entry(word);
    const bool known = branch != NULL && branch->driver != NULL;
    snprintf(page->driver_version, sizeof page->driver_version, "%s", known ? branch->driver : word);
    if (known)
        page->cuda_version = branch->number;
}

bool branch_has_cuda(const struct fake_page *page, const char *symbol)
{
    const struct symbol *found = find_symbol(symbol, false);
    return found != NULL && found->cuda <= page->cuda_version;
}

bool branch_has_nvml(const struct fake_page *page, const char *function)
{
    const struct entry *later = find_entry(function);
    return later == NULL || strtoul(page->driver_version, NULL, 10) >= later->number;
}

bool fault_hides(const struct fake_fault *fault, const char *symbol)
{
    const struct symbol *found = fault->kind == FAULT_MISSING ? find_symbol(symbol, false) : NULL;
    return found != NULL && (strcmp(fault->function, symbol) == 0 || strcmp(fault->function, found->name) == 0);
}

bool is_cuda_name(const char *name)
{
    return find_symbol(name, false) != NULL || find_symbol(name, true) != NULL;
}
