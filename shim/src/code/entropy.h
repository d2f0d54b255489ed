/* entropy.h - the two codes of zstd: FSE, whose table maps each state to a symbol and the next states, and Huffman's. */
#ifndef TANGRAM_ENTROPY_H
#define TANGRAM_ENTROPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HUFFMAN_BITS_MOST = 11, FSE_LOG_MOST = 9 };

struct input {
    const unsigned char *at, *end;
};

static inline size_t left(const struct input *in)
{
    return (size_t)(in->end - in->at);
}

/* A number of 0 to 8 bytes, little-endian. False: the input ends before. */
bool take(struct input *in, size_t bytes, uint64_t *number);

/* Bits that are read from the end of the data to its beginning, as everything coded is; the tables' descriptions are read the other way. */
struct bits {
    const unsigned char *data;
    int64_t at; /* backward: how many are not read yet; below 0, more were requested than there are. Forward: how many were read */
    size_t length;
};

bool bits_from_end(struct bits *bits, const unsigned char *data, size_t length);
uint64_t bits_back(struct bits *bits, unsigned count); /* at most 57; those that are not there are 0 */

struct fse_cell {
    uint8_t symbol, bits;
    uint16_t base;
};

struct fse {
    unsigned log;
    bool known;
    struct fse_cell cell[1 << FSE_LOG_MOST];
};

/* A table from how many cells each symbol has, -1 for less than one; from its description; of one symbol that takes no bits. */
void fse_fill(struct fse *table, const int16_t *share, unsigned symbols, unsigned log);
bool fse_read(struct fse *table, struct input *in, unsigned symbols_most, unsigned log_most);
void fse_constant(struct fse *table, uint8_t symbol);

static inline unsigned fse_first(const struct fse *table, struct bits *bits)
{
    return (unsigned)bits_back(bits, table->log);
}

static inline unsigned fse_next(const struct fse *table, unsigned state, struct bits *bits)
{
    return table->cell[state].base + (unsigned)bits_back(bits, table->cell[state].bits);
}

struct huffman {
    unsigned bits; /* 0: no tree yet */
    struct huffman_cell {
        uint8_t symbol, bits;
    } cell[1 << HUFFMAN_BITS_MOST];
};

bool huffman_read(struct huffman *tree, struct input *in);
bool huffman_stream(const struct huffman *tree, const unsigned char *data, size_t length, unsigned char *out, size_t count);

#endif
