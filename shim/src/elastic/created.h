/* created.h - memory of cuMemCreate that can be swapped: see created.c. elastic.h includes this. */
#ifndef TANGRAM_CREATED_H
#define TANGRAM_CREATED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "elastic/peers.h"

struct block;
struct elastic_block;
struct elastic_region;
struct gpu;
struct quiet;

/* One cuMemMap. */
struct created_map {
    CUdeviceptr at;
    uint64_t bytes, offset;
    uint64_t number; /* as that of an allocation; none has it again */
    CUmemAccess_flags access; /* of the block's own GPU */
    struct access others;
    bool there; /* for the driver. Of a block that is away one may be, which the driver refused to unmap */
    struct created *of;
    struct created_map *next; /* of the same block */
};

/* One cuMemCreate. Its region has one block and no addresses. */
struct created {
    struct elastic_region *region;
    struct block *charge;     /* vmm.c */
    CUmemAllocationProp prop; /* as the program requested it */
    unsigned handles;         /* that the program has */
    struct created_map *map;  /* its mappings */
    unsigned needed;          /* by threads that released the lock: it does not end meanwhile */
    bool staying;             /* its lease is being converted: it is not swapped meanwhile */
    bool kept;                /* it is away, and the driver unmapped only some of it: its handle is there still, and its memory in use */
    bool resident;            /* something beside mappings has it, or may have it: its lease is resident, and it is never swapped again */
    struct created *next_ended;
};

/* In struct elastic. */
struct created_all {
    pthread_mutex_t lock; /* also while the driver maps, unmaps and makes such memory, which does not wait for the GPU */
    pthread_cond_t back;  /* some block is no longer away, has its content again, or is no longer staying */
    struct created_map **map; /* by address */
    size_t maps, maps_capacity;
    size_t left;       /* the program has neither handles nor mappings, and the block is being swapped */
    _Atomic bool any;  /* some was created */
};

/* The program's handles of such memory, which no driver's handle is like: not an address, and no small number. */
#define CREATED_HANDLE (UINT64_C(0x5447) << 48)
static inline bool created_is(CUmemGenericAllocationHandle handle)
{
    return handle >> 48 == CREATED_HANDLE >> 48;
}

CUmemGenericAllocationHandle created_handle(uint64_t id); /* of a block */
uint64_t created_id(CUmemGenericAllocationHandle handle);

/* Is memory of these properties to be such memory? `real`: with which properties it is made. */
bool created_wanted(struct gpu *gpu, uint64_t bytes, const CUmemAllocationProp *prop, unsigned long long flags, CUmemAllocationProp *real);
/* From here on the charge and the driver's handle are its own. False: there is no memory to note it. */
bool created_own(struct gpu *gpu, uint64_t bytes, const CUmemAllocationProp *prop, struct block *charge, CUmemGenericAllocationHandle made,
                 CUmemGenericAllocationHandle *handle);

/* The driver's functions, for handles and addresses of such memory. */
bool created_in(CUdeviceptr at, uint64_t bytes); /* is any of it mapped there, or away from there? */
CUresult created_map(CUdeviceptr at, uint64_t bytes, uint64_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags);
CUresult created_unmap(CUdeviceptr at, uint64_t bytes);
CUresult created_release(CUmemGenericAllocationHandle handle);
CUresult created_export(void *os_handle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags);
CUresult created_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle);
CUresult created_set_access(CUdeviceptr at, uint64_t bytes, const CUmemAccessDesc *access, size_t count);
CUresult created_address_free(CUdeviceptr at, uint64_t bytes);
/* False: the address is in none. */
bool created_retain(CUmemGenericAllocationHandle *handle, CUdeviceptr at, CUresult *rc);
/* created_stay.c. Something that is not followed is to use it: it becomes resident. The driver's handle, and one holder more of the charge.
 * CUDA_ERROR_INVALID_VALUE: there is no such handle; CUDA_ERROR_OUT_OF_MEMORY: it does not fit into the guarantee, and stderr says so. */
CUresult created_fix(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *made, struct block **charge);
bool created_fix_range(CUdeviceptr at, uint64_t bytes); /* the same, of what is mapped there; false: it does not fit */

/* created.c, for the other files of created memory. Locked, from created_enter to created_leave, in which `ended` is charged no longer. */
struct quiet created_enter(void);
void created_leave(struct quiet quiet, struct created *ended);
struct elastic_block *created_block(const struct created *created);
struct created *created_of(CUmemGenericAllocationHandle handle);   /* of the program's handle; NULL: it has none such */
CUresult created_unknown(void); /* what the driver answers for a handle that it does not know: in a forked child, that it is not initialised */
struct created *created_here(CUmemGenericAllocationHandle handle); /* the same, when it is not away, or NULL at the end of the program */
bool created_wait(void); /* until some block is back; false: none comes back any more, for the program ends */
bool created_is_away(const struct created *created);
bool created_is_left(const struct created *created); /* the program has neither handles nor mappings of it */
/* All that is mapped there becomes resident; false: something does not fit. The lock is released meanwhile. */
bool created_stay_in(CUdeviceptr at, uint64_t bytes, struct created **ended);
void created_end_if_left(struct created *created, struct created **ended); /* and no thread needs it */
struct created *created_left_away(void); /* and with elastic.lock: one that is left, away, and needed by no thread; NULL: none */
void created_end_all_left(struct created **ended); /* which are not being swapped any more; none at the end of the program */
struct created_map *created_map_new(CUdeviceptr at, uint64_t bytes, uint64_t offset, struct created *created); /* NULL: no memory */
void created_map_add(struct created_map *map);
void created_map_remove(size_t i, struct created **ended);
size_t created_map_from(CUdeviceptr at); /* the index of the first mapping that ends above the address */
struct created_map *created_map_at(size_t i, CUdeviceptr at, uint64_t bytes); /* that with the index, if it is in the range */

/* What is known of an address, and with the lock, under which the driver may be queried for the rest. */
struct created_found {
    struct created_map *map;
    uint64_t block; /* its id */
    bool away;
    int cancelling; /* the thread's state: it is not cancelled within a call of the driver that it makes with the lock */
};
bool created_find_locked(CUdeviceptr at, struct created_found *found); /* false: not locked, the address is in none */
void created_unlock(const struct created_found *found);

/* created_swap.c: elastic_unmap, elastic_make and elastic_unmake of such blocks. */
bool created_swap_out(struct elastic_block *block);
bool created_swap_in(struct elastic_block *block);
bool created_swap_undo(struct elastic_block *block);
void created_settle(void); /* after blocks became resident */

#endif
