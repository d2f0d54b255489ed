/* page.h - working on the shared page: its locks and bells, memory and time of units. */
#ifndef TANGRAM_FAKE_PAGE_H
#define TANGRAM_FAKE_PAGE_H

#include "wire.h"

#include <stdbool.h>

/* page.c - memory. */

void shared_mutex_init(pthread_mutex_t *mutex);
void shared_mutex_lock(pthread_mutex_t *mutex); /* also one whose holder died: what it guards is right after every step */

/* A turn of a fake_lock. A holder that was stopped may have lost it when it goes on: others have changed what it guards. So what a holder decides is right
 * after every step, and before it writes what others may have made wrong it checks lock_is_mine. A stop in the few nanoseconds between the two is not
 * covered. lease_ns: how long a turn may last before a waiter takes it over. */
uint32_t lock_take(struct fake_lock *lock, uint64_t lease_ns);
bool lock_is_mine(const struct fake_lock *lock, uint32_t turn);
bool lock_leave(struct fake_lock *lock, uint32_t turn); /* false: it was lost before */

/* The same of the page; a thread has it once. */
void page_lock(struct fake_page *page);
bool page_is_mine(const struct fake_page *page);
bool page_unlock(struct fake_page *page);

/* Memory of a unit for a slot. page_take refuses (false) past the unit's limit and changes nothing then. Managed memory is freed as such. */
bool page_take(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes, bool managed);
void page_give(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t bytes, bool managed);
uint64_t page_unit_used(struct fake_page *page, uint32_t unit);
/* The same under the page's lock. */
uint64_t page_sum(const struct fake_page *page, uint32_t unit);
/* Memory of a GPU's processes, its MIG instances' included. */
uint64_t page_gpu_used(struct fake_page *page, uint32_t gpu);

/* At most so much less, and how much that was. */
uint64_t take_away(_Atomic uint64_t *from, uint64_t most);

uint64_t page_now_ns(void);
/* Wakes all threads that wait for the number to change; waits until it is not `seen` any more, at most `most_ns`. */
void bell_ring(_Atomic uint32_t *bell);
void bell_wait(const _Atomic uint32_t *bell, uint32_t seen, uint64_t most_ns);

/* NULL: it cannot be mapped, or is no page of this version. */
struct fake_page *page_map(int fd);
/* Drops what is in these bytes of the page's file. */
void file_wipe(int page_fd, uint64_t offset, uint64_t bytes);

/* memfd_create by its number: the libraries are built against a C library older than it. -1 on failure. */
int new_memfd(const char *name);

/* objects.c - memory that several processes reference. */

/* 0: there are FAKE_SHARED already. The caller's slot has one reference to it. */
uint64_t object_new(struct fake_page *page, uint32_t slot, struct fake_object like);
/* False: there is no such object. */
bool object_reference(struct fake_page *page, uint32_t slot, uint64_t id, struct fake_object *is);
/* True: that was the last reference to it. What is in its bytes of the file is the caller's to drop. */
bool object_release(struct fake_page *page, uint32_t slot, uint64_t id);
/* The slot has ended, and its references with it. Objects that nobody references any more are wiped. */
void objects_drop_slot(struct fake_page *page, uint32_t slot, int page_fd);
/* Drops what is in the region, but for objects in it that others still reference. */
void objects_wipe_region(struct fake_page *page, uint32_t region, int page_fd);

/* gpu_time.c - how long the kernels of each slot ran. */

/* Queues nanoseconds of work behind all that the slot has queued on the unit. Returns what gpu_time_reached takes: how much
 * the slot will have run there when this work is done. */
uint64_t gpu_time_queue(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ns);
bool gpu_time_reached(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns);
void gpu_time_wait(struct fake_page *page, uint32_t slot, uint32_t unit, uint64_t ran_ns);

/* A number that grows by one each step_ns that a kernel runs, from start_ns to end_ns of what the slot will have run. */
struct gpu_time_counter {
    uint64_t start_ns, end_ns, step_ns, reported;
};
/* Brings the number up to now, or leaves it as it is while the slot is suspended. False: the kernel has ended and all is shown. */
bool gpu_time_count(struct fake_page *page, uint32_t slot, uint32_t unit, struct gpu_time_counter *counter, _Atomic uint32_t *number);

/* A suspended slot does not run. Its work stays where it is. The same for its copies. */
void gpu_time_suspend(struct fake_page *page, uint32_t slot, uint32_t unit, bool held, bool copies_held);

/* A step of work that writes to memory: a copy, or else work of the compute channels. No step begins while its channels are
 * suspended. gpu_step_end is false if there was a suspend meanwhile: memory may have been saved in the middle of the step, and
 * it must be done again. */
bool gpu_step_begin(struct fake_page *page, uint32_t slot, uint32_t unit, bool copy, uint32_t *suspends);
bool gpu_step_end(struct fake_page *page, uint32_t slot, uint32_t unit, uint32_t suspends);
bool gpu_step_undisturbed(const struct fake_page *page, uint32_t slot, uint32_t unit, uint32_t suspends); /* the same in the middle of it */
/* After a suspend: returns when no step of the slot writes any more, or 20 ms later if its process is stopped in one. */
void gpu_steps_wait(const struct fake_page *page, uint32_t slot);
/* The slot ends: what it had queued is gone. */
void gpu_time_drop(struct fake_page *page, uint32_t slot);
/* Brings ran_ns of the unit and of its slots up to now. */
void gpu_time_settle(struct fake_page *page, uint32_t unit);

/* Percent of the time between two samples in which that ran, and of the last period in which the unit ran. */
uint32_t gpu_time_percent(const struct fake_page *page, const _Atomic uint64_t sampled_ns[FAKE_SAMPLES], uint64_t from, uint64_t to);
uint32_t gpu_time_busy(const struct fake_page *page, uint32_t unit);

/* channels.c - a process's channels in the kernel driver, as ioctl requests and the daemon count them. */

bool channel_is(const struct fake_kernel_object *object);
bool channel_is_compute(const struct fake_kernel_object *object);
/* Called with the page's lock held. A compute channel that is disabled keeps all kernels and fills of the process off the unit: one of
 * the eight costs as much as all. A copy channel that is disabled stops its copies. */
void channels_apply(struct fake_page *page, uint32_t slot);

#endif
