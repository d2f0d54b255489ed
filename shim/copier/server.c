/* server.c - one connection at a time. A request is checked as a whole before anything is begun; every job that was begun has an answer, unless its
 * connection ends first. Then its jobs are forgotten, and what they were to fill counts as not filled. */
#include "server.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "fail.h"

enum {
    ALIVE_MS = 2000, /* between two lines `alive`. Guessed: a fifth of what the program that reads them waits for */
    FULL_MS = 5000,  /* so long an answer waits for a peer that does not read; guessed: the arbiter reads within milliseconds */
    AGAIN_MS = 100   /* where no descriptor is free for a connection; guessed */
};

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void wake(const struct server *server)
{
    const uint64_t one = 1;
    if (write(server->wake, &one, sizeof one) < 0 && errno != EAGAIN) /* EAGAIN: it is set */
        fail("the thread of the connection cannot be woken: %s", strerror(errno));
}

void server_finished(void *argument, struct job *job)
{
    struct server *server = argument;
    pthread_mutex_lock(&server->lock);
    job_push(&server->finished, job);
    pthread_mutex_unlock(&server->lock);
    wake(server);
}

void server_is_ready(struct server *server, uint32_t context_mib)
{
    server->context_mib = context_mib;
    atomic_store(&server->ready, true);
    wake(server);
}

/* Kept until the peer reads, if it does not now. Only called when nothing is kept. */
static void send_packet(struct server *server, struct packet packet)
{
    server->full = !socket_send(server->peer, &packet);
    if (server->full) {
        server->unsent = packet;
        server->full_ms = now_ms();
    }
}

static bool overlaps(const struct job *job, const struct copier_job *request)
{
    const struct copier_job *its = &job->request;
    return its->slot_offset < request->slot_offset + request->bytes && request->slot_offset < its->slot_offset + its->bytes;
}

/* Why the request cannot be begun; COPIER_COPIED if it can. */
static enum copier_result check(const struct server *server, const struct copier_job *request, int descriptor)
{
    uint64_t pool_bytes = server->pool->bytes;
    if (request->bytes == 0 || request->bytes % COPIER_GRAIN != 0 || request->bytes > UINT64_C(1) << COPIER_LIMIT_SHIFT)
        return COPIER_BAD_SIZE;
    if (request->slot_offset % COPIER_GRAIN != 0 || request->slot_offset > pool_bytes || request->bytes > pool_bytes - request->slot_offset)
        return COPIER_BAD_SLOT;
    if (descriptor < 0)
        return COPIER_NO_DESCRIPTOR;
    if (server->ending)
        return COPIER_ENDING;
    if (!atomic_load(&server->ready))
        return COPIER_NOT_READY;
    if (server->jobs == COPIER_JOBS)
        return COPIER_TOO_MANY_JOBS;
    for (unsigned i = 0; i < COPIER_JOBS; i++)
        if (server->job[i].in_use && overlaps(&server->job[i], request))
            return COPIER_SLOT_IN_USE;
    return COPIER_COPIED;
}

/* The job of that number that is not answered yet, or NULL. */
static struct job *job_of(struct server *server, uint64_t number)
{
    for (struct job *job = server->job; job < server->job + COPIER_JOBS; job++)
        if (job->in_use && !job->orphan && job->request.job == number)
            return job;
    return NULL;
}

static void forget(struct server *server, uint64_t number)
{
    struct job *job = job_of(server, number);
    if (job != NULL)
        atomic_store(&job->forgotten, true);
}

static void begin_job(struct server *server, const struct copier_job *request, bool saves, int descriptor)
{
    enum copier_result wrong = check(server, request, descriptor);
    if (wrong != COPIER_COPIED) {
        if (descriptor >= 0)
            close(descriptor);
        struct packet packet = packet_of(COPIER_DONE, sizeof packet.body.done);
        packet.body.done = (struct copier_done){.job = request->job, .result = wrong};
        send_packet(server, packet);
        return;
    }
    struct job *job = server->job;
    while (job->in_use)
        job++;
    *job = (struct job){.request = *request, .saves = saves, .in_use = true, .descriptor = descriptor};
    server->jobs++;
    direction_give(saves ? &server->out : &server->in, job);
}

static void send_state(struct server *server)
{
    struct packet packet = packet_of(COPIER_STATE, sizeof packet.body.state);
    packet.body.state = (struct copier_state){.pool_bytes = server->pool->bytes,
                                              .allocated_bytes = server->pool->allocated_bytes,
                                              .registered_bytes = server->pool->registered_bytes,
                                              .context_mib = server->context_mib,
                                              .ready = atomic_load(&server->ready),
                                              .pages = server->pool->pages,
                                              .jobs = server->jobs,
                                              .file_system = server->pool->file_system,
                                              .inode = server->pool->inode,
                                              .born_ns = server->pool->born_ns};
    send_packet(server, packet);
}

static void disconnect(struct server *server)
{
    close(server->peer);
    server->peer = -1;
    server->full = false;
    for (unsigned i = 0; i < COPIER_JOBS; i++)
        if (server->job[i].in_use) {
            server->job[i].orphan = true;
            atomic_store(&server->job[i].forgotten, true);
        }
}

