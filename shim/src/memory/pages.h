/* pages.h - which of the driver's 2 MiB pages small requests share. */
#ifndef TANGRAM_PAGES_H
#define TANGRAM_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "lock.h"

#define PAGE ((uint64_t)2 << 20)
enum { PAGE_GRAIN = 512, PAGE_GRAINS = 4096, PAGE_WORDS = PAGE_GRAINS / 64, PAGE_BUCKETS = 1024 };

struct page {
    struct page *next;     /* in its bucket */
    uint64_t base;
    const void *group;     /* only requests of one group share pages */
    unsigned requests;     /* live */
    unsigned free_grains;
    unsigned largest;           /* no free range has more grains; exact after a search, which passes over the page where it is too small */
    uint64_t used[PAGE_WORDS];  /* a bit a grain */
    uint64_t first[PAGE_WORDS]; /* the grain is a request's first */
    uint32_t *since;            /* by a free range's first grain: when it got its extent. Of pages that we choose; NULL without memory */
};

struct pages {
    struct lock lock;
    struct page *bucket[PAGE_BUCKETS];
    struct page *spare; /* one freed page, so that a program that allocates and frees alternately calls no allocator */
    uint64_t bases;     /* assigned by pages_place */
    uint32_t changes;   /* of free ranges */
};

/* What the driver makes of a request: whole pages from 2 MiB on, grains of 512 bytes below. UINT64_MAX: too large for any GPU. */
uint64_t pages_rounded(uint64_t bytes);

/* Does a request of so many bytes (less than a page) fit into a page of the group? */
bool pages_fit(struct pages *pages, const void *group, uint64_t bytes);

/* The driver put a request at this address. True: the page was not in use before. */
bool pages_put(struct pages *pages, const void *group, uint64_t at, uint64_t bytes);

/* Chooses the place itself, as the driver does, where there is no address; *at is never 0. `open`: a page that was not in use may be
 * taken. */
enum page_place { PLACE_NONE, PLACE_SHARED, PLACE_FRESH };
enum page_place pages_place(struct pages *pages, const void *group, uint64_t bytes, bool open, uint64_t *at);

enum page_end { PAGE_UNKNOWN, PAGE_STAYS, PAGE_EMPTY };
enum page_end pages_end(struct pages *pages, uint64_t at); /* the request at this address ended */

void pages_forget_all(struct pages *pages); /* in a forked child */

#endif
