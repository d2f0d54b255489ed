/* lines.h - reading the small text files of a grant directory, line by line. Nothing is accepted that is not exactly as it is specified. */
#ifndef TANGRAM_LINES_H
#define TANGRAM_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LINES_TEXT_LIMIT = 64 * 1024 }; /* bytes of a file */

struct lines {
    const char *at, *end; /* what is left */
    const char *line;     /* the line taken last, without its newline */
    size_t length;
    unsigned number;
    char *why; /* a sentence, after a failure */
    size_t why_bytes;
};

struct lines lines_of(const char *text, size_t length, char *why, size_t why_bytes);
bool lines_refuse(struct lines *in, const char *expected); /* false, with the sentence */
bool lines_next(struct lines *in, const char *expected);   /* false: there is no whole line, or a NUL in it */
bool lines_end(struct lines *in);                          /* false: something comes after the last line */
bool lines_is(const struct lines *in, const char *text);
/* The value after "key ", in place; NULL when the line is another one. */
const char *lines_field(struct lines *in, const char *key, size_t *length);
bool text_is(const char *value, size_t length, const char *text);
/* " key=" and digits, without a sign or leading zeros; *at goes behind them. */
bool text_number(const char **at, const char *end, const char *key, uint64_t most, uint64_t *value);

/* Into `text`, of LINES_TEXT_LIMIT + 1 bytes. False: errno says why. */
bool lines_load(const char *path, char *text, size_t *length);

#endif
