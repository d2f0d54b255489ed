/* objects.c - see objects.h. A process has a few hundred objects at most, so every question walks the list. */
#include "gputime/objects.h"

#include <stdlib.h>

bool objects_follow(uint32_t klass)
{
    return klass == RM_DEVICE || klass == RM_SUBDEVICE || klass == RM_GROUP || (klass & 0xff) == RM_CHANNEL_LOW;
}

static size_t place(const struct objects *book, uint32_t client, uint32_t handle)
{
    size_t at = 0;
    while (at < book->count && (book->object[at].client != client || book->object[at].handle != handle))
        at++;
    return at;
}

const struct object *objects_find(const struct objects *book, uint32_t client, uint32_t handle)
{
    size_t at = place(book, client, handle);
    return at < book->count ? &book->object[at] : NULL;
}

bool objects_add(struct objects *book, struct object added)
{
    size_t at = place(book, added.client, added.handle);
    if (at == book->room) {
        size_t room = book->room ? book->room * 2 : 64;
        struct object *grown = realloc(book->object, room * sizeof *grown);
        if (grown == NULL)
            return false;
        book->object = grown;
        book->room = room;
    }
    book->object[at] = added;
    if (at == book->count)
        book->count++;
    return true;
}

bool objects_remove(struct objects *book, uint32_t client, uint32_t handle)
{
    bool ran = false;
    for (size_t at = 0; at < book->count;) {
        const struct object *object = &book->object[at];
        if (object->client != client || (handle != client && object->handle != handle && object->parent != handle)) {
            at++;
            continue;
        }
        uint32_t gone = object->handle;
        ran |= object->klass != RM_DEVICE && object->klass != RM_SUBDEVICE;
        book->object[at] = book->object[--book->count];
        if (gone != handle && handle != client) { /* a child: what stands under it goes too; then look again from the start */
            ran |= objects_remove(book, client, gone);
            at = 0;
        }
    }
    return ran;
}

const struct object *objects_device(const struct objects *book, const struct object *of)
{
    for (unsigned steps = 0; of != NULL && of->klass != RM_DEVICE; steps++)
        of = steps < 8 ? objects_find(book, of->client, of->parent) : NULL; /* a handle may be its own parent in garbage */
    return of;
}

const struct object *objects_subdevice(const struct objects *book, uint32_t client, uint32_t device)
{
    for (size_t at = 0; at < book->count; at++) {
        const struct object *object = &book->object[at];
        if (object->client == client && object->klass == RM_SUBDEVICE && object->parent == device)
            return object;
    }
    return NULL;
}

static bool is_kind(const struct object *group, enum engine_kind kind)
{
    if (group == NULL || group->klass != RM_GROUP)
        return false;
    bool compute = group->engine >= RM_ENGINE_COMPUTE_FIRST && group->engine <= RM_ENGINE_COMPUTE_LAST;
    return kind == ENGINE_COMPUTE ? compute : group->engine >= RM_ENGINE_COPY_FIRST;
}

size_t objects_channels(const struct objects *book, uint32_t client, uint32_t device, enum engine_kind kind,
                        uint32_t channel[RM_CHANNELS])
{
    size_t found = 0;
    for (size_t at = 0; at < book->count; at++) {
        const struct object *object = &book->object[at];
        if (object->client != client || (object->klass & 0xff) != RM_CHANNEL_LOW)
            continue;
        const struct object *group = objects_find(book, client, object->parent);
        const struct object *on = is_kind(group, kind) ? objects_device(book, group) : NULL;
        if (on == NULL || on->handle != device)
            continue;
        if (found < RM_CHANNELS)
            channel[found] = object->handle;
        found++;
    }
    return found;
}

void objects_clear(struct objects *book)
{
    free(book->object);
    *book = (struct objects){0};
}
