/* entropy.c - reading what zstd codes with FSE and Huffman's code. Form: RFC 8878, sections 4.1 and 4.2, whose terms are used here. */
#include "code/entropy.h"

#include <string.h>

enum { SYMBOLS = 256, WEIGHT_LOG_MOST = 6 };

static unsigned highest_bit(uint32_t of)
{
    return 31U - (unsigned)__builtin_clz(of);
}

bool take(struct input *in, size_t bytes, uint64_t *number)
{
    if (left(in) < bytes)
        return false;
    *number = 0;
    for (size_t i = 0; i < bytes; i++)
        *number |= (uint64_t)in->at[i] << (8 * i);
    in->at += bytes;
    return true;
}

/* Bits from..from+count, little-endian; outside of the data they are 0. */
static uint64_t bits_at(const struct bits *bits, int64_t from, unsigned count)
{
    uint64_t value = 0;
    const int64_t byte = from >> 3;
    if (count == 0)
        return 0;
    if (byte >= 0 && (uint64_t)byte + sizeof value <= bits->length)
        memcpy(&value, bits->data + byte, sizeof value);
    else
        for (unsigned i = 0; i < sizeof value; i++)
            if (byte + i >= 0 && (uint64_t)(byte + i) < bits->length)
                value |= (uint64_t)bits->data[byte + i] << (8 * i);
    return value >> (from & 7) & ((UINT64_C(1) << count) - 1);
}

static uint64_t bits_forward(struct bits *bits, unsigned count)
{
    uint64_t value = bits_at(bits, bits->at, count);
    bits->at += count;
    return value;
}

uint64_t bits_back(struct bits *bits, unsigned count)
{
    bits->at -= count;
    return bits_at(bits, bits->at, count);
}

/* The last byte's highest 1 marks the end. */
bool bits_from_end(struct bits *bits, const unsigned char *data, size_t length)
{
    if (length == 0 || data[length - 1] == 0)
        return false;
    *bits = (struct bits){data, (int64_t)(8 * (length - 1) + highest_bit(data[length - 1])), length};
    return true;
}

/* From how often each symbol comes, in cells; -1: less than one. */
void fse_fill(struct fse *table, const int16_t *share, unsigned symbols, unsigned log)
{
    const uint32_t size = 1U << log, step = (size >> 1) + (size >> 3) + 3;
    uint16_t next[SYMBOLS];
    uint32_t at = 0, top = size;
    for (unsigned symbol = 0; symbol < symbols; symbol++) {
        next[symbol] = (uint16_t)(share[symbol] < 0 ? 1 : share[symbol]);
        if (share[symbol] < 0)
            table->cell[--top].symbol = (uint8_t)symbol;
    }
    for (unsigned symbol = 0; symbol < symbols; symbol++)
        for (int i = 0; i < share[symbol]; i++) {
            table->cell[at].symbol = (uint8_t)symbol;
            do
                at = (at + step) & (size - 1);
            while (at >= top);
        }
    for (uint32_t i = 0; i < size; i++) {
        const uint16_t state = next[table->cell[i].symbol]++;
        table->cell[i].bits = (uint8_t)(log - highest_bit(state));
        table->cell[i].base = (uint16_t)(((uint32_t)state << table->cell[i].bits) - size);
    }
    table->log = log;
    table->known = true;
}

/* Shares are written with as many bits as what is left can need, and zeros in runs. */
bool fse_read(struct fse *table, struct input *in, unsigned symbols_most, unsigned log_most)
{
    struct bits bits = {in->at, 0, left(in)};
    int16_t share[SYMBOLS] = {0};
    const unsigned log = 5 + (unsigned)bits_forward(&bits, 4);
    unsigned symbols = 0;
    int32_t free_cells = 1 << log;
    if (log > log_most)
        return false;
    while (free_cells > 0 && symbols < symbols_most) {
        const unsigned count = highest_bit((uint32_t)free_cells + 1) + 1;
        const int32_t low = (1 << (count - 1)) - 1, short_ones = (1 << count) - 1 - (free_cells + 1);
        int32_t value = (int32_t)bits_forward(&bits, count);
        if ((value & low) < short_ones) {
            bits.at--;
            value &= low;
        } else if (value > low)
            value -= short_ones;
        free_cells -= value == 0 ? 1 : value - 1;
        share[symbols++] = (int16_t)(value - 1);
        unsigned zeros = value == 1 ? 3 : 0; /* behind a 0 stands how many more follow; 3: and then again */
        while (zeros == 3 && symbols <= symbols_most) {
            zeros = (unsigned)bits_forward(&bits, 2);
            symbols += zeros;
        }
    }
    const size_t bytes = ((size_t)bits.at + 7) / 8;
    if (free_cells != 0 || symbols > symbols_most || bytes > left(in))
        return false;
    in->at += bytes;
    fse_fill(table, share, symbols, log);
    return true;
}

