/* unit_pages.c - what is charged for small requests, against the obvious slow version of the driver's rule: a list of all free ranges.
 * And what arrays take, against what was measured of the driver.
 *
 * Compiled with the library's own sources, so that the sanitizers see them. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/memory/memory.h"

#undef NDEBUG

enum { SLOW_PAGES = 96, LIVE = 1000, STEPS = 6000 };

static unsigned char slow_used[SLOW_PAGES][PAGE_GRAINS];
static unsigned slow_live[SLOW_PAGES];
static unsigned slow_since[SLOW_PAGES][PAGE_GRAINS], slow_changes; /* when the free range that begins there got its extent */

struct live {
    uint64_t at, fast_at;
    unsigned page, start, grains;
};

/* Best fit over every range of every page in use, at its start; of equal ones that of the longest standing. */
static struct live slow_take(unsigned grains)
{
    struct live best = {.page = SLOW_PAGES};
    unsigned best_length = PAGE_GRAINS + 1, best_since = 0;
    for (unsigned page = 0; page < SLOW_PAGES; page++)
        for (unsigned at = 0, length; slow_live[page] > 0 && at < PAGE_GRAINS; at += length + 1) {
            for (length = 0; at + length < PAGE_GRAINS && !slow_used[page][at + length];)
                length++;
            if (length >= grains && (length < best_length || (length == best_length && slow_since[page][at] < best_since))) {
                best_length = length;
                best_since = slow_since[page][at];
                best.page = page;
                best.start = at;
            }
        }
    for (unsigned page = 0; best.page == SLOW_PAGES && page < SLOW_PAGES; page++)
        if (slow_live[page] == 0)
            best.page = page;
    assert(best.page < SLOW_PAGES);
    best.grains = grains;
    best.at = (UINT64_C(0x7f00) << 32) + best.page * PAGE + (uint64_t)best.start * PAGE_GRAIN;
    memset(&slow_used[best.page][best.start], 1, grains);
    slow_live[best.page]++;
    if (best.start + grains < PAGE_GRAINS)
        slow_since[best.page][best.start + grains] = ++slow_changes;
    return best;
}

static void slow_give(const struct live *was)
{
    memset(&slow_used[was->page][was->start], 0, was->grains);
    slow_live[was->page]--;
    unsigned start = was->start;
    while (start > 0 && !slow_used[was->page][start - 1])
        start--;
    slow_since[was->page][start] = ++slow_changes;
}

static unsigned slow_pages(void)
{
    unsigned pages = 0;
    for (unsigned page = 0; page < SLOW_PAGES; page++)
        pages += slow_live[page] > 0;
    return pages;
}

/* The longest free range of the page, counted grain by grain. */
static unsigned slow_largest(const struct page *page)
{
    unsigned largest = 0;
    for (unsigned at = 0, length = 0; at < PAGE_GRAINS; at++) {
        length = page->used[at / 64] >> at % 64 & 1 ? 0 : length + 1;
        largest = length > largest ? length : largest;
    }
    return largest;
}

/* A search passes over a page only if it has no such range, and after one in vain none is left that the next would go through. `all`: the ranges
 * are counted, too, which takes a while. */
static void pages_without_a_free_range_are_skipped(const struct pages *pages, unsigned grains, bool fits, bool all)
{
    for (unsigned i = 0; i < PAGE_BUCKETS; i++)
        for (const struct page *page = pages->bucket[i]; page != NULL; page = page->next) {
            assert(fits || page->largest < grains);
            assert(!all || page->largest >= slow_largest(page));
        }
}

/* What is charged is what the GPU loses, after each of 6,000 random steps, also without addresses. */
static void what_is_charged_is_what_the_driver_takes(unsigned seed, unsigned most_grains)
{
    static struct live live[LIVE];
    static struct pages reported, guessed;
    unsigned count = 0, charged = 0, placed = 0;
    for (unsigned step = 0; step < STEPS; step++) {
        if (count < LIVE && slow_pages() < SLOW_PAGES - 1 && rand_r(&seed) % 100 < 52) {
            unsigned grains = 1 + (unsigned)rand_r(&seed) % most_grains;
            bool fits = pages_fit(&reported, &reported, (uint64_t)grains * PAGE_GRAIN);
            pages_without_a_free_range_are_skipped(&reported, grains, fits, step % 100 == 0);
            struct live new = slow_take(grains);
            bool fresh = pages_put(&reported, &reported, new.at, (uint64_t)grains * PAGE_GRAIN);
            assert(fits == !fresh);
            charged += fresh;
            placed += pages_place(&guessed, &guessed, (uint64_t)grains * PAGE_GRAIN, true, &new.fast_at) == PLACE_FRESH;
            live[count++] = new;
        } else if (count > 0) {
            unsigned i = (unsigned)rand_r(&seed) % count;
            slow_give(&live[i]);
            charged -= pages_end(&reported, live[i].at) == PAGE_EMPTY;
            placed -= pages_end(&guessed, live[i].fast_at) == PAGE_EMPTY;
            live[i] = live[--count];
        }
        assert(charged == slow_pages());
        assert(placed == slow_pages());
    }
    while (count > 0) {
        slow_give(&live[--count]);
        charged -= pages_end(&reported, live[count].at) == PAGE_EMPTY;
        placed -= pages_end(&guessed, live[count].fast_at) == PAGE_EMPTY;
    }
    assert(charged == 0 && placed == 0);
}

