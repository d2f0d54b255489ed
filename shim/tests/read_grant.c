/* read_grant.c - the library's own reader of grants for tests in other languages: returns what it understood, or why it refused. */
#include "process.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tangram tangram; /* what grant.c needs, and nothing else of the library */

void warn(enum warning kind, const char *text, ...)
{
    (void)kind, (void)text;
}

void burst_look(void)
{
}

/* Lines of text into `answer`: "clear yes" or "clear no" and one "uuid mib" a GPU, or "refused: why". The text is copied to memory of
 * its exact size, so that a sanitizer sees a read past its end. */
void read_grant(const char *text, size_t length, char *answer, size_t capacity)
{
    static struct grant grant;
    char why[256], *exact = malloc(length + 1);
    memset(&grant, 0, sizeof grant);
    if (exact == NULL)
        abort();
    memcpy(exact, text, length);
    bool good = grant_read(exact, length, &grant, why, sizeof why);
    free(exact);
    if (!good) {
        snprintf(answer, capacity, "refused: %s", why);
        return;
    }
    size_t at = (size_t)snprintf(answer, capacity, "clear %s", grant.clear ? "yes" : "no");
    for (unsigned i = 0; i < grant.gpus && at < capacity; i++) {
        at += (size_t)snprintf(answer + at, capacity - at, "\n");
        for (unsigned j = 0; j < 16 && at < capacity; j++)
            at += (size_t)snprintf(answer + at, capacity - at, "%02x", grant.gpu[i].uuid[j]);
        if (at < capacity)
            at += (size_t)snprintf(answer + at, capacity - at, " %llu", (unsigned long long)(grant.gpu[i].limit_bytes / MIB));
    }
}
