/* answers.c - what the arbiter's packets mean here, and what is reported once a second. Called by the thread that reads. */
#include "process.h"

#include <pthread.h>
#include <string.h>

static struct link *const link_ = &tangram.link;

static struct gpu *gpu_of_wire(uint32_t wire)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        if (atomic_load(&tangram.grant.gpu[i].wire) == (int)wire)
            return &tangram.grant.gpu[i];
    return NULL;
}

static bool is_stated(struct gpu *gpu)
{
    uint64_t leased = atomic_load(&gpu->leased_bytes), unused = atomic_load(&gpu->unused_bytes);
    return leased - unused == atomic_load(&gpu->stated_bytes) && lease_managed_mib(gpu) == atomic_load(&gpu->stated_managed_mib);
}

/* Locked. */
static bool state_changes(void)
{
    for (unsigned i = 0; i < tangram.grant.gpus; i++) {
        struct gpu *gpu = &tangram.grant.gpu[i];
        if (atomic_load(&gpu->wire) >= 0 && !is_stated(gpu) && !link_state_use(gpu))
            return false;
    }
    return true;
}

static bool answers(struct awaited *awaited, uint32_t seq)
{
    if (awaited->seq == 0 || awaited->seq != seq)
        return false;
    awaited->answered = true;
    pthread_cond_broadcast(&link_->changed);
    return true;
}

/* Locked. What is granted is ours from here on, and is stated if the connection ends now, whether or not the thread that requested it
 * has woken up. A lease that no thread waits for is unused. What is reserved for a context is no lease. */
static void leased(uint32_t seq, const struct wire_leased *in)
{
    if (seq & WIRE_SEQ_CONTEXT) {
        link_->context_answer = *in;
        answers(&link_->context, seq);
        return;
    }
    if (seq & WIRE_SEQ_GIVEN) {
        if (atomic_load(&link_->given_seq) == seq) {
            atomic_store(&link_->given_seq, 0);
            pthread_cond_broadcast(&link_->changed);
        }
        return;
    }
    if (seq & WIRE_SEQ_HOLD) {
        link_->shared_answer = *in;
        answers(&link_->hold, seq);
        return;
    }
    if (seq & WIRE_SEQ_GROW) {
        link_->grow_answer = *in;
        answers(&link_->grow, seq);
        return;
    }
    struct gpu *gpu = gpu_of_wire(in->gpu);
    uint64_t granted = gpu == NULL || in->refused ? 0 : in->granted_bytes;
    if (granted > 0)
        atomic_fetch_add(&gpu->leased_bytes, granted);
    link_->lease_answer = *in;
    link_->lease_answer.granted_bytes = granted;
    if (answers(&link_->lease, seq))
        return;
    if (granted > 0)
        atomic_fetch_add(&gpu->unused_bytes, granted);
    if (gpu != NULL && atomic_load(&tangram.contexts.of[gpu->at].chunk_seq) == seq) {
        atomic_store(&tangram.contexts.of[gpu->at].chunk_seq, 0);
        pthread_cond_broadcast(&link_->changed);
    }
}

/* Locked. A request that no thread waits for any more is not noted. */
static void pending(uint32_t seq)
{
    if (link_->lease.seq == 0 || link_->lease.seq != seq)
        return;
    link_->lease.pending_ms = now_ms();
    pthread_cond_broadcast(&link_->changed);
}

/* Locked. Always answered, with 0 bytes if need be: the arbiter waits for it. */
static bool recall(uint32_t seq, const struct wire_amount *in)
{
    struct gpu *gpu = gpu_of_wire(in->gpu);
    struct wire_amount back = {.gpu = in->gpu};
    if (gpu == NULL)
        return false;
    back.bytes = lease_take_unused(gpu, in->bytes);
    if (!wire_send(&link_->end, WIRE_RETURN, seq, &back, sizeof back)) {
        atomic_fetch_add(&gpu->unused_bytes, back.bytes);
        return false;
    }
    atomic_fetch_sub(&gpu->leased_bytes, back.bytes);
    return true;
}

/* Locked. */
static void measured(uint32_t seq, const struct wire_measured *in)
{
    struct gpu *gpu = gpu_of_wire(in->gpu);
    if (gpu != NULL && in->known)
        atomic_store(&tangram.contexts.of[gpu->at].bytes, in->context_bytes);
    answers(&link_->measured, seq);
}

/* Locked. */
static void listed(uint32_t seq, const struct wire_process_list *in)
{
    if (link_->processes.seq != seq || link_->listed == NULL)
        return;
    link_->listed_count = in->count;
    uint32_t fits = in->count < link_->listed_capacity ? in->count : link_->listed_capacity;
    memcpy(link_->listed, in->process, fits * sizeof *in->process);
    answers(&link_->processes, seq);
}

/* Not locked, before a recall is answered: what is kept of elastic memory is leased, and used by nothing. */
static void make_room(const struct wire_amount *in)
{
    struct gpu *gpu = gpu_of_wire(in->gpu);
    uint64_t unused = gpu != NULL ? atomic_load(&gpu->unused_bytes) : 0;
    if (gpu != NULL && unused < in->bytes && atomic_load(&gpu->kept_bytes) > 0 && !helper_ended())
        elastic_trim(gpu, in->bytes - unused);
}

bool link_handle(const struct wire_packet *packet)
{
    bool good = true;
    if (packet->header.type == WIRE_RECALL)
        make_room(&packet->body.amount);
    pthread_mutex_lock(&link_->lock);
    switch (packet->header.type) {
    case WIRE_LEASED:
        leased(packet->header.seq, &packet->body.leased);
        break;
    case WIRE_PENDING:
        pending(packet->header.seq);
        break;
    case WIRE_RECALL:
        good = recall(packet->header.seq, &packet->body.amount);
        break;
    case WIRE_MEASURED:
        measured(packet->header.seq, &packet->body.measured);
        break;
    case WIRE_PROCESS_LIST:
        listed(packet->header.seq, &packet->body.process_list);
        break;
    default: /* ERROR, or what has no place here: the connection is over either way */
        good = false;
    }
    pthread_mutex_unlock(&link_->lock);
    return good;
}

bool link_once_a_second(void)
{
    pthread_mutex_lock(&link_->lock);
    bool good = state_changes();
    pthread_mutex_unlock(&link_->lock);
    for (unsigned i = 0; good && i < tangram.grant.gpus; i++) {
        struct gpu *gpu = &tangram.grant.gpu[i];
        if (atomic_load(&gpu->wire) >= 0) /* siblings see it as free then */
            link_return(gpu, lease_surplus_bytes(gpu));
        bound_settle(gpu);
    }
    return good;
}
