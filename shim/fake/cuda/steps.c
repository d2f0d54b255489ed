/* steps.c - what jobs do to memory, one piece after the other.
 *
 * When a suspend has returned, nothing of the process's work changes memory any more: another process may save it, and the process
 * itself may unmap it. So a piece is one step between two looks at the channels. If its process was stopped in the middle of a step, the suspend
 * returned without it; the step is then done again after the resume, on memory that may have been saved and restored meanwhile.
 * Every step can be repeated: a kernel that changes cells first computes the new ones in memory of its own.
 *
 * cuda.step is locked while a step writes, and while memory is unmapped.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>

#define CELL 4u
#define PATTERN 2654435761u
#define HOST_PAGE 4096u

/* The suspends so far when a step began. */
struct watch {
    uint32_t unit, suspends;
};

uint64_t job_bytes(const struct job *job)
{
    return job->area.width * job->area.rows;
}

static bool of_cells(const struct job *job)
{
    return job->kind >= JOB_WRITE && job->kind <= JOB_COMPARE;
}

static bool tells(const struct job *job)
{
    return job->kind == JOB_COMPARE;
}

bool job_is_piece(const struct job *job)
{
    return job->area.rows == 1 && job->area.width <= PIECE_BYTES;
}

static bool area_done(const struct area *area)
{
    return area->width == 0 || area->row >= area->rows;
}

bool job_complete(const struct job *job)
{
    return area_done(&job->area) && (!tells(job) || job->told);
}

/* Bytes of a row in the next piece, and rows: several only if they are short. */
static uint64_t piece_width(const struct area *area)
{
    const uint64_t left = area->width - area->column;
    return left < PIECE_BYTES ? left : PIECE_BYTES;
}

static uint64_t piece_rows(const struct job *job)
{
    const struct area *area = &job->area;
    const uint64_t fit = PIECE_BYTES / area->width, left = area->rows - area->row;
    if (of_cells(job) || area->column > 0 || fit < 2)
        return 1;
    return left < fit ? left : fit;
}

bool job_due(const struct job *job, uint64_t ran_ns)
{
    const struct area *area = &job->area;
    if (ran_ns >= job->end_ns || area_done(area))
        return ran_ns >= job->end_ns;
    const double behind = (double)(area->row * area->width + area->column + piece_width(area)) / (double)job_bytes(job);
    return ran_ns > job->start_ns && (double)(ran_ns - job->start_ns) >= behind * (double)job->ns;
}

static bool covered(const struct job *job, const struct area *area)
{
    const bool copies = job->kind >= JOB_COPY;
    CUcontext at_ctx = job->at_ctx != NULL ? job->at_ctx : job->ctx, from_ctx = job->from_ctx != NULL ? job->from_ctx : job->ctx;
    if (area_done(area))
        return true;
    return ((job->ends & AT_DEVICE) == 0 || span_touch(area->at, (area->rows - 1) * area->at_pitch + area->width, at_ctx, copies)) &&
           ((job->ends & FROM_DEVICE) == 0 || span_covers(area->from, (area->rows - 1) * area->from_pitch + area->width, from_ctx, copies));
}

bool job_covered(const struct job *job)
{
    return covered(job, &job->area);
}

/* A fill with zeros gives the memory back. Whether it is memory of a GPU, madvise knows. */
static void clear(unsigned char *at, uint64_t bytes)
{
    unsigned char *const page = (unsigned char *)rounded((uintptr_t)at, HOST_PAGE), *const end = at + bytes;
    const size_t whole = page < end ? (size_t)(end - page) / HOST_PAGE * HOST_PAGE : 0;
    if (whole < PIECE_BYTES / 2 || madvise(page, whole, MADV_REMOVE) != 0) {
        memset(at, 0, bytes);
        return;
    }
    memset(at, 0, (size_t)(page - at));
    memset(page + whole, 0, (size_t)(end - (page + whole)));
}

static void fill(unsigned char *to, uint32_t value, uint32_t element, uint64_t bytes)
{
    if (value == 0)
        clear(to, bytes);
    else if (element == 1)
        memset(to, (int)(value & 0xff), bytes);
    else
        for (uint64_t i = 0; i + element <= bytes; i += element)
            memcpy(to + i, &value, element); /* little-endian: the low bytes */
}

/* Cells that were read after a suspend may be anything. */
static void add(struct job *job, uint32_t *cell, uint64_t bytes, const struct watch *watch)
{
    uint32_t *const next = job->own;
    for (uint64_t i = 0; !job->prepared && i < bytes / CELL; i++)
        next[i] = cell[i] + 1;
    job->prepared |= gpu_step_undisturbed(cuda.client.page, cuda.client.slot, watch->unit, watch->suspends);
    if (job->prepared)
        memcpy(cell, next, bytes);
}

