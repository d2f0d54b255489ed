/* pages.c - which of the driver's 2 MiB pages small requests share, so that what is charged is what the GPU loses.
 *
 * The driver allocates a request of 2 MiB or more in pages of its own, and smaller ones in pages that they share: best fit over the free
 * ranges, of equal ones the one that has had its extent for longest, at the start of the range, a new page only where none fits. A page
 * is freed with its last request (measured: bench/granularity). Linear memory, arrays and module variables have pages of their
 * own, in each context.
 *
 * The page of linear memory follows from its address, so nothing is guessed: a page is charged when an address in it is first seen. The page
 * of an array is not known, and the same rule is followed. Where the driver packs differently, the difference is a page now and then, and
 * the arbiter finds it in NVML's figure of the process.
 *
 * This file decides nothing about limits and calls no other module. Two threads may report a page in another order than the driver had it: the
 * count of live requests comes out the same.
 */
#include "memory/pages.h"

#include <stdlib.h>
#include <string.h>

uint64_t pages_rounded(uint64_t bytes)
{
    if (bytes > UINT64_MAX / 2)
        return UINT64_MAX;
    uint64_t grains = (bytes + PAGE_GRAIN - 1) / PAGE_GRAIN * PAGE_GRAIN;
    return grains < PAGE ? grains : (grains + PAGE - 1) / PAGE * PAGE;
}

static struct page **bucket_of(struct pages *pages, uint64_t at)
{
    return &pages->bucket[at / PAGE % PAGE_BUCKETS];
}

/* Sets or clears a range of bits, a word at a time. */
static void fill(uint64_t *bits, unsigned from, unsigned count, bool value)
{
    while (count > 0) {
        unsigned in_word = 64 - from % 64 < count ? 64 - from % 64 : count;
        uint64_t mask = (in_word == 64 ? ~UINT64_C(0) : (UINT64_C(1) << in_word) - 1) << from % 64;
        bits[from / 64] = value ? bits[from / 64] | mask : bits[from / 64] & ~mask;
        from += in_word;
        count -= in_word;
    }
}

/* From `from` on, the first grain whose bit is set, or clear: whole words are skipped. */
static unsigned next(const uint64_t *bits, unsigned from, bool set)
{
    while (from < PAGE_GRAINS) {
        uint64_t word = (set ? bits[from / 64] : ~bits[from / 64]) >> from % 64;
        if (word != 0)
            return from + (unsigned)__builtin_ctzll(word);
        from += 64 - from % 64;
    }
    return PAGE_GRAINS;
}

/* The best range so far. */
struct fit {
    struct page *page; /* NULL: none */
    unsigned start, grains;
    uint32_t since;
};

static uint32_t since(const struct page *page, unsigned start)
{
    return page->since != NULL ? page->since[start] : 0;
}

static void changed(struct pages *pages, struct page *page, unsigned start)
{
    if (page->since != NULL && start < PAGE_GRAINS)
        page->since[start] = ++pages->changes;
}

/* The smallest free range that takes so many grains; of equal ones the oldest. */
static void better(struct page *page, unsigned grains, struct fit *best)
{
    unsigned largest = 0;
    for (unsigned from = next(page->used, 0, false); from < PAGE_GRAINS;) {
        const unsigned to = next(page->used, from, true), length = to - from;
        const bool tighter = best->page == NULL || length < best->grains;
        if (length >= grains && (tighter || (length == best->grains && since(page, from) < best->since)))
            *best = (struct fit){page, from, length, since(page, from)};
        largest = length > largest ? length : largest;
        from = next(page->used, to, false);
    }
    page->largest = largest;
}

/* Locked. A full page is searched once after its last free, so a search near the limit reads one number of most pages. `any`: the first
 * range that is found will do. */
static struct fit find_fit(struct pages *pages, const void *group, unsigned grains, bool any)
{
    struct fit best = {.page = NULL};
    for (unsigned i = 0; i < PAGE_BUCKETS; i++)
        for (struct page *page = pages->bucket[i]; page != NULL; page = page->next)
            if (page->group == group && page->largest >= grains) {
                better(page, grains, &best);
                if (any && best.page != NULL)
                    return best;
            }
    return best;
}

static unsigned grains_of(uint64_t bytes)
{
    return (unsigned)((bytes + PAGE_GRAIN - 1) / PAGE_GRAIN);
}

/* Locked. */
static struct page *find(struct pages *pages, uint64_t at)
{
    struct page *page = *bucket_of(pages, at);
    while (page != NULL && page->base != at / PAGE * PAGE)
        page = page->next;
    return page;
}

