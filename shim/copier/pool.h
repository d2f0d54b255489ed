/* pool.h - the file of host memory that blocks are saved to. It outlives the copier: the next one finds it and keeps its content. */
#ifndef TANGRAM_COPIER_POOL_H
#define TANGRAM_COPIER_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#include "driver.h"
#include "protocol.h"

enum { POOL_FILES = 4, POOL_STEP_SHIFT = 30 };
/* Memory is allocated and registered in steps of this size; no copy crosses a boundary between two. */
#define POOL_STEP (UINT64_C(1) << POOL_STEP_SHIFT)

struct pool {
    const char *path[POOL_FILES]; /* of which one is used */
    unsigned paths;
    uint64_t bytes;
    int file; /* locked as long as the process lives */
    char *at;
    _Atomic uint64_t allocated_bytes, registered_bytes;
    _Atomic uint32_t pages; /* enum copier_pages */
    _Atomic uint64_t file_system, inode, born_ns; /* which file it is; complete before the last byte is registered */
};

/* Finds or makes the file and allocates all of its memory. A file that exists is used with its content; else the first one is made that there is memory
 * for. Ends the program with a sentence if there is none, if the file is larger than the pool may be, or if another copier uses it. */
void pool_allocate(struct pool *pool);

/* Registers all of it with the driver. The context is current. Ends the program with a sentence if it cannot. */
void pool_register(struct pool *pool, const struct driver *driver);

#endif
