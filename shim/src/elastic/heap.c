/* heap.c - see heap.h. The tree is a treap: ordered by size and address, and a heap by a mix of the address, which keeps it shallow whatever
 * the order of the calls is.
 */
#include "elastic/heap.h"

#include <stdlib.h>

static uint64_t priority_of(const struct range *range)
{
    uint64_t mixed = range->at ^ range->at >> 29;
    mixed *= UINT64_C(0xBF58476D1CE4E5B9);
    return mixed ^ mixed >> 32;
}

static bool is_before(const struct range *one, const struct range *other)
{
    return one->bytes != other->bytes ? one->bytes < other->bytes : one->at < other->at;
}

/* Parts a tree into what is before the range and what is after. */
static void split(struct range *tree, const struct range *range, struct range **before, struct range **after)
{
    while (tree != NULL)
        if (is_before(tree, range)) {
            *before = tree;
            before = &tree->right;
            tree = tree->right;
        } else {
            *after = tree;
            after = &tree->left;
            tree = tree->left;
        }
    *before = *after = NULL;
}

/* Puts two trees together, all of the first before all of the second. */
static void merge(struct range **tree, struct range *first, struct range *second)
{
    while (first != NULL && second != NULL)
        if (priority_of(first) > priority_of(second)) {
            *tree = first;
            tree = &first->right;
            first = first->right;
        } else {
            *tree = second;
            tree = &second->left;
            second = second->left;
        }
    *tree = first != NULL ? first : second;
}

void heap_open(struct heap *heap, struct range *range)
{
    heap->free_bytes += range->bytes;
    range->in = heap;
    struct range **place = &heap->root;
    while (*place != NULL && priority_of(*place) >= priority_of(range))
        place = is_before(*place, range) ? &(*place)->right : &(*place)->left;
    split(*place, range, &range->left, &range->right);
    *place = range;
}

void heap_close(struct heap *heap, struct range *range)
{
    heap->free_bytes -= range->bytes;
    range->in = NULL;
    struct range **place = &heap->root;
    while (*place != range)
        place = is_before(*place, range) ? &(*place)->right : &(*place)->left;
    merge(place, range->left, range->right);
}

struct range *heap_best_fit(const struct heap *heap, uint64_t bytes)
{
    struct range *best = NULL;
    for (struct range *tree = heap->root; tree != NULL;)
        if (tree->bytes >= bytes) {
            best = tree;
            tree = tree->left;
        } else {
            tree = tree->right;
        }
    return best;
}

struct range *heap_region(uint64_t at, uint64_t bytes)
{
    struct range *range = malloc(sizeof *range);
    if (range != NULL)
        *range = (struct range){.at = at, .bytes = bytes};
    return range;
}

static struct range *range_new(struct heap *heap)
{
    struct range *range = heap->spare != NULL ? heap->spare : malloc(sizeof *range);
    heap->spare = NULL;
    return range;
}

static void range_end(struct heap *heap, struct range *range)
{
    if (heap->spare == NULL)
        heap->spare = range;
    else
        free(range);
}

struct range *heap_take(struct heap *heap, uint64_t bytes)
{
    struct range *range = heap_best_fit(heap, bytes), *rest;
    if (range == NULL)
        return NULL;
    if (range->bytes > bytes) {
        if ((rest = range_new(heap)) == NULL)
            return NULL;
        heap_close(heap, range);
        *rest = (struct range){.at = range->at + bytes, .bytes = range->bytes - bytes, .below = range, .above = range->above};
        if (rest->above != NULL)
            rest->above->below = rest;
        range->above = rest;
        range->bytes = bytes;
        heap_open(heap, rest);
    } else {
        heap_close(heap, range);
    }
    range->state = RANGE_LIVE;
    return range;
}

/* The lower of two neighbours has the other's bytes from here on. */
static void absorb(struct heap *heap, struct range *lower)
{
    struct range *upper = lower->above;
    lower->bytes += upper->bytes;
    lower->above = upper->above;
    if (upper->above != NULL)
        upper->above->below = lower;
    range_end(heap, upper);
}

struct range *heap_give(struct heap *heap, struct range *range)
{
    range->state = RANGE_FREE;
    if (range->above != NULL && range->above->in == heap) {
        heap_close(heap, range->above);
        absorb(heap, range);
    }
    if (range->below != NULL && range->below->in == heap) {
        range = range->below;
        heap_close(heap, range);
        absorb(heap, range);
    }
    heap_open(heap, range);
    return range;
}

uint64_t heap_spare_bytes(const struct heap *heap, uint64_t regions_bytes)
{
    const uint64_t most = regions_bytes / HEAP_FREE_PART;
    return most > heap->free_bytes ? most - heap->free_bytes : 0;
}

uint64_t heap_region_bytes(const struct heap *heap, uint64_t regions_bytes, uint64_t unit)
{
    const uint64_t wanted = unit + heap_spare_bytes(heap, regions_bytes), most = wanted < HEAP_REGION_MOST ? wanted : HEAP_REGION_MOST;
    return most < unit ? unit : most / unit * unit;
}
