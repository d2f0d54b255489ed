/* branch.c - the tables of branches.def and symbols.def, read. */
#include "branch.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BRANCH(name, driver, cuda)
#define NVML(branch, function)

void branch_set(struct fake_page *page, const char *word)
{
    static const struct {
        const char *name, *driver;
        uint32_t cuda;
    } branches[] = {
#undef BRANCH
#define BRANCH(name, driver, cuda) {#name, driver, cuda},
#include "branches.def"
#undef BRANCH
#define BRANCH(name, driver, cuda)
    };
    snprintf(page->driver_version, sizeof page->driver_version, "%s", word);
    for (size_t i = 0; i < sizeof branches / sizeof branches[0]; i++)
        if (strcmp(word, branches[i].name) == 0) {
            snprintf(page->driver_version, sizeof page->driver_version, "%s", branches[i].driver);
            page->cuda_version = branches[i].cuda;
        }
}

bool branch_has_cuda(const struct fake_page *page, const char *symbol)
{
    static const struct {
        const char *symbol;
        uint32_t cuda;
    } symbols[] = {
#define S(name, version, symbol) {#symbol, version},
#define PTDS(name, version, symbol)
#define PTSZ(name, version, symbol)
#include "../cuda/symbols.def"
#undef S
#undef PTDS
#undef PTSZ
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++)
        if (strcmp(symbol, symbols[i].symbol) == 0 && symbols[i].cuda <= page->cuda_version)
            return true;
    return false;
}

bool branch_has_nvml(const struct fake_page *page, const char *function)
{
    static const struct {
        const char *name;
        unsigned long branch;
    } functions[] = {
#undef NVML
#define NVML(branch, function) {#function, branch},
#include "branches.def"
#undef NVML
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (strcmp(function, functions[i].name) == 0)
            return strtoul(page->driver_version, NULL, 10) >= functions[i].branch;
    return true;
}
