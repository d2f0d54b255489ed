/* objects.c - see objects.h. A process has a few hundred objects at most, so every look-up walks the list. */
#include "gputime/objects.h"

#include <stdlib.h>

bool objects_follow(uint32_t object_class)
{
    return object_class == RM_DEVICE || object_class == RM_SUBDEVICE || object_class == RM_GROUP || (object_class & 0xff) == RM_CHANNEL_LOW;
}

static size_t place(const struct objects *objects, uint32_t client, uint32_t handle)
{
    size_t at = 0;
    while (at < objects->count && (objects->object[at].client != client || objects->object[at].handle != handle))
        at++;
    return at;
}

const struct object *objects_find(const struct objects *objects, uint32_t client, uint32_t handle)
{
    size_t at = place(objects, client, handle);
    return at < objects->count ? &objects->object[at] : NULL;
}

bool objects_add(struct objects *objects, struct object added)
{
    size_t at = place(objects, added.client, added.handle);
    if (at == objects->capacity) {
        size_t capacity = objects->capacity ? objects->capacity * 2 : 64;
        struct object *grown = realloc(objects->object, capacity * sizeof *grown);
        if (grown == NULL)
            return false;
        objects->object = grown;
        objects->capacity = capacity;
    }
    objects->object[at] = added;
    if (at == objects->count)
        objects->count++;
    return true;
}

bool objects_remove(struct objects *objects, uint32_t client, uint32_t handle)
{
    bool ran = false;
    for (size_t at = 0; at < objects->count;) {
        const struct object *object = &objects->object[at];
        if (object->client != client || (handle != client && object->handle != handle && object->parent != handle)) {
            at++;
            continue;
        }
        uint32_t gone = object->handle;
        ran |= object->object_class != RM_DEVICE && object->object_class != RM_SUBDEVICE;
        objects->object[at] = objects->object[--objects->count];
        if (gone != handle && handle != client) { /* a child: what stands under it goes too; then look again from the start */
            ran |= objects_remove(objects, client, gone);
            at = 0;
        }
    }
    return ran;
}

const struct object *objects_device(const struct objects *objects, const struct object *of)
{
    for (unsigned steps = 0; of != NULL && of->object_class != RM_DEVICE; steps++)
        of = steps < 8 ? objects_find(objects, of->client, of->parent) : NULL; /* a handle may be its own parent in garbage */
    return of;
}

const struct object *objects_subdevice(const struct objects *objects, uint32_t client, uint32_t device)
{
    for (size_t at = 0; at < objects->count; at++) {
        const struct object *object = &objects->object[at];
        if (object->client == client && object->object_class == RM_SUBDEVICE && object->parent == device)
            return object;
    }
    return NULL;
}

static bool is_kind(const struct object *group, enum engine_kind kind)
{
    if (group == NULL || group->object_class != RM_GROUP)
        return false;
    bool compute = group->engine >= RM_ENGINE_COMPUTE_FIRST && group->engine <= RM_ENGINE_COMPUTE_LAST;
    return kind == ENGINE_COMPUTE ? compute : group->engine >= RM_ENGINE_COPY_FIRST;
}

size_t objects_channels(const struct objects *objects, uint32_t client, uint32_t device, enum engine_kind kind,
                        uint32_t channel[RM_CHANNELS])
{
    size_t found = 0;
    for (size_t at = 0; at < objects->count; at++) {
        const struct object *object = &objects->object[at];
        if (object->client != client || (object->object_class & 0xff) != RM_CHANNEL_LOW)
            continue;
        const struct object *group = objects_find(objects, client, object->parent);
        const struct object *on = is_kind(group, kind) ? objects_device(objects, group) : NULL;
        if (on == NULL || on->handle != device)
            continue;
        if (found < RM_CHANNELS)
            channel[found] = object->handle;
        found++;
    }
    return found;
}

void objects_clear(struct objects *objects)
{
    free(objects->object);
    *objects = (struct objects){0};
}
