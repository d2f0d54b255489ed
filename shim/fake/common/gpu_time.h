/* gpu_time.h - whose kernels ran for how long. */
#ifndef TANGRAM_FAKE_GPU_TIME_H
#define TANGRAM_FAKE_GPU_TIME_H

#include "wire.h"

#include <stdbool.h>

void gpu_time_init_lock(struct fake_page *page, uint32_t unit);

/* Queues nanoseconds of work behind all that the slot has queued on the unit. Returns what gpu_time_reached asks for: how much
 * the slot will have run there when this work is done. */
uint64_t gpu_time_queue(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ns);

/* All that the slot has queued on the unit until now. */
uint64_t gpu_time_queued(const struct fake_page *page, uint32_t slot, uint32_t unit);

bool gpu_time_reached(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns);
void gpu_time_wait(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns);

/* A number that grows by one each step_ns that a kernel runs, from start_ns to end_ns of what the slot will have run. */
struct gpu_time_counter {
    uint64_t start_ns, end_ns, step_ns, told;
};

/* Brings the number up to now, or leaves it as it is while the slot is held. False: the kernel has ended and all is told. */
bool gpu_time_count(struct fake_page *page, uint32_t slot, uint32_t unit, struct gpu_time_counter *counter, _Atomic uint32_t *number);

/* A held slot does not run. What it was doing stays where it is. */
void gpu_time_hold(struct fake_page *page, uint32_t slot, uint32_t unit, bool held);

/* The slot ends: what it had queued is gone. */
void gpu_time_drop(struct fake_page *page, uint32_t slot);

/* Brings ran_ns of the unit and of its slots up to now. */
void gpu_time_settle(struct fake_page *page, uint32_t unit);

uint64_t page_now_ns(void);

#endif
