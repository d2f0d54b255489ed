/* faults.c - calls that go wrong because a script says so: the page's faults, and the process's own (TANGRAM_FAKE_FAULTS). */
#define _GNU_SOURCE
#include "fault.h"
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static struct fake_fault own[FAKE_FAULTS];
static uint32_t owned;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A script that is not understood ends the program: a test must not pass because nothing went wrong. */
static void read_own(void)
{
    const char *text = getenv("TANGRAM_FAKE_FAULTS");
    char copy[1024], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text == NULL ? "" : text);
    for (char *line = strtok_r(copy, ";", &rest); line != NULL && owned < FAKE_FAULTS; line = strtok_r(NULL, ";", &rest)) {
        if (!fault_parse(line, &own[owned])) {
            fprintf(stderr, "fake driver: TANGRAM_FAKE_FAULTS has \"%s\", must be %s\n", line, FAULT_FORMS);
            abort();
        }
        owned++;
    }
}

static CUresult apply(struct fake_fault *fault, const char *function, uint64_t bytes)
{
    if ((fault->kind != FAULT_FAIL && fault->kind != FAULT_HANG) || strcmp(fault->function, function) != 0)
        return CUDA_SUCCESS;
    if (fault->kind == FAULT_HANG) {
        struct timespec left = {.tv_sec = (time_t)fault->seconds};
        while (nanosleep(&left, &left) != 0 && errno == EINTR)
            continue;
        return CUDA_SUCCESS;
    }
    if (fault->bytes != 0 && fault->bytes != bytes)
        return CUDA_SUCCESS;
    const uint64_t number = atomic_fetch_add(&fault->calls, 1) + 1;
    return fault->nth == 0 || fault->nth == number ? (CUresult)fault->error : CUDA_SUCCESS;
}

CUresult fault(const char *function, uint64_t bytes)
{
    pthread_once(&once, read_own);
    const uint32_t shared = cuda.client.page == NULL ? 0 : atomic_load(&cuda.client.page->faults);
    for (uint32_t i = 0; i < shared && i < FAKE_FAULTS; i++)
        TRY(apply(&cuda.client.page->fault[i], function, bytes));
    for (uint32_t i = 0; i < owned; i++)
        TRY(apply(&own[i], function, bytes));
    return CUDA_SUCCESS;
}

bool fault_missing(const char *function)
{
    bool missing = false;
    pthread_once(&once, read_own);
    const uint32_t shared = cuda.client.page == NULL ? 0 : atomic_load(&cuda.client.page->faults);
    for (uint32_t i = 0; i < shared && i < FAKE_FAULTS; i++)
        missing |= cuda.client.page->fault[i].kind == FAULT_MISSING && strcmp(cuda.client.page->fault[i].function, function) == 0;
    for (uint32_t i = 0; i < owned; i++)
        missing |= own[i].kind == FAULT_MISSING && strcmp(own[i].function, function) == 0;
    return missing;
}
