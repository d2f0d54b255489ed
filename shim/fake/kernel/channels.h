/* channels.h - a process's channels in the kernel driver, as ioctl requests and the daemon count them. */
#ifndef TANGRAM_FAKE_CHANNELS_H
#define TANGRAM_FAKE_CHANNELS_H

#include "wire.h"

#include <stdbool.h>

bool channel_is(const struct fake_kernel_object *object);
bool channel_is_compute(const struct fake_kernel_object *object);

/* The caller holds the page's lock. A compute channel that is disabled keeps the whole process off the unit: one of the eight
 * costs as much as all. */
void channels_hold(struct fake_page *page, uint32_t slot);

#endif
