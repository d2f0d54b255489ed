/* fault.c - reads the line of a fault. */
#define _GNU_SOURCE
#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FORMS                                                                                                                  \
    "none | fail FUNCTION [nth=N] [size=BYTES] [error=CURESULT] | hang FUNCTION seconds=N | missing FUNCTION | "              \
    "suspend-without-effect | alloc-form"

static const struct kind {
    const char *name;
    enum fake_fault_kind kind;
    bool has_function;
} kinds[] = {
    {"fail", FAULT_FAIL, true},
    {"hang", FAULT_HANG, true},
    {"missing", FAULT_MISSING, true},
    {"suspend-without-effect", FAULT_SUSPEND, false},
    {"alloc-form", FAULT_ALLOC_FORM, false},
};
#define KINDS (sizeof kinds / sizeof kinds[0])

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

/* Whether anything can go wrong with that function as the fault says; a fault without effect would let a test pass for nothing. */
static bool function_known(const struct fake_fault *fault)
{
    static const char *const faultable[] = {
#define F(function) #function,
#include "faultable.def"
#undef F
    };
    static const char *const nvml[] = {
#define N(function) #function,
#include "hanging.def"
#undef N
    };
    if (fault->kind == FAULT_MISSING)
        return is_cuda_name(fault->function);
    for (size_t i = 0; i < FAULTABLE_COUNT; i++)
        if (strcmp(fault->function, faultable[i]) == 0)
            return true;
    for (size_t i = 0; fault->kind == FAULT_HANG && i < sizeof nvml / sizeof nvml[0]; i++)
        if (strcmp(fault->function, nvml[i]) == 0)
            return true;
    return false;
}

/* One key=value into its place. */
static bool set_number(struct fake_fault *fault, char *word)
{
    const struct {
        const char *key;
        enum fake_fault_kind kind;
        uint64_t *value;
    } keys[] = {{"nth", FAULT_FAIL, &fault->nth},
                {"size", FAULT_FAIL, &fault->bytes},
                {"error", FAULT_FAIL, &fault->error},
                {"seconds", FAULT_HANG, &fault->seconds}};
    char *number = strchr(word, '='), *end = NULL;
    if (number == NULL)
        return false;
    *number++ = '\0';
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (fault->kind == keys[i].kind && strcmp(word, keys[i].key) == 0) {
            *keys[i].value = strtoull(number, &end, 10);
            return number[0] >= '0' && number[0] <= '9' && *end == '\0' && *keys[i].value > 0;
        }
    return false;
}

static bool read_words(char *line, struct fake_fault *fault)
{
    char *rest = NULL, *word = strtok_r(line, " \t\n", &rest);
    const struct kind *kind = kinds;
    while (word != NULL && kind < kinds + KINDS && strcmp(word, kind->name) != 0)
        kind++;
    if (word == NULL || kind == kinds + KINDS)
        return false;
    fault->kind = kind->kind;
    if (kind->has_function) {
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
    const bool understood = read_words(copy, fault), known = fault->function[0] == '\0' || function_known(fault);
    if (!understood)
        snprintf(why, room, "fault is \"%s\", must be " FORMS, line);
    else if (!known)
        snprintf(why, room, "fault: found function \"%s\", must be one of shim/fake/%s", fault->function,
                 fault->kind == FAULT_MISSING ? "cuda/symbols.def" : "common/faultable.def");
    return understood && known;
}
