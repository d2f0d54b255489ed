/* fault.c - reads the line of a fault. */
#define _GNU_SOURCE
#include "fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

bool fault_parse(const char *line, struct fake_fault *fault)
{
    static const struct {
        const char *name;
        enum fake_fault_kind kind;
    } kinds[] = {{"fail", FAULT_FAIL}, {"hang", FAULT_HANG}, {"missing", FAULT_MISSING}, {"suspend-without-effect", FAULT_SUSPEND}};
    char copy[256], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", line);
    const char *word = strtok_r(copy, " \t\n", &rest);
    *fault = (struct fake_fault){.error = 2}; /* CUDA_ERROR_OUT_OF_MEMORY */
    for (size_t i = 0; word != NULL && i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(word, kinds[i].name) == 0)
            fault->kind = kinds[i].kind;
    if (fault->kind == FAULT_NONE)
        return false;
    if (fault->kind != FAULT_SUSPEND) {
        word = strtok_r(NULL, " \t\n", &rest);
        if (word == NULL || (size_t)snprintf(fault->function, sizeof fault->function, "%s", word) >= sizeof fault->function)
            return false;
    }
    while ((word = strtok_r(NULL, " \t\n", &rest)) != NULL)
        if (!set_number(fault, word))
            return false;
    return fault->kind != FAULT_HANG || fault->seconds > 0;
}
