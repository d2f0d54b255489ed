/* zstd.c - frames of zstd, as far as fatbins have them: no dictionary, and checksums are passed over.
 *
 * Form: RFC 8878, whose terms and section numbers are used here. A frame is a list of blocks; a compressed block has literals (Huffman
 * coded) and sequences (lengths of a run of literals and of a copy, and how far back it lies, each coded with an FSE table). Tables and the
 * last three offsets persist from block to block. All output is in one buffer, so that a copy reads from there and there is no window.
 */
#include "code/entropy.h"
#include "code/unpack.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK_MOST = 128 << 10, LITERAL_CODES = 36, COPY_CODES = 53, OFFSET_CODES = 32 };
enum kind { PREDEFINED, RLE, FSE, REPEAT };
enum block { BLOCK_RAW, BLOCK_RLE, BLOCK_COMPRESSED };
enum literals { LITERALS_RAW, LITERALS_RLE, LITERALS_COMPRESSED, LITERALS_TREELESS };

struct decoder {
    struct fse literal, offset, copy;
    struct huffman tree;
    size_t last[3]; /* offsets */
    unsigned char literals[BLOCK_MOST];
    size_t literal_count;
    unsigned char *out;
    size_t done, capacity;
};

/* -- literals (3.1.1.3.1) -- */

static bool literals_coded(struct decoder *of, struct input *in, size_t bytes, bool tree, bool four)
{
    if (bytes > left(in))
        return false;
    struct input part = {in->at, in->at + bytes};
    in->at += bytes;
    if ((tree && !huffman_read(&of->tree, &part)) || of->tree.bits == 0)
        return false;
    if (!four)
        return huffman_stream(&of->tree, part.at, left(&part), of->literals, of->literal_count);
    uint64_t sizes[4];
    for (unsigned i = 0; i < 3; i++)
        if (!take(&part, 2, &sizes[i]))
            return false;
    if (sizes[0] + sizes[1] + sizes[2] > left(&part))
        return false;
    sizes[3] = left(&part) - sizes[0] - sizes[1] - sizes[2];
    const size_t each = (of->literal_count + 3) / 4;
    if (3 * each > of->literal_count)
        return false;
    for (unsigned i = 0; i < 4; i++) {
        if (!huffman_stream(&of->tree, part.at, sizes[i], of->literals + i * each, i < 3 ? each : of->literal_count - 3 * each))
            return false;
        part.at += sizes[i];
    }
    return true;
}

/* The header's kind and form take four bits; then one size, or the number of literals and of the bytes that encode them. */
static bool literals_read(struct decoder *of, struct input *in)
{
    uint64_t head;
    if (in->at == in->end)
        return false;
    const enum literals kind = in->at[0] & 3;
    const unsigned form = in->at[0] >> 2 & 3;
    if (kind == LITERALS_RAW || kind == LITERALS_RLE) {
        static const struct {
            uint8_t bytes, from;
        } plain[] = {{1, 3}, {2, 4}, {1, 3}, {3, 4}};
        if (!take(in, plain[form].bytes, &head) || (of->literal_count = head >> plain[form].from) > BLOCK_MOST)
            return false;
        const size_t bytes = kind == LITERALS_RAW ? of->literal_count : 1;
        if (left(in) < bytes)
            return false;
        if (kind == LITERALS_RAW)
            memcpy(of->literals, in->at, bytes);
        else
            memset(of->literals, in->at[0], of->literal_count);
        in->at += bytes;
        return true;
    }
    static const struct {
        uint8_t bytes, bits;
    } coded[] = {{3, 10}, {3, 10}, {4, 14}, {5, 18}};
    const unsigned bits = coded[form].bits;
    if (!take(in, coded[form].bytes, &head))
        return false;
    of->literal_count = head >> 4 & ((1U << bits) - 1);
    return of->literal_count <= BLOCK_MOST &&
           literals_coded(of, in, head >> (4 + bits) & ((1U << bits) - 1), kind == LITERALS_COMPRESSED, form != 0);
}

