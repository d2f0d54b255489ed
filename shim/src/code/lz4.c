/* lz4.c - a block of LZ4: runs of bytes as they are, each followed by a copy of what came out before.
 *
 * Form: the LZ4 block format description of its authors (lz4_Block_format.md). The last run has no copy behind it.
 */
#include "code/unpack.h"

#include <stdbool.h>
#include <string.h>

enum { MORE = 15, LEAST_COPY = 4 };

struct packed {
    const unsigned char *at, *end;
};

/* A length of 15 goes on in bytes, the last of which is not 255. */
static bool length_read(struct packed *from, size_t *length)
{
    unsigned char next = 255;
    if (*length != MORE)
        return true;
    while (next == 255) {
        if (from->at == from->end)
            return false;
        next = *from->at++;
        *length += next;
    }
    return true;
}

size_t unpack_lz4(const unsigned char *packed, size_t length, unsigned char *out, size_t capacity)
{
    struct packed from = {packed, packed + length};
    size_t done = 0;
    while (from.at < from.end) {
        const unsigned char token = *from.at++;
        size_t run = token >> 4, copy = token & MORE;
        if (!length_read(&from, &run) || run > (size_t)(from.end - from.at) || run > capacity - done)
            return 0;
        memcpy(out + done, from.at, run);
        from.at += run;
        done += run;
        if (from.at == from.end)
            return done;
        if (from.end - from.at < 2)
            return 0;
        const size_t back = from.at[0] | (size_t)from.at[1] << 8;
        from.at += 2;
        if (!length_read(&from, &copy) || back == 0 || back > done || copy + LEAST_COPY > capacity - done)
            return 0;
        for (copy += LEAST_COPY; copy > 0; copy--, done++) /* a copy may read what it has just written */
            out[done] = out[done - back];
    }
    return 0;
}
