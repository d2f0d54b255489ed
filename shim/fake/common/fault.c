/* fault.c - reads the line of a fault. */
#define _GNU_SOURCE
#include "fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *symbol;
} symbols[] = {
#define S(name, version, symbol) {#name, #symbol},
#define PTDS(name, version, symbol)
#define PTSZ(name, version, symbol)
#include "../cuda/symbols.def"
#undef S
#undef PTDS
#undef PTSZ
};

bool fault_hides(const struct fake_fault *fault, const char *symbol)
{
    if (fault->kind != FAULT_MISSING)
        return false;
    bool hides = strcmp(fault->function, symbol) == 0;
    for (size_t i = 0; !hides && i < sizeof symbols / sizeof symbols[0]; i++)
        hides = strcmp(symbols[i].symbol, symbol) == 0 && strcmp(symbols[i].name, fault->function) == 0;
    return hides;
}

bool fault_of_page(const struct fake_page *page, enum fake_fault_kind kind)
{
    const uint32_t count = atomic_load(&page->faults);
    for (uint32_t i = 0; i < count && i < FAKE_FAULTS; i++)
        if (page->fault[i].kind == kind)
            return true;
    return false;
}

static bool has_function(const struct fake_fault *fault)
{
    return fault->kind == FAULT_FAIL || fault->kind == FAULT_HANG || fault->kind == FAULT_MISSING;
}

/* Whether anything can go wrong with that function as the fault says; a fault without effect would let a test pass for nothing. */
static bool function_known(const struct fake_fault *fault)
{
    static const char *const faultable[] = {
#define F(function) #function,
#include "faultable.def"
#undef F
    };
    bool known = !has_function(fault);
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0] && !known; i++)
        known = fault_hides(fault, symbols[i].symbol);
    for (size_t i = 0; i < FAULTABLE_COUNT && fault->kind != FAULT_MISSING && !known; i++)
        known = strcmp(fault->function, faultable[i]) == 0;
    return known;
}

/* One key=value into its place. */
static bool set_number(struct fake_fault *fault, const char *word)
{
    const struct {
        const char *key;
        uint64_t *value;
        enum fake_fault_kind kind;
    } keys[] = {{"nth=", &fault->nth, FAULT_FAIL},
                {"size=", &fault->bytes, FAULT_FAIL},
                {"error=", &fault->error, FAULT_FAIL},
                {"seconds=", &fault->seconds, FAULT_HANG}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const size_t length = strlen(keys[i].key);
        if (fault->kind != keys[i].kind || strncmp(word, keys[i].key, length) != 0)
            continue;
        char *end = NULL;
        *keys[i].value = strtoull(word + length, &end, 10);
        return word[length] >= '0' && word[length] <= '9' && *end == '\0' && *keys[i].value > 0;
    }
    return false;
}

static bool read_words(char *line, struct fake_fault *fault)
{
    static const struct {
        const char *name;
        enum fake_fault_kind kind;
    } kinds[] = {{"fail", FAULT_FAIL}, {"hang", FAULT_HANG}, {"missing", FAULT_MISSING}, {"suspend-without-effect", FAULT_SUSPEND}, {"alloc-form", FAULT_ALLOC_FORM}};
    char *rest = NULL;
    const char *word = strtok_r(line, " \t\n", &rest);
    for (size_t i = 0; word != NULL && i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(word, kinds[i].name) == 0)
            fault->kind = kinds[i].kind;
    if (fault->kind == FAULT_NONE)
        return false;
    if (has_function(fault)) {
        word = strtok_r(NULL, " \t\n", &rest);
        if (word == NULL || (size_t)snprintf(fault->function, sizeof fault->function, "%s", word) >= sizeof fault->function)
            return false;
    }
    while ((word = strtok_r(NULL, " \t\n", &rest)) != NULL)
        if (!set_number(fault, word))
            return false;
    return fault->kind != FAULT_HANG || fault->seconds > 0;
}

bool fault_parse(const char *line, struct fake_fault *fault, char *why, size_t room)
{
    char copy[256];
    snprintf(copy, sizeof copy, "%s", line);
    *fault = (struct fake_fault){.error = 2}; /* CUDA_ERROR_OUT_OF_MEMORY */
    if (!read_words(copy, fault)) {
        snprintf(why, room, "fault is \"%s\", must be none | " FAULT_FORMS, line);
        return false;
    }
    if (!function_known(fault)) {
        snprintf(why, room, "fault: found function \"%s\", must be one of shim/fake/%s", fault->function,
                 fault->kind == FAULT_MISSING ? "cuda/symbols.def" : "common/faultable.def");
        return false;
    }
    return true;
}