void fse_constant(struct fse *table, uint8_t symbol)
{
    table->log = 0;
    table->known = true;
    table->cell[0] = (struct fse_cell){symbol, 0, 0};
}

/* Weights that are coded themselves: two states alternate until the bits are used up. */
static unsigned weights_coded(uint8_t *weight, const unsigned char *data, size_t length)
{
    struct input in = {data, data + length};
    struct fse table = {0};
    struct bits bits;
    unsigned count = 0;
    if (!fse_read(&table, &in, SYMBOLS, WEIGHT_LOG_MOST) || !bits_from_end(&bits, in.at, left(&in)))
        return 0;
    unsigned state[2] = {fse_first(&table, &bits), 0};
    state[1] = fse_first(&table, &bits);
    for (unsigned which = 0; bits.at >= 0 && count < SYMBOLS - 2; which ^= 1) {
        weight[count++] = table.cell[state[which]].symbol;
        state[which] = fse_next(&table, state[which], &bits);
        if (bits.at < 0)
            weight[count++] = table.cell[state[which ^ 1]].symbol;
    }
    return bits.at < 0 ? count : 0;
}

/* The last weight is what makes the sum of 2^(weight - 1) a power of two. Rare symbols come first in the table. */
static bool huffman_fill(struct huffman *tree, uint8_t *weight, unsigned count)
{
    uint32_t sum = 0, at = 0;
    for (unsigned i = 0; i < count; i++) {
        if (weight[i] > HUFFMAN_BITS_MOST)
            return false;
        sum += weight[i] == 0 ? 0 : 1U << (weight[i] - 1);
    }
    if (sum == 0 || highest_bit(sum) + 1 > HUFFMAN_BITS_MOST)
        return false;
    const unsigned bits = highest_bit(sum) + 1;
    const uint32_t rest = (1U << bits) - sum;
    if ((rest & (rest - 1)) != 0)
        return false;
    weight[count++] = (uint8_t)(highest_bit(rest) + 1);
    for (unsigned now = 1; now <= bits; now++)
        for (unsigned symbol = 0; symbol < count; symbol++)
            for (uint32_t i = 0; weight[symbol] == now && i < 1U << (now - 1); i++)
                tree->cell[at++] = (struct huffman_cell){(uint8_t)symbol, (uint8_t)(bits + 1 - now)};
    tree->bits = bits;
    return true;
}

bool huffman_read(struct huffman *tree, struct input *in)
{
    uint8_t weight[SYMBOLS] = {0};
    uint64_t head;
    if (!take(in, 1, &head))
        return false;
    const unsigned coded = head < 128 ? (unsigned)head : 0, count = head < 128 ? 0 : (unsigned)head - 127;
    const size_t bytes = coded != 0 ? coded : (count + 1) / 2;
    if (bytes == 0 || left(in) < bytes)
        return false;
    for (unsigned i = 0; i < count; i++)
        weight[i] = i % 2 == 0 ? in->at[i / 2] >> 4 : in->at[i / 2] & 15;
    const unsigned weights = coded != 0 ? weights_coded(weight, in->at, coded) : count;
    in->at += bytes;
    return weights != 0 && huffman_fill(tree, weight, weights);
}

bool huffman_stream(const struct huffman *tree, const unsigned char *data, size_t length, unsigned char *out, size_t count)
{
    struct bits bits;
    if (!bits_from_end(&bits, data, length))
        return false;
    for (size_t i = 0; i < count; i++) {
        const struct huffman_cell *cell = &tree->cell[bits_at(&bits, bits.at - tree->bits, tree->bits)];
        bits.at -= cell->bits;
        out[i] = cell->symbol;
    }
    return bits.at == 0;
}