static void read_request(struct server *server)
{
    struct packet packet;
    const char *why = NULL;
    int descriptor = -1;
    enum received received = socket_receive(server->peer, &packet, &descriptor, &why);
    if (received == PEER_GONE) {
        disconnect(server);
        return;
    }
    if (received == NOTHING_YET)
        return;
    if (received == RECEIVED && packet.header.type <= COPIER_RESTORE && job_of(server, packet.body.job.job) != NULL) {
        received = RECEIVED_BAD;
        why = "a job of that number is not answered yet";
    }
    bool copies = received == RECEIVED && packet.header.type <= COPIER_RESTORE;
    if (descriptor >= 0 && !copies)
        close(descriptor);
    if (received == RECEIVED_BAD)
        send_packet(server, error_packet(COPIER_BAD_PACKET, why));
    else if (copies)
        begin_job(server, &packet.body.job, packet.header.type == COPIER_SAVE, descriptor);
    else if (packet.header.type == COPIER_FORGET)
        forget(server, packet.body.forget.job);
    else
        send_state(server);
}

static struct job *next_finished(struct server *server)
{
    pthread_mutex_lock(&server->lock);
    struct job *job = job_pop(&server->finished);
    pthread_mutex_unlock(&server->lock);
    return job;
}

/* What is kept, then the answers of finished jobs, as long as the peer reads. */
static void send_answers(struct server *server)
{
    struct job *job;
    if (server->full)
        server->full = !socket_send(server->peer, &server->unsent);
    while (!server->full && (job = next_finished(server)) != NULL) {
        struct packet packet = packet_of(COPIER_DONE, sizeof packet.body.done);
        packet.body.done = (struct copier_done){.job = job->request.job,
                                                .result = job->result,
                                                .cuda_error = job->cuda_error,
                                                .copied_bytes = job->copied_bytes,
                                                .microseconds = job->microseconds};
        job->in_use = false;
        server->jobs--;
        if (!job->orphan)
            send_packet(server, packet);
    }
}

/* A connection while one is served is rejected. One that has ended is noticed first, so that an arbiter that starts again is served. */
static void accept_peer(struct server *server)
{
    bool lacks;
    int peer = socket_accept(server->listener, &lacks);
    if (lacks)
        server->accept_ms = now_ms() + AGAIN_MS;
    if (peer < 0)
        return;
    if (server->peer < 0) {
        server->peer = peer;
        return;
    }
    const struct packet rejected = error_packet(COPIER_OCCUPIED, "another connection is served");
    socket_send(peer, &rejected);
    close(peer);
}

static void end(struct server *server)
{
    struct signalfd_siginfo signal;
    if (read(server->signals, &signal, sizeof signal) == (ssize_t)sizeof signal) {
        server->ending = true;
        say("ends after %u jobs", server->jobs);
    }
}

/* To the program that started this one: neither the connection nor a copy hangs. Without it that program ends this one. */
static void state_alive(struct server *server)
{
    const uint64_t now = now_ms();
    if (!atomic_load(&server->ready) || now < server->alive_ms + ALIVE_MS)
        return;
    server->alive_ms = now;
    if (direction_moves(&server->out, ALIVE_MS * 1000) && direction_moves(&server->in, ALIVE_MS * 1000))
        say_if_read("alive");
}

static bool may_accept(const struct server *server)
{
    return now_ms() >= server->accept_ms;
}

static int wait_ms(const struct server *server)
{
    if (!may_accept(server))
        return AGAIN_MS;
    return atomic_load(&server->ready) || server->full ? ALIVE_MS : -1;
}

/* An arbiter that hangs gets its answers on its next connection: none, for its jobs are forgotten. */
static void end_if_full(struct server *server)
{
    if (!server->full || now_ms() < server->full_ms + FULL_MS)
        return;
    say("the connection has not read an answer for %d s: it is ended", FULL_MS / 1000);
    disconnect(server);
}

void server_run(struct server *server)
{
    enum { LISTENER, PEER, SIGNALS, WAKE, SOURCES };
    server->peer = -1;
    while (!server->ending || server->jobs > 0 || server->full) {
        uint64_t woken;
        struct pollfd from[SOURCES] = {[LISTENER] = {.fd = may_accept(server) ? server->listener : -1, .events = POLLIN},
                                       [PEER] = {.fd = server->peer, .events = server->full ? POLLOUT : POLLIN},
                                       [SIGNALS] = {.fd = server->signals, .events = POLLIN},
                                       [WAKE] = {.fd = server->wake, .events = POLLIN}};
        int found = poll(from, SOURCES, wait_ms(server));
        state_alive(server);
        end_if_full(server);
        if (found < 0)
            continue;
        if (from[SIGNALS].revents != 0)
            end(server);
        if (from[WAKE].revents != 0 && read(server->wake, &woken, sizeof woken) < 0 && errno != EAGAIN)
            fail("the thread of the connection cannot be woken: %s", strerror(errno));
        if (server->peer >= 0 && (from[PEER].revents & POLLHUP) != 0) /* what it sent before is not begun */
            disconnect(server);
        else if (server->peer >= 0 && (from[PEER].revents & POLLIN) != 0 && !server->full)
            read_request(server);
        send_answers(server);
        if (from[LISTENER].revents != 0)
            accept_peer(server);
    }
}
