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

struct block {
    struct span *backing; /* address space, aligned to 2 MiB */
    unsigned live;
    uint64_t object; /* shared with other processes under this number, 0 = not */
};

static void list_append(struct place_list *list, struct place *place)
{
    place->before = list->last;
    place->after = NULL;
    *(list->last != NULL ? &list->last->after : &list->first) = place;
    list->last = place;
}

static void list_remove(struct place_list *list, struct place *place)
{
    *(place->before != NULL ? &place->before->after : &list->first) = place->after;
    *(place->after != NULL ? &place->after->before : &list->last) = place->before;
}

static struct place *best_fit(const struct pages *pages, uint64_t bytes)
{
    struct place *best = NULL;
    for (struct place *range = pages->free.first; range != NULL; range = range->after)
        if (range->bytes >= bytes && (best == NULL || range->bytes < best->bytes))
            best = range;
    return best;
}

/* A new block as one free range. */
static struct place *block_new(struct pages *pages, int device)
{
    struct block *block = calloc(1, sizeof *block);
    struct place *range = calloc(1, sizeof *range);
    const bool taken = block != NULL && range != NULL && take(device, BLOCK_BYTES);
    struct span *backing = taken ? arena_take(BLOCK_BYTES, BLOCK_BYTES) : NULL;
    if (backing == NULL) {
        if (taken)
            give(device, BLOCK_BYTES);
        free(block);
        free(range);
        return NULL;
    }
    block->backing = backing;
    *range = (struct place){.block = block, .bytes = BLOCK_BYTES};
    list_append(&pages->free, range);
    return range;
}

static void block_gone(struct block *block, int device)
{
    if (block->object != 0) { /* somebody else may still read these pages: never use them again */
        object_release(block->object);
        free(block->backing);
    } else {
        give(device, BLOCK_BYTES);
        arena_give(block->backing);
    }
    free(block);
}

/* Cuts the range to so many bytes; the rest is a new free range. Without memory for that, the request keeps the whole. */
static void cut(struct pages *pages, struct place *range, uint64_t bytes)
{
    struct place *rest = range->bytes > bytes ? calloc(1, sizeof *rest) : NULL;
    if (rest == NULL)
        return;
    *rest = (struct place){.block = range->block, .at = range->at + bytes, .bytes = range->bytes - bytes};
    range->bytes = bytes;
    list_append(&pages->free, rest);
}

static struct place *own_pages(int device, uint64_t bytes)
{
    struct place *place = calloc(1, sizeof *place);
    if (place != NULL && take(device, bytes)) {
        place->bytes = bytes;
        return place;
    }
    free(place);
    return NULL;
}

struct place *place_new(struct pages *pages, int device, uint64_t bytes)
{
    const uint64_t size = rounded(bytes, GRAIN);
    struct place *place;
    if (size >= BLOCK_BYTES) {
        place = own_pages(device, rounded(size, BLOCK_BYTES));
    } else {
        place = best_fit(pages, size);
        if (place == NULL)
            place = block_new(pages, device);
        if (place != NULL) {
            list_remove(&pages->free, place);
            cut(pages, place, size);
            place->block->live++;
        }
    }
    if (place != NULL)
        list_append(&pages->live, place);
    return place;
}

/* Takes the free neighbours into the range. */
static void merge(struct pages *pages, struct place *range)
{
    for (struct place *other = pages->free.first, *next; other != NULL; other = next) {
        next = other->after;
        const bool below = other->at + other->bytes == range->at, above = range->at + range->bytes == other->at;
        if (other->block != range->block || !(below || above))
            continue;
        range->at = below ? other->at : range->at;
        range->bytes += other->bytes;
        list_remove(&pages->free, other);
        free(other);
    }
}

void place_free(struct pages *pages, int device, struct place *place)
{
    list_remove(&pages->live, place);
    if (place->block == NULL) {
        give(device, place->bytes);
        free(place);
        return;
    }
    merge(pages, place);
    if (--place->block->live == 0) {
        block_gone(place->block, device);
        free(place);
    } else {
        list_append(&pages->free, place);
    }
}

void pages_free(struct pages *pages, int device)
{
    while (pages->live.first != NULL)
        place_free(pages, device, pages->live.first);
}

uint64_t place_offset(const struct place *place)
{
    return place->block->backing->offset + place->at;
}

uint64_t place_share(const struct place *place, int device)
{
    struct block *block = place->block;
    return object_share(block->backing->offset, BLOCK_BYTES, device, &block->object) ? block->object : 0;
}
