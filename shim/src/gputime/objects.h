/* objects.h - what the process's clients own in the kernel driver: devices, subdevices, channel groups, channels.
 *
 * It follows allocations and frees as they pass and answers which channels run a process's compute on a device. It makes no
 * calls and takes no locks. Freeing an object frees what stands under it, as the driver does.
 */
#ifndef TANGRAM_OBJECTS_H
#define TANGRAM_OBJECTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gputime/rm.h"

struct object {
    uint32_t client, handle, parent, object_class;
    uint32_t engine; /* of a group */
    int fd;          /* that it was allocated through */
};

struct objects {
    struct object *object;
    size_t count, capacity;
};

enum engine_kind { ENGINE_COMPUTE, ENGINE_COPY };

/* Is an object of this class worth keeping? */
bool objects_follow(uint32_t object_class);

/* False when it cannot be remembered. A handle that is there already is replaced: the driver would not have given it twice. */
bool objects_add(struct objects *objects, struct object added);

/* Forget an object and all under it; a client's own handle forgets the client. True when a channel or a group was among them. */
bool objects_remove(struct objects *objects, uint32_t client, uint32_t handle);

const struct object *objects_find(const struct objects *objects, uint32_t client, uint32_t handle);

/* The device that an object stands under, or NULL. */
const struct object *objects_device(const struct objects *objects, const struct object *of);

/* The client's subdevice of a device, or NULL. */
const struct object *objects_subdevice(const struct objects *objects, uint32_t client, uint32_t device);

/* The channels of one kind that a client has on a device, RM_CHANNELS at most; how many there are. */
size_t objects_channels(const struct objects *objects, uint32_t client, uint32_t device, enum engine_kind kind,
                        uint32_t channel[RM_CHANNELS]);

void objects_clear(struct objects *objects);

#endif
