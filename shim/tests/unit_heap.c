/* unit_heap.c - the heap of small requests against the obvious slow version: a map of bytes, searched from end to end. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/elastic/heap.h"

#undef NDEBUG

enum { REGIONS = 4, UNITS = 600, LIVE = 400, STEPS = 20000, APART = 1000 /* region addresses never touch */ };

static unsigned char used[REGIONS][UNITS];
static struct live {
    struct range *range;
    unsigned region, start, count;
} live[LIVE];
static unsigned lives;
static struct heap heap;

static uint64_t address(unsigned region, unsigned unit)
{
    return (uint64_t)(region + 1) * APART + unit;
}

/* Best fit over every free range of every region, of equal ones the lowest. */
static bool slow_take(unsigned count, struct live *taken)
{
    unsigned best = UNITS + 1;
    for (unsigned region = 0; region < REGIONS; region++)
        for (unsigned at = 0, length; at < UNITS; at += length + 1) {
            for (length = 0; at + length < UNITS && !used[region][at + length];)
                length++;
            if (length >= count && length < best) {
                best = length;
                *taken = (struct live){.region = region, .start = at, .count = count};
            }
        }
    if (best <= UNITS)
        memset(&used[taken->region][taken->start], 1, count);
    return best <= UNITS;
}

/* The free range around a place, from its first unit on. */
static unsigned slow_free(unsigned region, unsigned at, unsigned *start)
{
    unsigned length = 0;
    while (at > 0 && !used[region][at - 1])
        at--;
    *start = at;
    while (at + length < UNITS && !used[region][at + length])
        length++;
    return length;
}

static void take(unsigned count)
{
    struct live slow;
    const bool fits = slow_take(count, &slow);
    struct range *range = heap_take(&heap, count);
    assert((range != NULL) == fits);
    if (!fits)
        return;
    assert(range->at == address(slow.region, slow.start) && range->bytes == count && range->state == RANGE_LIVE);
    slow.range = range;
    live[lives++] = slow;
}

static void give(unsigned which)
{
    const struct live was = live[which];
    unsigned start;
    live[which] = live[--lives];
    memset(&used[was.region][was.start], 0, was.count);
    const unsigned length = slow_free(was.region, was.start, &start);
    const struct range *merged = heap_give(&heap, was.range);
    assert(merged->at == address(was.region, start) && merged->bytes == length);
    assert((merged->below == NULL) == (start == 0) && (merged->above == NULL) == (start + length == UNITS));
}

/* Everything that is neither live nor in a free range would be lost. */
static uint64_t free_in(const struct range *tree)
{
    return tree == NULL ? 0 : tree->bytes + free_in(tree->left) + free_in(tree->right);
}

/* A process that allocates requests of `unit` bytes and frees none: what is free of its regions, when each is made. */
static void regions_of_one_size(uint64_t unit, uint64_t largest)
{
    struct heap grown = {0};
    uint64_t regions_bytes = 0, made = 0;
    while (regions_bytes < 64 * HEAP_REGION_MOST && made < largest) {
        made = heap_region_bytes(&grown, regions_bytes, unit);
        assert(made % unit == 0 && made >= unit && (made == unit || made <= HEAP_REGION_MOST));
        regions_bytes += made;
        assert((made - unit) * HEAP_FREE_PART <= regions_bytes);
    }
    assert(made == largest);
}

static void regions_grow_with_what_there_is(void)
{
    const uint64_t mib = 1 << 20;
    struct heap fragmented = {.free_bytes = 200 * mib};
    regions_of_one_size(2 * mib, 128 * mib);
    regions_of_one_size(20 * mib, 120 * mib);
    regions_of_one_size(32 * mib, 128 * mib);
    assert(heap_region_bytes(&fragmented, 1600 * mib, 20 * mib) == 20 * mib); /* an eighth is free already */
    assert(heap_region_bytes(&fragmented, 1920 * mib, 20 * mib) == 60 * mib);
    assert(heap_spare_bytes(&fragmented, 1920 * mib) == 40 * mib && heap_spare_bytes(&fragmented, 100 * mib) == 0);
}

int main(void)
{
    regions_grow_with_what_there_is();
    struct range *whole[REGIONS];
    srand(3);
    for (unsigned i = 0; i < REGIONS; i++) {
        whole[i] = heap_region(address(i, 0), UNITS);
        assert(whole[i] != NULL);
        heap_open(&heap, whole[i]);
    }
    for (unsigned step = 0; step < STEPS; step++) {
        const bool grows = step / 2000 % 2 == 0; /* full at times, and nearly empty at others */
        if (lives < LIVE && (lives == 0 || rand() % 10 < (grows ? 7 : 3)))
            take(1 + (unsigned)rand() % (rand() % 8 == 0 ? UNITS : 12));
        else
            give((unsigned)rand() % lives);
        uint64_t taken = 0;
        for (unsigned i = 0; i < lives; i++)
            taken += live[i].count;
        assert(free_in(heap.root) + taken == REGIONS * UNITS && heap.free_bytes == REGIONS * UNITS - taken);
    }
    while (lives > 0)
        give(lives - 1);
    for (unsigned i = 0; i < REGIONS; i++) { /* a region's first range is there as long as the region */
        assert(whole[i]->at == address(i, 0) && whole[i]->bytes == UNITS);
        heap_close(&heap, whole[i]);
        free(whole[i]);
    }
    assert(heap.root == NULL);
    free(heap.spare);
    puts("unit_heap: ok");
    return 0;
}
