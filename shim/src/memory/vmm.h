/* vmm.h - blocks of physical memory, for vmm.c and vmm_create.c. process.h has what all others need. */
#ifndef TANGRAM_VMM_H
#define TANGRAM_VMM_H

#include "process.h"

struct block {
    uint64_t bytes, holders; /* handles and mappings */
    struct gpu *gpu;
    enum wire_lease_kind kind; /* of its lease */
    bool imported; /* its size grows with what is mapped of it */
    bool exported; /* another process may keep it alive unnoticed */
};

bool vmm_own_handle(uint64_t number, struct block *block); /* false: it cannot be remembered */
void vmm_keep_mapping(uint64_t at, uint64_t bytes, struct block *block); /* one that the driver did not undo */

#endif
