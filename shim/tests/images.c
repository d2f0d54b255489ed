/* images.c - unpacks, and reads the images of modules, as the library does: a process that tests drive, so that the sanitizers see it.
 *
 * In: what to do (z: zstd, l: LZ4, i: an image), how many bytes may come out, how many follow, those bytes. Numbers have 8 bytes as the
 * machine has them. Out: how many bytes came out and the bytes; of an image five numbers: variables, code, function, known, heap.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../src/code/image.h"
#include "../src/code/unpack.h"

static void unpack(int how, uint64_t capacity, const unsigned char *data, uint64_t length)
{
    unsigned char *out = malloc(capacity + (capacity == 0));
    if (out == NULL)
        abort();
    const uint64_t done = how == 'z' ? unpack_zstd(data, length, out, capacity) : unpack_lz4(data, length, out, capacity);
    fwrite(&done, sizeof done, 1, stdout);
    fwrite(out, 1, done, stdout);
    free(out);
}

static void read_image(unsigned capability, const unsigned char *data, uint64_t length)
{
    const struct image_needs needs = image_read(data, length, capability);
    const uint64_t numbers[] = {needs.variables, needs.code, needs.function, needs.known, needs.heap};
    fwrite(numbers, sizeof numbers, 1, stdout);
}

int main(void)
{
    uint64_t numbers[2];
    for (int how; (how = getchar()) != EOF;) {
        if (fread(numbers, sizeof numbers, 1, stdin) != 1)
            return 1;
        unsigned char *data = malloc(numbers[1] + (numbers[1] == 0)); /* exactly: a byte too far is seen */
        if (data == NULL || fread(data, 1, numbers[1], stdin) != numbers[1])
            return 1;
        if (how == 'i')
            read_image((unsigned)numbers[0], data, numbers[1]);
        else
            unpack(how, numbers[0], data, numbers[1]);
        free(data);
        fflush(stdout);
    }
    return 0;
}