/* Returns the number of cells that are wrong, of a kernel that compares. */
static uint32_t cells_step(struct job *job, uint32_t *cell, uint64_t bytes, const struct watch *watch)
{
    const uint32_t first = (uint32_t)(job->area.column / CELL), count = (uint32_t)(bytes / CELL);
    uint32_t wrong = 0;
    if (job->kind == JOB_ADD)
        add(job, cell, bytes, watch);
    for (uint32_t i = 0; i < count && job->kind == JOB_WRITE; i++)
        cell[i] = (first + i) * PATTERN + job->value;
    for (uint32_t i = 0; i < count && job->kind == JOB_COMPARE; i++)
        wrong += cell[i] != (first + i) * PATTERN + job->value;
    return wrong;
}

/* What a job does in one step: from where it is, or its word to `to`. Nothing of it is done yet. */
static struct area piece_of(const struct job *job)
{
    const struct area *area = &job->area;
    const bool flag = job->kind == JOB_WAIT && (job->told || job->to == 0);
    if (job->kind == JOB_WAIT || area_done(area))
        return (struct area){.at = flag ? area->at : job->to, .width = CELL, .rows = 1};
    return (struct area){.at = area->at + area->row * area->at_pitch + area->column, .from = area->from + area->row * area->from_pitch + area->column,
                         .at_pitch = area->at_pitch, .from_pitch = area->from_pitch, .width = piece_width(area), .rows = piece_rows(job)};
}

static uint32_t piece_run(struct job *job, const struct area *part, const struct watch *watch)
{
    uint32_t wrong = 0;
    for (uint64_t row = 0; row < part->rows; row++) {
        unsigned char *to = (unsigned char *)(uintptr_t)(part->at + row * part->at_pitch);
        if (job->kind == JOB_COPY)
            memmove(to, (const void *)(uintptr_t)(part->from + row * part->from_pitch), part->width);
        else if (job->kind == JOB_FILL)
            fill(to, job->value, job->element, part->width);
        else if (!area_done(&job->area))
            wrong += cells_step(job, (uint32_t *)(uintptr_t)part->at, part->width, watch);
        else
            memcpy(to, &job->wrong, CELL);
    }
    return wrong;
}

/* Of a kernel that waits: says that it is there, then looks at the flag. Returns 1 when it is set. */
static uint32_t flag_run(const struct job *job, const struct area *part)
{
    _Atomic uint32_t *flag = (_Atomic uint32_t *)(uintptr_t)part->at;
    if (job->told || job->to == 0)
        return atomic_load(flag) != 0;
    atomic_store(flag, 1);
    return 0;
}

/* found: wrong cells, or that the flag is set. */
static void advance(struct job *job, const struct area *part, uint32_t found)
{
    struct area *area = &job->area;
    job->prepared = false;
    job->wrong += found;
    if (job->kind == JOB_WAIT)
        area->row += found;
    job->told |= area_done(area) || job->kind == JOB_WAIT;
    if (job->kind == JOB_WAIT || area_done(area))
        return;
    area->column += part->width;
    if (area->column < area->width)
        return;
    area->column = 0;
    area->row += part->rows;
}

enum step job_step(struct job *job, int device)
{
    struct fake_page *page = cuda.client.page;
    const uint32_t unit = cuda.device[device].unit, slot = cuda.client.slot;
    struct watch watch = {.unit = unit};
    uint32_t found = 0;
    if (job->kind == JOB_ADD && job->own == NULL && (job->own = malloc(PIECE_BYTES)) == NULL)
        return STEP_HELD; /* the host has no memory now */
    pthread_mutex_lock(&cuda.lock);
    if (!gpu_step_begin(page, slot, unit, job->kind == JOB_COPY, &watch.suspends)) {
        pthread_mutex_unlock(&cuda.lock);
        return STEP_HELD;
    }
    const struct area piece = piece_of(job);
    const bool there = covered(job, &piece);
    pthread_mutex_lock(&cuda.step); /* before the tables are free again: what is there now stays until then */
    pthread_mutex_unlock(&cuda.lock);
    if (there && job->kind == JOB_WAIT)
        found = flag_run(job, &piece);
    else if (there)
        found = piece_run(job, &piece, &watch);
    pthread_mutex_unlock(&cuda.step);
    if (!gpu_step_end(page, slot, unit, watch.suspends))
        return STEP_HELD;
    if (there)
        advance(job, &piece, found);
    return there ? STEP_DONE : STEP_FAULT;
}
