/* fault.c - reads the line of a fault. */
#define _GNU_SOURCE
#include "missing.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FORMS                                                                                                                  \
    "none | fail FUNCTION [nth=N] [size=BYTES] [error=CURESULT] | hang FUNCTION seconds=N | missing FUNCTION | "              \
    "suspend-without-effect | alloc-form"

bool fault_of_page(const struct fake_page *page, enum fake_fault_kind kind)
{
    const uint32_t count = atomic_load(&page->faults);
    for (uint32_t i = 0; i < count && i < FAKE_FAULTS; i++)
        if (page->fault[i].kind == kind)
            return true;
    return false;
}

bool fault_hang(const struct fake_fault *fault, const char *function)
{
    if (fault->kind != FAULT_HANG || strcmp(fault->function, function) != 0)
        return false;
    struct timespec left = {.tv_sec = (time_t)fault->seconds};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
    return true;
}

/* Whether the fault can have an effect on that function; a fault without effect would let a test pass for nothing. */
static bool function_known(const struct fake_fault *fault)
{
    if (fault->kind == FAULT_MISSING)
        return is_cuda_name(fault->function);
#define F(name) if (strcmp(fault->function, #name) == 0) return true;
#define N(name) if (fault->kind == FAULT_HANG && strcmp(fault->function, #name) == 0) return true;
#include "faultable.def"
    return false;
}

/* One key=value into its place. */
static bool set_number(struct fake_fault *fault, char *word)
{
    char *number = strchr(word, '='), *end = NULL;
    uint64_t *place = NULL;
    if (number == NULL)
        return false;
    *number++ = '\0';
#define KIND(...)
#define KEY(key, its_kind, field) if (fault->kind == its_kind && strcmp(word, key) == 0) place = &fault->field;
#include "fault_kinds.def"
    if (place == NULL)
        return false;
    *place = strtoull(number, &end, 10);
    return number[0] >= '0' && number[0] <= '9' && *end == '\0' && *place > 0;
}

static bool read_words(char *line, struct fake_fault *fault)
{
    char *rest = NULL, *word = strtok_r(line, " \t\n", &rest);
    if (word == NULL)
        return false;
#define KIND(name, its_kind) if (strcmp(word, name) == 0) fault->kind = its_kind;
#define KEY(...)
#include "fault_kinds.def"
    if (fault->kind <= FAULT_MISSING) { /* those of a function */
        word = strtok_r(NULL, " \t\n", &rest);
        if (word == NULL || (size_t)snprintf(fault->function, sizeof fault->function, "%s", word) >= sizeof fault->function)
            return false;
    }
    while ((word = strtok_r(NULL, " \t\n", &rest)) != NULL)
        if (!set_number(fault, word))
            return false;
    return fault->kind != FAULT_NONE && (fault->kind != FAULT_HANG || fault->seconds > 0);
}

bool fault_parse(const char *line, struct fake_fault *fault, char *why, size_t capacity)
{
    char copy[256];
    snprintf(copy, sizeof copy, "%s", line);
    *fault = (struct fake_fault){.error = 2}; /* CUDA_ERROR_OUT_OF_MEMORY */
    const bool understood = read_words(copy, fault), known = fault->function[0] == '\0' || function_known(fault);
    if (!understood)
        snprintf(why, capacity, "fault is \"%s\", must be " FORMS, line);
    else if (!known)
        snprintf(why, capacity, "fault: found function \"%s\", must be one of shim/fake/%s", fault->function,
                 fault->kind == FAULT_MISSING ? "cuda/symbols.def" : "common/faultable.def");
    return understood && known;
}
