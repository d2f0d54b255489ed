/* fault.c - reads the line of a fault. */
#include "fault.h"
#include "words.h"

#include <stdio.h>
#include <string.h>

static const struct form {
    const char *name, *arguments;
    enum fake_fault_kind kind;
    bool has_function;
} forms[] = {
    {"fail", " FUNCTION [nth=N] [size=BYTES] [error=CURESULT]", FAULT_FAIL, true},
    {"hang", " FUNCTION seconds=N", FAULT_HANG, true},
    {"missing", " FUNCTION", FAULT_MISSING, true},
    {"suspend-without-effect", "", FAULT_SUSPEND, false},
    {"alloc-form", "", FAULT_ALLOC_FORM, false},
};
#define FORMS (sizeof forms / sizeof forms[0])

bool fault_of_page(const struct fake_page *page, enum fake_fault_kind kind)
{
    const uint32_t count = atomic_load(&page->faults);
    for (uint32_t i = 0; i < count && i < FAKE_FAULTS; i++)
        if (page->fault[i].kind == kind)
            return true;
    return false;
}

/* Whether anything can go wrong with that function as the fault says; a fault without effect would let a test pass for nothing. */
static bool function_known(const struct fake_fault *fault)
{
    static const char *const faultable[] = {
#define F(function) #function,
#include "faultable.def"
#undef F
    };
    if (fault->kind == FAULT_MISSING)
        return is_cuda_name(fault->function);
    for (size_t i = 0; i < FAULTABLE_COUNT; i++)
        if (strcmp(fault->function, faultable[i]) == 0)
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
    struct text why = {.at = (char[1]){0}, .room = 1}; /* the line's own sentence says it */
    char *equals = strchr(word, '=');
    if (equals == NULL)
        return false;
    *equals = '\0';
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (fault->kind == keys[i].kind && strcmp(word, keys[i].key) == 0)
            return parse_number(word, equals + 1, 1, UINT64_MAX, keys[i].value, &why);
    return false;
}

static bool read_words(char *line, struct fake_fault *fault)
{
    const char *name = next_word(&line), *function;
    const struct form *form = forms;
    while (name != NULL && form < forms + FORMS && strcmp(name, form->name) != 0)
        form++;
    if (name == NULL || form == forms + FORMS)
        return false;
    fault->kind = form->kind;
    if (form->has_function) {
        function = next_word(&line);
        if (function == NULL || (size_t)snprintf(fault->function, sizeof fault->function, "%s", function) >= sizeof fault->function)
            return false;
    }
    for (char *word = next_word(&line); word != NULL; word = next_word(&line))
        if (!set_number(fault, word))
            return false;
    return fault->kind != FAULT_HANG || fault->seconds > 0;
}

bool fault_parse(const char *line, struct fake_fault *fault, char *why, size_t room)
{
    char copy[256];
    struct text sentence = {.at = why, .room = room};
    snprintf(copy, sizeof copy, "%s", line);
    *fault = (struct fake_fault){.error = 2}; /* CUDA_ERROR_OUT_OF_MEMORY */
    if (!read_words(copy, fault)) {
        say(&sentence, "fault is \"%s\", must be none", line);
        for (size_t i = 0; i < FORMS; i++)
            say(&sentence, " | %s%s", forms[i].name, forms[i].arguments);
        return false;
    }
    if (fault->function[0] == '\0' || function_known(fault))
        return true;
    say(&sentence, "fault: found function \"%s\", must be one of shim/fake/%s", fault->function,
        fault->kind == FAULT_MISSING ? "cuda/symbols.def" : "common/faultable.def");
    return false;
}
