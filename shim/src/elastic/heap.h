/* heap.h - which ranges of shared regions are free: best fit, merged. It calls nothing but the allocator, and knows no driver. */
#ifndef TANGRAM_HEAP_H
#define TANGRAM_HEAP_H

#include <stdbool.h>
#include <stdint.h>

enum range_state {
    RANGE_FREE,    /* in the heap's tree, or all of a region that is kept */
    RANGE_LIVE,    /* the program's */
    RANGE_LEAVING, /* the program freed it; the GPU may still use it */
};

/* A part of a region, from its neighbour below to its neighbour above. */
struct range {
    uint64_t at, bytes;
    struct range *below, *above; /* in the region, by address */
    struct range *left, *right;  /* free: in the tree */
    struct heap *in;             /* of the tree; NULL: in none */
    enum range_state state;
    uint64_t requested;    /* as the program stated it: no more than bytes */
    uint64_t number;       /* of the allocation; none has it again */
    void *context;         /* in which it was allocated, and with which it ends */
    uint64_t freed;        /* pooled.c: in a stream, at that number; 0: not, or the stream has got there */
    struct range *older, *newer; /* of that stream's, by `freed` */
};

struct heap {
    struct range *root;  /* of free ranges, by size and then by address; a heap by a mix of their addresses */
    struct range *spare; /* one that is not in use, so that alternating calls use no allocator */
    uint64_t free_bytes; /* of the ranges in the tree */
};

/* All of a region, free and in no tree yet. NULL: there is no memory to note it. */
struct range *heap_region(uint64_t at, uint64_t bytes);
void heap_open(struct heap *heap, struct range *range);  /* a free range may be taken from now on */
void heap_close(struct heap *heap, struct range *range); /* or not any more */
/* Takes the smallest free range of so many bytes, of equal ones the lowest; what is left of it stays free. Its state is RANGE_LIVE.
 * NULL: none is large enough, or there is no memory to note the rest. */
struct range *heap_take(struct heap *heap, uint64_t bytes);
struct range *heap_best_fit(const struct heap *heap, uint64_t bytes); /* what it would take, and leaves it there */
/* Frees a range that is in no tree. Its neighbours in the same tree become one with it; the range that results, which begins where the lowest of them
 * began and is in the tree. */
struct range *heap_give(struct heap *heap, struct range *range);

/* Of a new region for a request, from which others of its kind are served later: the largest multiple of `unit`, which is the request or the page
 * that it needs, for which no more than an eighth of the kind's regions is free then, and at most HEAP_REGION_MOST; at least one unit. */
#define HEAP_REGION_MOST ((uint64_t)128 << 20)
enum { HEAP_FREE_PART = 8 };
uint64_t heap_spare_bytes(const struct heap *heap, uint64_t regions_bytes); /* how much more may be free */
uint64_t heap_region_bytes(const struct heap *heap, uint64_t regions_bytes, uint64_t unit);

#endif
