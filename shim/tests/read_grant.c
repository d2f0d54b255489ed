/* read_grant.c - the library's own reader of grants as a program: prints what it understood, or why it refused. */
#include "process.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct tangram tangram; /* what grant.c stands on, and nothing else of the library */

void warn_once(const char *text, ...)
{
    (void)text;
}

int main(int count, char **words)
{
    static char text[65536], why[256];
    FILE *file = count == 2 ? fopen(words[1], "r") : NULL;
    if (file == NULL) {
        fprintf(stderr, "usage: %s GRANT\n", words[0]);
        return 2;
    }
    size_t length = fread(text, 1, sizeof text, file);
    fclose(file);
    struct grant *grant = &tangram.grant;
    if (!grant_read(text, length, grant, why, sizeof why)) {
        printf("refused: %s\n", why);
        return 0;
    }
    printf("clear %s\n", grant->clear ? "yes" : "no");
    for (unsigned i = 0; i < grant->cards; i++) {
        for (unsigned j = 0; j < 16; j++)
            printf("%02x", grant->card[i].uuid[j]);
        printf(" %llu\n", (unsigned long long)(grant->card[i].limit_bytes / MIB));
    }
    return 0;
}
