/* pages.c - what small requests lose on the GPU: 2 MiB blocks, shared by best fit.
 *
 * Measured (H200, driver 580.159.04; bench/granularity). Sizes are multiples of 512 bytes. A request of 2 MiB or more has
 * pages of its own. A smaller one takes the start of the smallest free range that fits; of several equal ones, the range
 * that has had its extent for longest. Only if none fits, a new block is taken, and a block goes back with its last request.
 *
 * This is written from the measurements alone and shares nothing with the library's account of the same pages: a mistake
 * in one of them shows as a difference.
 */
#include "internal.h"

#include <stdlib.h>

struct range {
    struct physical *block;
    uint64_t at, bytes; /* in the block */
    struct range *next;
};

static void append(struct range **list, struct range *range)
{
    while (*list != NULL)
        list = &(*list)->next;
    range->next = NULL;
    *list = range;
}

/* Takes it off the list; NULL: none fits. */
static struct range *best_fit(struct range **list, uint64_t bytes)
{
    struct range **best = NULL;
    for (; *list != NULL; list = &(*list)->next)
        if ((*list)->bytes >= bytes && (best == NULL || (*list)->bytes < (*best)->bytes))
            best = list;
    struct range *found = best != NULL ? *best : NULL;
    if (found != NULL)
        *best = found->next;
    return found;
}

static struct range *block_new(int device)
{
    struct range *range = calloc(1, sizeof *range);
    struct physical *block = range != NULL ? physical_new(device, BLOCK_BYTES, BLOCK_BYTES) : NULL;
    if (block == NULL) {
        free(range);
        return NULL;
    }
    *range = (struct range){.block = block, .bytes = BLOCK_BYTES};
    return range;
}

struct physical *range_take(struct range **list, int device, uint64_t bytes, uint64_t *at)
{
    struct range *range = best_fit(list, bytes);
    if (range == NULL)
        range = block_new(device);
    CHECK(range != NULL, NULL);
    struct physical *block = range->block;
    *at = range->at;
    range->at += bytes;
    range->bytes -= bytes;
    if (range->bytes > 0)
        append(list, range);
    else
        free(range);
    return block;
}

void range_give(struct range **list, struct physical *block, uint64_t at, uint64_t bytes)
{
    struct range *whole = NULL;
    for (struct range **link = list, *other = *link; other != NULL; other = *link) {
        const bool below = other->at + other->bytes == at, above = at + bytes == other->at;
        if (other->block != block || !(below || above)) {
            link = &other->next;
            continue;
        }
        at = below ? other->at : at;
        bytes += other->bytes;
        *link = other->next;
        free(whole);
        whole = other;
    }
    if (bytes < BLOCK_BYTES && whole == NULL)
        whole = malloc(sizeof *whole);
    if (bytes == BLOCK_BYTES) {
        physical_drop(block);
        free(whole);
    } else if (whole != NULL) { /* else there is no memory to remember it: the block stays taken */
        *whole = (struct range){.block = block, .at = at, .bytes = bytes};
        append(list, whole);
    }
}
