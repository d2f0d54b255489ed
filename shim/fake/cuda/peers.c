/* peers.c - what a context may use of other devices' memory.
 *
 * Documented (cuda.h): a context enables access to another one, in one direction, and then what is allocated in that, before or later, is its own to
 * use until it disables it or one of the two ends. Memory that is mapped, and that of a pool, has its own access, which that does not change.
 * A kernel that uses memory without access fails as at any address that is not mapped. Copies of plain memory need no access. A copy of mapped memory
 * needs that of the device that copies; cuMemcpyPeer names a context for each end.
 */
#include "internal.h"
#include "calls.h"

#include <stdlib.h>

/* Whole GPUs can, but where TANGRAM_FAKE_P2P=0 says that they are not connected so. */
static bool can_access(int device, int peer)
{
    const char *p2p = getenv("TANGRAM_FAKE_P2P");
    return device != peer && profile_of(device) == NULL && profile_of(peer) == NULL && (p2p == NULL || strcmp(p2p, "0") != 0);
}

bool access_possible(int device, const CUmemLocation *from)
{
    return from->type == CU_MEM_LOCATION_TYPE_DEVICE && from->id >= 0 && from->id < cuda.devices && (from->id == device || can_access(from->id, device));
}

CUresult access_valid(const CUmemAccessDesc *access, size_t count, bool host)
{
    for (size_t i = 0; i < count; i++) {
        if (host && access[i].location.type == CU_MEM_LOCATION_TYPE_HOST)
            continue;
        CHECK(access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
        TRY(device_ok(access[i].location.id));
        CHECK(access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                  access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
              CUDA_ERROR_INVALID_VALUE);
    }
    return CUDA_SUCCESS;
}

/* A handle is used again: another context may have it by then. */
static bool is_peer(const struct peer *peer, CUcontext ctx)
{
    return peer->ctx == ctx && peer->id == ctx->id;
}

static struct peer *peer_of(CUcontext ctx, CUcontext of)
{
    for (unsigned i = 0; i < PEERS; i++)
        if (is_peer(&ctx->peer[i], of))
            return &ctx->peer[i];
    return NULL;
}

static CUresult enable(CUcontext ctx, CUcontext of)
{
    SCOPED tables = locked(&cuda.lock);
    CHECK(can_access(ctx->device, of->device), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    CHECK(peer_of(ctx, of) == NULL, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    for (unsigned i = 0; i < PEERS; i++)
        if (!context_ok(ctx->peer[i].ctx) || ctx->peer[i].ctx->id != ctx->peer[i].id) {
            ctx->peer[i] = (struct peer){of, of->id};
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_TOO_MANY_PEERS;
}

static CUresult disable(CUcontext ctx, CUcontext of)
{
    SCOPED tables = locked(&cuda.lock);
    struct peer *peer = peer_of(ctx, of);
    CHECK(peer != NULL, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    *peer = (struct peer){0};
    return CUDA_SUCCESS;
}

bool span_open_to(const struct span *span, CUcontext ctx, bool copies)
{
    switch (span->kind) {
    case SPAN_MAPPED:
        return span->access[ctx->device] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    case SPAN_POOL:
        return ctx->device == span->device || span->pool->access[ctx->device] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    case SPAN_IPC: /* guessed: of the device of the context in which it was opened, and of no peer of it */
        return copies || ctx->device == (span->pool != NULL ? span->device : span->ctx->device);
    case SPAN_DEVICE:
    case SPAN_OWNED:
        return copies || ctx->device == span->device || (context_ok(span->ctx) && peer_of(ctx, span->ctx) != NULL);
    case SPAN_GRAPH:
        return copies || ctx->device == span->device;
    default: /* of the host, or managed */
        return true;
    }
}

#include "peers.def"