/* Locked. NULL: there is no memory to note it. */
static struct page *add(struct pages *pages, const void *group, uint64_t base)
{
    struct page *page = pages->spare;
    bool clean = page != NULL && page->free_grains == PAGE_GRAINS && page->requests == 0; /* all of its bits were cleared, one by one */
    pages->spare = NULL;
    if (page == NULL && (page = calloc(1, sizeof *page)) == NULL)
        return NULL;
    if (!clean) {
        uint32_t *kept = page->since;
        memset(page, 0, sizeof *page);
        page->since = kept;
    }
    page->base = base;
    page->group = group;
    page->free_grains = page->largest = PAGE_GRAINS;
    struct page **bucket = bucket_of(pages, base);
    page->next = *bucket;
    *bucket = page;
    return page;
}

/* Locked. What reaches past the page is cut off: only a driver of other rules does that. */
static void put(struct page *page, unsigned start, unsigned grains)
{
    grains = grains < PAGE_GRAINS - start ? grains : PAGE_GRAINS - start;
    fill(page->used, start, grains, true);
    page->first[start / 64] |= UINT64_C(1) << start % 64;
    page->free_grains -= grains < page->free_grains ? grains : page->free_grains;
    page->requests++;
}

bool pages_fit(struct pages *pages, const void *group, uint64_t bytes)
{
    lock_acquire(&pages->lock);
    bool fits = find_fit(pages, group, grains_of(bytes), true).page != NULL;
    lock_release(&pages->lock);
    return fits;
}

bool pages_put(struct pages *pages, const void *group, uint64_t at, uint64_t bytes)
{
    lock_acquire(&pages->lock);
    struct page *page = find(pages, at);
    bool fresh = page == NULL;
    if (fresh)
        page = add(pages, group, at / PAGE * PAGE);
    if (page != NULL)
        put(page, (unsigned)(at % PAGE / PAGE_GRAIN), grains_of(bytes));
    lock_release(&pages->lock);
    return fresh;
}

/* Locked. */
static struct fit open_page(struct pages *pages, const void *group)
{
    pages->bases += PAGE;
    struct page *page = add(pages, group, pages->bases);
    if (page != NULL && page->since == NULL)
        page->since = malloc(PAGE_GRAINS * sizeof *page->since);
    return (struct fit){.page = page};
}

enum page_place pages_place(struct pages *pages, const void *group, uint64_t bytes, bool open, uint64_t *at)
{
    const unsigned grains = grains_of(bytes);
    lock_acquire(&pages->lock);
    struct fit fit = find_fit(pages, group, grains, false);
    enum page_place place = fit.page != NULL ? PLACE_SHARED : open ? PLACE_FRESH : PLACE_NONE;
    if (place == PLACE_FRESH)
        fit = open_page(pages, group);
    if (fit.page != NULL) {
        put(fit.page, fit.start, grains);
        changed(pages, fit.page, fit.start + grains); /* what is left of the range */
    }
    *at = (fit.page != NULL ? fit.page->base : pages->bases) + (uint64_t)fit.start * PAGE_GRAIN;
    lock_release(&pages->lock);
    return place;
}

/* Locked. */
static void drop(struct pages *pages, struct page *page)
{
    struct page **place = bucket_of(pages, page->base);
    while (*place != page)
        place = &(*place)->next;
    *place = page->next;
    if (pages->spare == NULL) {
        pages->spare = page;
        return;
    }
    free(page->since);
    free(page);
}

/* The first grain of the free range that this one is in. */
static unsigned range_start(const struct page *page, unsigned grain)
{
    while (grain > 0 && (page->used[(grain - 1) / 64] >> (grain - 1) % 64 & 1) == 0)
        grain--;
    return grain;
}

enum page_end pages_end(struct pages *pages, uint64_t at)
{
    enum page_end end = PAGE_UNKNOWN;
    unsigned start = (unsigned)(at % PAGE / PAGE_GRAIN), stop;
    lock_acquire(&pages->lock);
    struct page *page = find(pages, at);
    if (page != NULL) {
        unsigned free_from = next(page->used, start + 1, false);
        stop = next(page->first, start + 1, true);
        stop = free_from < stop ? free_from : stop;
        fill(page->used, start, stop - start, false);
        page->first[start / 64] &= ~(UINT64_C(1) << start % 64);
        page->free_grains += stop - start;
        page->largest = page->free_grains;
        if (page->since != NULL)
            changed(pages, page, range_start(page, start));
        end = --page->requests > 0 ? PAGE_STAYS : PAGE_EMPTY;
        if (end == PAGE_EMPTY)
            drop(pages, page);
    }
    lock_release(&pages->lock);
    return end;
}

/* Left, not freed: a thread that is not here may have been changing them. */
void pages_forget_all(struct pages *pages)
{
    memset(pages, 0, sizeof *pages);
}
