/* page.h - working on the shared page: its lock, and memory counted over all processes. */
#ifndef TANGRAM_FAKE_PAGE_H
#define TANGRAM_FAKE_PAGE_H

#include "gpu_time.h"
#include "wire.h"

#include <stdbool.h>

void page_init_lock(struct fake_page *page);
/* Locks; when the last holder died inside, the sums are made anew from the slots, which are the truth. */
void page_lock(struct fake_page *page);
void page_unlock(struct fake_page *page);

/* Memory of a unit for a slot. page_take refuses (false) past the unit's limit and changes nothing then. */
bool page_take(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes);
void page_give(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes);
uint64_t page_unit_used(struct fake_page *page, uint32_t unit);
/* What a card's processes hold, its MIG instances' included. */
uint64_t page_card_used(struct fake_page *page, uint32_t card);

/* memfd_create by its number: the libraries are built against a C library older than it. -1 on failure. */
int new_memfd(const char *name);

#endif