/* -- sequences (3.1.1.3.2) -- */

static const int16_t literal_shares[LITERAL_CODES] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
                                                      2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int16_t copy_shares[COPY_CODES] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1,  1,  1,  1, 1,
                                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  -1, -1, -1, -1, -1, -1, -1};
static const int16_t offset_shares[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
static const uint8_t literal_bits[LITERAL_CODES] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  1,  1,
                                                    1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint8_t copy_bits[COPY_CODES] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0, 0,
                                              0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

/* The codes' first values follow one another. */
static uint32_t first_value(const uint8_t *bits, unsigned code, uint32_t least)
{
    for (unsigned i = 0; i < code; i++)
        least += 1U << bits[i];
    return least;
}

static bool table_read(struct fse *table, struct input *in, enum kind kind, const int16_t *shares, unsigned symbols, unsigned log, unsigned codes,
                       unsigned log_most)
{
    uint64_t symbol;
    switch (kind) {
    case PREDEFINED:
        fse_fill(table, shares, symbols, log);
        return true;
    case RLE:
        if (!take(in, 1, &symbol) || symbol >= codes)
            return false;
        fse_constant(table, (uint8_t)symbol);
        return true;
    case FSE:
        return fse_read(table, in, codes, log_most);
    case REPEAT:
        return table->known;
    }
    return false;
}

/* Values 1 to 3 name one of the last offsets, the next one of them where no literals come before. */
static size_t offset_of(struct decoder *of, size_t value, bool literals)
{
    size_t offset;
    const size_t which = value > 3 ? 3 : value - literals; /* 0..2: of the last; 3: a new one, or the last less one */
    if (value > 3)
        offset = value - 3;
    else if (which == 3)
        offset = of->last[0] - 1;
    else
        offset = of->last[which];
    if (which == 0)
        return offset;
    if (which != 1)
        of->last[2] = of->last[1];
    of->last[1] = of->last[0];
    return of->last[0] = offset;
}

static bool copy_out(struct decoder *of, size_t *used, size_t literals, size_t copied, size_t offset)
{
    if (literals > of->literal_count - *used || literals > of->capacity - of->done)
        return false;
    memcpy(of->out + of->done, of->literals + *used, literals);
    of->done += literals;
    *used += literals;
    if (copied > of->capacity - of->done || (copied > 0 && (offset == 0 || offset > of->done)))
        return false;
    if (offset >= copied)
        memcpy(of->out + of->done, of->out + of->done - offset, copied);
    else
        for (size_t i = 0; i < copied; i++)
            of->out[of->done + i] = of->out[of->done + i - offset];
    of->done += copied;
    return true;
}

static bool sequences_run(struct decoder *of, const struct input *in, uint64_t count)
{
    struct bits bits;
    uint32_t literal_first[LITERAL_CODES], copy_first[COPY_CODES];
    size_t used = 0;
    if (!bits_from_end(&bits, in->at, left(in)))
        return false;
    for (unsigned code = 0; code < LITERAL_CODES; code++)
        literal_first[code] = first_value(literal_bits, code, 0);
    for (unsigned code = 0; code < COPY_CODES; code++)
        copy_first[code] = first_value(copy_bits, code, 3);
    unsigned literal = fse_first(&of->literal, &bits), offset = fse_first(&of->offset, &bits), copy = fse_first(&of->copy, &bits);
    for (uint64_t i = 0; i < count && bits.at >= 0; i++) {
        const unsigned back = of->offset.cell[offset].symbol, copies = of->copy.cell[copy].symbol, runs = of->literal.cell[literal].symbol;
        const size_t value = ((size_t)1 << back) + bits_back(&bits, back);
        const size_t copied = copy_first[copies] + bits_back(&bits, copy_bits[copies]);
        const size_t literals = literal_first[runs] + bits_back(&bits, literal_bits[runs]);
        if (!copy_out(of, &used, literals, copied, offset_of(of, value, literals > 0)))
            return false;
        if (i + 1 == count)
            break;
        literal = fse_next(&of->literal, literal, &bits);
        copy = fse_next(&of->copy, copy, &bits);
        offset = fse_next(&of->offset, offset, &bits);
    }
    return bits.at == 0 && copy_out(of, &used, of->literal_count - used, 0, 0);
}

static bool block_compressed(struct decoder *of, struct input in)
{
    uint64_t count, more, kinds;
    size_t used = 0;
    if (!literals_read(of, &in) || !take(&in, 1, &count))
        return false;
    if (count == 0)
        return copy_out(of, &used, of->literal_count, 0, 0);
    if (count >= 128 && !take(&in, count == 255 ? 2 : 1, &more))
        return false;
    if (count >= 128)
        count = count == 255 ? more + 0x7f00 : ((count - 128) << 8) + more;
    return take(&in, 1, &kinds) &&
           table_read(&of->literal, &in, kinds >> 6 & 3, literal_shares, LITERAL_CODES, 6, LITERAL_CODES, 9) &&
           table_read(&of->offset, &in, kinds >> 4 & 3, offset_shares, 29, 5, OFFSET_CODES, 8) &&
           table_read(&of->copy, &in, kinds >> 2 & 3, copy_shares, COPY_CODES, 6, COPY_CODES, 9) && sequences_run(of, &in, count);
}

/* -- frames (3.1.1) -- */

static bool blocks_read(struct decoder *of, struct input *in)
{
    uint64_t head;
    do {
        if (!take(in, 3, &head))
            return false;
        const size_t size = head >> 3;
        const enum block kind = head >> 1 & 3;
        const size_t bytes = kind == BLOCK_RLE ? 1 : size;
        if (left(in) < bytes || (kind != BLOCK_COMPRESSED && size > of->capacity - of->done))
            return false;
        if (kind == BLOCK_RAW)
            memcpy(of->out + of->done, in->at, size);
        else if (kind == BLOCK_RLE)
            memset(of->out + of->done, in->at[0], size);
        else if (kind != BLOCK_COMPRESSED || !block_compressed(of, (struct input){in->at, in->at + size}))
            return false;
        of->done += kind == BLOCK_COMPRESSED ? 0 : size;
        in->at += bytes;
    } while ((head & 1) == 0);
    return true;
}

static bool frame_read(struct decoder *of, struct input *in)
{
    static const uint8_t dictionary_bytes[] = {0, 1, 2, 4}, content_bytes[] = {0, 2, 4, 8};
    uint64_t magic, about, passed;
    if (!take(in, 4, &magic) || magic != 0xfd2fb528 || !take(in, 1, &about))
        return false;
    const bool single = (about >> 5 & 1) != 0, checksum = (about >> 2 & 1) != 0;
    const size_t content = about >> 6 == 0 && single ? 1 : content_bytes[about >> 6];
    of->literal.known = of->offset.known = of->copy.known = false;
    of->tree.bits = 0;
    memcpy(of->last, (const size_t[]){1, 4, 8}, sizeof of->last);
    return take(in, !single + dictionary_bytes[about & 3], &passed) && take(in, content, &passed) && blocks_read(of, in) &&
           take(in, checksum ? 4 : 0, &passed);
}

size_t unpack_zstd(const unsigned char *packed, size_t length, unsigned char *out, size_t capacity)
{
    struct input in = {packed, packed + length};
    struct decoder *of = malloc(sizeof *of);
    bool whole = of != NULL && length > 0;
    if (of != NULL) {
        of->out = out;
        of->capacity = capacity;
        of->done = 0;
    }
    while (whole && in.at < in.end)
        whole = frame_read(of, &in);
    const size_t done = whole ? of->done : 0;
    free(of);
    return done;
}