static void requests_of_two_groups_share_no_page(void)
{
    static struct pages pages;
    int one = 0, two = 0;
    uint64_t first, at;
    assert(pages_place(&pages, &one, 512, false, &at) == PLACE_NONE);
    assert(pages_place(&pages, &one, 512, true, &first) == PLACE_FRESH);
    assert(pages_place(&pages, &one, 512, false, &at) == PLACE_SHARED);
    assert(pages_place(&pages, &two, 512, false, &at) == PLACE_NONE && !pages_fit(&pages, &two, 512));
    assert(pages_end(&pages, at) == PAGE_STAYS);
    assert(pages_end(&pages, UINT64_C(1) << 40) == PAGE_UNKNOWN);
    assert(pages_end(&pages, first) == PAGE_EMPTY);
}

static void a_request_is_rounded_as_the_driver_does(void)
{
    static const uint64_t of[][2] = {{1, 512}, {512, 512}, {513, 1024}, {PAGE - 512, PAGE - 512}, {PAGE - 511, PAGE}, {PAGE, PAGE},
                                     {PAGE + 1, 2 * PAGE}, {3 * MIB, 2 * PAGE}, {100 * MIB + 1, 102 * MIB}};
    for (unsigned i = 0; i < sizeof of / sizeof *of; i++)
        assert(pages_rounded(of[i][0]) == of[i][1]);
    assert(pages_rounded(UINT64_MAX) == UINT64_MAX);
}

/* Rows of bench/granularity, H200, driver 580: how many such arrays came into one page, or what one took. */
static void an_array_takes_what_was_measured(void)
{
    static const struct {
        size_t width, height, depth;
        unsigned format, channels, flags, levels;
        uint64_t per_page, bytes; /* one of them */
    } of[] = {
        {65, 9, 0, 0x01, 1, 0, 1, 1024, 0},    {200, 129, 0, 0x01, 1, 0, 1, 32, 0},    {63, 257, 0, 0x01, 1, 0, 1, 85, 0},
        {128, 5000, 0, 0x01, 1, 0, 1, 3, 0},   {1, 1, 33, 0x01, 1, 0, 1, 85, 0},       {1, 1, 100, 0x01, 1, 1, 1, 40, 0},
        {100, 20, 64, 0x01, 1, 0, 1, 10, 0},   {33, 65, 17, 0x01, 1, 0, 1, 14, 0},     {100, 100, 10, 0x01, 1, 0, 1, 9, 0},
        {64, 64, 0, 0x01, 1, 0, 7, 227, 0},    {1000, 0, 0, 0x01, 1, 0, 10, 113, 0},   {16, 0, 0, 0x20, 4, 0, 5, 455, 0},
        {32, 32, 32, 0x01, 4, 0, 6, 13, 0},    {33, 17, 9, 0x20, 4, 0, 6, 9, 0},       {64, 64, 6, 0x01, 1, 1, 7, 28, 0},
        {500, 300, 0, 0x20, 4, 0, 9, 0, 6291456}, {1024, 1024, 0, 0x20, 4, 0, 11, 0, 23068672}, {1000, 700, 3, 0x20, 2, 2, 1, 0, 23068672},
    };
    for (unsigned i = 0; i < sizeof of / sizeof *of; i++) {
        CUDA_ARRAY3D_DESCRIPTOR how = {of[i].width, of[i].height, of[i].depth, (CUarray_format)of[i].format, of[i].channels, of[i].flags};
        uint64_t bytes = pages_rounded(array_bytes(&how, of[i].levels));
        if (of[i].bytes > 0 ? bytes != of[i].bytes : PAGE / bytes != of[i].per_page) {
            fprintf(stderr, "array %u takes %llu bytes\n", i, (unsigned long long)bytes);
            exit(1);
        }
    }
    CUDA_ARRAY3D_DESCRIPTOR vast = {SIZE_MAX, 1, 0, (CUarray_format)0x20, 1, 0}, huge = {(size_t)1 << 39, (size_t)1 << 39, 0, (CUarray_format)0x20, 4, 0};
    assert(array_bytes(&vast, 1) == UINT64_MAX && array_bytes(&huge, 1) == UINT64_MAX);
}

int main(void)
{
    for (unsigned seed = 1; seed <= 3; seed++) {
        what_is_charged_is_what_the_driver_takes(seed, PAGE_GRAINS - 1);
        what_is_charged_is_what_the_driver_takes(seed, 64);
    }
    requests_of_two_groups_share_no_page();
    a_request_is_rounded_as_the_driver_does();
    an_array_takes_what_was_measured();
    puts("ok");
    return 0;
}
