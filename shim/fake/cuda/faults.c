/* faults.c - calls that go wrong by a script: the page's faults, and the process's own (TANGRAM_FAKE_FAULTS).
 *
 * Functions that are missing, or came with a later driver, are missing from the start: the loader runs this library's
 * constructor before a symbol can be looked up, and it queries the daemon by a connection of its own.
 */
#define _GNU_SOURCE
#include "missing.h"
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

static struct fake_fault own[FAKE_FAULTS];
static uint32_t owned;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A script that is not understood ends the program: a test must not pass because nothing went wrong. */
static _Noreturn void refuse(const char *what, const char *why)
{
    fprintf(stderr, "fake driver: %s: %s\n", what, why);
    abort();
}

static void read_own(void)
{
    const char *text = getenv("TANGRAM_FAKE_FAULTS");
    char copy[1024], why[512], *rest = NULL;
    const int length = snprintf(copy, sizeof copy, "%s", text == NULL ? "" : text);
    snprintf(why, sizeof why, "found %d bytes, must be at most %zu and %u faults", length, sizeof copy - 1, FAKE_FAULTS);
    for (char *line = strtok_r(copy, ";", &rest); line != NULL; line = strtok_r(NULL, ";", &rest))
        if (length >= (int)sizeof copy || owned == FAKE_FAULTS || !fault_parse(line, &own[owned++], why, sizeof why))
            refuse("TANGRAM_FAKE_FAULTS", why);
}

/* The page's faults, then the process's own; NULL behind the last. */
static struct fake_fault *fault_at(const struct client *client, uint32_t number)
{
    pthread_once(&once, read_own);
    const uint32_t shared = client->page == NULL ? 0 : atomic_load(&client->page->faults);
    if (number < shared && number < FAKE_FAULTS)
        return &client->page->fault[number];
    number -= shared < FAKE_FAULTS ? shared : FAKE_FAULTS;
    return number < owned ? &own[number] : NULL;
}

static CUresult apply(struct fake_fault *fault, const char *function, uint64_t bytes)
{
    if (fault_hang(fault, function) || fault->kind != FAULT_FAIL || strcmp(fault->function, function) != 0)
        return CUDA_SUCCESS;
    if (fault->bytes != 0 && fault->bytes != bytes)
        return CUDA_SUCCESS;
    const uint64_t number = atomic_fetch_add(&fault->calls, 1) + 1;
    return fault->nth == 0 || fault->nth == number ? (CUresult)fault->error : CUDA_SUCCESS;
}

CUresult fault(const char *function, uint64_t bytes)
{
    struct fake_fault *of;
    for (uint32_t i = 0; (of = fault_at(&cuda.client, i)) != NULL; i++)
        TRY(apply(of, function, bytes));
    return CUDA_SUCCESS;
}

bool symbol_missing(const struct client *client, const char *symbol)
{
    const struct fake_fault *of;
    for (uint32_t i = 0; (of = fault_at(client, i)) != NULL; i++)
        if (fault_hides(of, symbol))
            return true;
    return false;
}

static struct client at_load;
static int version = 13000; /* of the driver that was there when the library was loaded */

int driver_cuda_version(void)
{
    return cuda.client.page == NULL ? version : (int)cuda.client.page->cuda_version;
}

/* A per-thread twin goes with its function. */
static bool hidden_at_load(const char *symbol)
{
    char name[64];
    snprintf(name, sizeof name, "%s", symbol);
    char *suffix = strlen(name) > 5 ? name + strlen(name) - 5 : name;
    if (strcmp(suffix, "_ptds") == 0 || strcmp(suffix, "_ptsz") == 0)
        *suffix = '\0';
    return symbol_missing(&at_load, name) || (at_load.page != NULL && !branch_has_cuda(at_load.page, name));
}

__attribute__((constructor)) static void hide_missing(void)
{
    if (client_open(&at_load, FAKE_CTL) == 0) /* else cuInit reports it */
        version = (int)at_load.page->cuda_version;
    if (!hide_symbols(hidden_at_load))
        refuse("missing", "the loader's table of symbols cannot be changed");
    client_close(&at_load);
}
