/* lines.c - see lines.h. */
#include "lines.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct lines lines_of(const char *text, size_t length, char *why, size_t why_bytes)
{
    return (struct lines){.at = text, .end = text + length, .line = text, .why = why, .why_bytes = why_bytes};
}

bool lines_refuse(struct lines *in, const char *expected)
{
    int shown = in->length > 60 ? 60 : (int)in->length;
    snprintf(in->why, in->why_bytes, "line %u: found \"%.*s\", expected %s", in->number, shown, in->line, expected);
    return false;
}

bool lines_next(struct lines *in, const char *expected)
{
    in->number++;
    in->line = in->at;
    const char *stop = memchr(in->at, '\n', (size_t)(in->end - in->at));
    in->length = (size_t)((stop ? stop : in->end) - in->at);
    if (stop == NULL || memchr(in->line, 0, in->length) != NULL)
        return lines_refuse(in, expected);
    in->at = stop + 1;
    return true;
}

bool lines_end(struct lines *in)
{
    return in->at == in->end || (lines_next(in, "nothing after end") && lines_refuse(in, "nothing after end"));
}

const char *lines_field(struct lines *in, const char *key, size_t *length)
{
    size_t prefix = strlen(key);
    if (in->length <= prefix + 1 || memcmp(in->line, key, prefix) != 0 || in->line[prefix] != ' ')
        return NULL;
    *length = in->length - prefix - 1;
    return in->line + prefix + 1;
}

bool text_is(const char *value, size_t length, const char *text)
{
    return length == strlen(text) && memcmp(value, text, length) == 0;
}

bool lines_is(const struct lines *in, const char *text)
{
    return text_is(in->line, in->length, text);
}

bool text_number(const char **at, const char *end, const char *key, uint64_t most, uint64_t *value)
{
    size_t prefix = strlen(key);
    if ((size_t)(end - *at) <= prefix || memcmp(*at, key, prefix) != 0)
        return false;
    *at += prefix;
    const char *first = *at;
    for (*value = 0; *at < end && **at >= '0' && **at <= '9'; (*at)++) {
        *value = *value * 10 + (uint64_t)(**at - '0');
        if (*value > most)
            return false;
    }
    return *at > first && (*first != '0' || *at == first + 1);
}

bool lines_load(const char *path, char *text, size_t *length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got = 0;
    *length = 0;
    while (*length <= LINES_TEXT_LIMIT && (got = read(fd, text + *length, LINES_TEXT_LIMIT + 1 - *length)) != 0) {
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            break;
        *length += (size_t)got;
    }
    const int failed = errno;
    close(fd);
    errno = *length > LINES_TEXT_LIMIT ? EFBIG : failed;
    return got >= 0 && *length <= LINES_TEXT_LIMIT;
}
