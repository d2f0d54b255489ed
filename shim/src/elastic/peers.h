/* peers.h - which devices of this process may use a block beside its own: see peers.c. elastic.h includes this. */
#ifndef TANGRAM_PEERS_H
#define TANGRAM_PEERS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

struct elastic_region;
struct pooled;

enum { PEER_DEVICES = 64 }; /* a bit for each in a word */

/* By the process's number of a device; not of the block's own. */
struct access {
    uint64_t some, write; /* may use it at all; may write it, too */
};

/* The program enabled access of one context to what is allocated in another. */
struct peer {
    CUcontext from, of;
    CUdevice device, of_device;
};

struct peers {
    pthread_mutex_t lock; /* in a process that sees several GPUs blocks are mapped, opened and unmapped with it, while the driver is called */
    struct peer *peer;    /* under it, as all that follows */
    size_t peers, capacity;
    uint64_t opened[PEER_DEVICES]; /* by device: the devices with a context that may use what is allocated there */
};

/* In a process that sees one GPU they do nothing. */
struct peers_held {
    bool locked;
    int cancelling; /* the thread's state: it is not cancelled with the lock */
};
struct peers_held peers_enter(void);
void peers_leave(struct peers_held held);

/* With the lock. */
struct access peers_access(const struct elastic_region *region);
CUresult peers_open_pool(struct pooled *pool, const CUmemAccessDesc *access, size_t count); /* without it: what the pool has and will have */
void peers_forget_context(CUcontext context); /* without it */

/* Is access of that kind one that can be noted? */
bool access_can_note(const CUmemAccessDesc *access, size_t count);
void access_note(struct access *others, CUdevice own, const CUmemAccessDesc *access, size_t count); /* but that of its own device */
/* What to pass to cuMemSetAccess; how many. */
unsigned access_list(CUdevice own, CUmemAccess_flags flags, const struct access *others, CUmemAccessDesc list[PEER_DEVICES + 1]);
static inline CUmemAccess_flags access_of(const struct access *others, CUdevice device)
{
    const uint64_t bit = (uint64_t)1 << device;
    return (CUmemAccess_flags)((others->write & bit) != 0 ? 3 : (others->some & bit) != 0 ? 1 : 0); /* READWRITE, READ, NONE: cuda.h */
}

/* across.c: a copy that the driver would refuse, because one end is memory of another GPU that the copying device has no access to. */
struct across {
    enum { ACROSS_NOT, ACROSS_PEER, ACROSS_CURRENT } how; /* by cuMemcpyPeer or cuMemcpy3DPeer; with `to` current */
    CUcontext to, from;
};
struct across across_look(CUdeviceptr to, CUdeviceptr from, CUstream stream);
/* The same of copies in two and three dimensions, by cuMemcpy3DPeer: *peer is what to pass to it. */
struct across across_look_2d(const CUDA_MEMCPY2D *how, CUstream stream, CUDA_MEMCPY3D_PEER *peer);
struct across across_look_3d(const CUDA_MEMCPY3D *how, CUstream stream, CUDA_MEMCPY3D_PEER *peer);
CUresult across_begin(CUcontext context, int per_thread); /* makes it current, when what is in the default stream has ended */
void across_end(void);

#endif
