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
    uint64_t leased = lease_leased_bytes(gpu), unused = lease_unused_bytes(gpu);
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
        if (answers(&link_->hold, seq)) /* one that comes too late was undone */
            link_->shared_answer = *in;
        return;
    }
    if (seq & WIRE_SEQ_GROW) {
        link_->grow_answer = *in;
        answers(&link_->grow, seq);
        return;
    }
    struct gpu *gpu = gpu_of_wire(in->gpu);
    uint64_t granted = gpu == NULL || in->refused ? 0 : in->granted_bytes;
    const enum wire_lease_kind kind = seq & WIRE_SEQ_ELASTIC ? WIRE_ELASTIC : WIRE_RESIDENT;
    if (granted > 0)
        atomic_fetch_add(leased_of(gpu, kind), granted);
    link_->lease_answer = *in;
    link_->lease_answer.granted_bytes = granted;
    if (gpu != NULL) {
        atomic_store(&gpu->ceiling_bytes, in->refused >= WIRE_BY_POOL ? in->granted_bytes : 0);
        atomic_store(&gpu->ceiling_by, in->refused >= WIRE_BY_POOL ? in->refused : WIRE_GRANTED);
    }
    if (answers(&link_->lease, seq))
        return;
    if (granted > 0)
        atomic_fetch_add(unused_of(gpu, kind), granted);
    if (gpu != NULL && atomic_load(&tangram.contexts.of[gpu->at].chunk_seq) == seq) {
        atomic_store(&tangram.contexts.of[gpu->at].chunk_seq, 0);
        pthread_cond_broadcast(&link_->changed);
    }
}

/* Locked. A request that no thread waits for any more is not noted. */
static void pending(uint32_t seq)
{
    struct awaited *const may_wait[] = {&link_->lease, &link_->context, &link_->grow, &link_->hold};
    for (size_t i = 0; i < sizeof may_wait / sizeof *may_wait; i++)
        if (may_wait[i]->seq != 0 && may_wait[i]->seq == seq) {
            may_wait[i]->pending_ms = now_ms();
            pthread_cond_broadcast(&link_->changed);
        }
}

/* Locked. With the seq of a recall, or its own. */
static bool send_back(struct gpu *gpu, struct wire_amount back, uint32_t recall_seq)
{
    const enum wire_lease_kind kind = (enum wire_lease_kind)back.kind;
    const bool sent = recall_seq != 0 ? wire_send(&link_->end, WIRE_RETURN, recall_seq, &back, sizeof back) : link_give(WIRE_RETURN, &back, sizeof back);
    if (sent)
        atomic_fetch_sub(leased_of(gpu, kind), back.bytes);
    else
        atomic_fetch_add(unused_of(gpu, kind), back.bytes);
    return sent;
}

/* Locked. Always answered, with 0 bytes if need be: the arbiter waits for it, and decides with the answer. So what is of the other kind goes
 * before it. */
static bool recall(uint32_t seq, const struct wire_amount *in)
{
    struct gpu *gpu = gpu_of_wire(in->gpu);
    if (gpu == NULL)
        return false;
    atomic_fetch_add(&link_->gives, 1);
    struct wire_amount elastic = {.gpu = in->gpu, .kind = WIRE_ELASTIC, .bytes = lease_take_unused(gpu, WIRE_ELASTIC, in->bytes)};
    struct wire_amount resident = {.gpu = in->gpu, .bytes = lease_take_unused(gpu, WIRE_RESIDENT, in->bytes - elastic.bytes)};
    if (elastic.bytes == 0)
        return send_back(gpu, resident, seq);
    if (resident.bytes > 0 && !send_back(gpu, resident, 0)) {
        atomic_fetch_add(unused_of(gpu, WIRE_ELASTIC), elastic.bytes);
        return false;
    }
    return send_back(gpu, elastic, seq);
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

/* Not locked, before a recall is answered: what is kept of elastic memory, or is idle in its pools, is leased, and used by nothing; and what is reserved for
 * code and streams may not have been needed. */
static void make_room(const struct wire_amount *in)
{
    struct gpu *gpu = gpu_of_wire(in->gpu);
    uint64_t unused = gpu != NULL ? lease_unused_bytes(gpu) : 0;
    if (gpu != NULL && unused < in->bytes && atomic_load(&tangram.elastic.any) && !helper_ended())
        elastic_trim(gpu, in->bytes - unused);
    if (gpu != NULL && unused < in->bytes)
        bound_settle(gpu);
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
        for (unsigned kind = WIRE_RESIDENT; kind <= WIRE_ELASTIC && atomic_load(&gpu->wire) >= 0; kind++) /* siblings see it as free then */
            link_return(gpu, (enum wire_lease_kind)kind, lease_surplus_bytes(gpu, (enum wire_lease_kind)kind));
        bound_settle(gpu);
    }
    return good;
}
