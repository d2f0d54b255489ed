/* double.h - a double of the kernel driver that checks every byte, and the arbiter's end of the connection for GPU time. */
#ifndef TANGRAM_DOUBLE_H
#define TANGRAM_DOUBLE_H

#include "../src/process.h"

enum { COMPUTE = RM_ENGINE_COMPUTE_FIRST, COPY = 11, CHANNEL = 0xc86f, CLIENT = 0xc1d00001, NVML = 0xc1d00002, DEVICE = 0x5c000000 };
enum { CONTEXT = 0x5c001000 }; /* its group; channels follow */

/* The kernel driver's side. */
struct kernel {
    _Atomic unsigned calls, enables, disables;
    uint32_t status; /* of what comes next */
    int rc, error;
    struct rm_disable last[2]; /* enables, by engine: the compute list is sent first */
    struct rm_control last_control;
};
extern struct kernel kernel;
extern int peer, device_fd;
void set_up(void);
void forget_driver(void); /* the double of libcuda: no function is there any more */
void fresh(void); /* nothing was made, and nothing is reported */
int kernel_ioctl(int fd, unsigned long request, ...);

/* The program's side. */
enum form { LONG, SHORT, LONG_WRAPPED, SHORT_WRAPPED, FORMS };
int wrapped(uint32_t escape, void *argument, uint32_t bytes);
void make_as(enum form form, uint32_t client, uint32_t parent, uint32_t handle, uint32_t object_class, uint32_t engine);
void make(uint32_t client, uint32_t parent, uint32_t handle, uint32_t object_class, uint32_t engine);
void drop(uint32_t client, uint32_t handle);
void make_device(uint32_t client, uint32_t device);
void make_group(uint32_t client, uint32_t device, uint32_t group, uint32_t engine, uint32_t channels);

/* The arbiter's side. */
struct reported {
    bool any;
    int fd;     /* -1: none came */
    bool fresh; /* taken out of the flags */
    struct wire_channels channels;
};
struct reported next_reported(void);
void expect(uint32_t client, uint32_t subdevice, const uint32_t *compute, uint32_t computes, const uint32_t *copy, uint32_t copies);
void expect_silence(void);
uint32_t *range(uint32_t first, uint32_t count);
int order(const void *a, const void *b); /* of numbers, for qsort */

/* What the parts of the unit test offer its main: unit_graphics.c, unit_work.c, unit_contexts.c, unit_streams.c,
 * unit_copies.c, unit_objects.c. */
void a_process_that_draws_is_reported_from_one_that_computes(void);
void idleness_is_reported_once_a_millisecond(bool urgent);
void idleness_that_ended_is_not_reported_later(void);
void work_that_did_not_fit_is_reported_by_the_next_launch(void);
void work_that_did_not_fit_is_reported_when_nothing_is_launched(void);
void work_that_did_not_fit_and_has_ended_is_not_reported(void);
void idleness_that_did_not_fit_is_reported_later(bool urgent);
void other_work_that_did_not_fit_is_reported_later(void);
void a_flood_of_hints_displaces_no_work(void);
void a_heartbeat_is_alive_while_its_number_changes(uint64_t first);
void work_that_is_reported_late_is_marked_late(void);
void contexts_are_distinguished(void);
void streams_keep_their_places(void);
void copies_are_work(void);
void the_list_of_objects_agrees_with_a_slow_one_also_on_garbage(void);
void threads_do_not_disturb_each_other(void);
void an_ordinary_call_costs_less_than_100_ns(void);

#endif
