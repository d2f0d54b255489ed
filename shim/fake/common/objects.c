/* objects.c - memory that several processes may reference: IPC handles and shareable VMM handles.
 *
 * Its bytes are charged to one process, the owner. If the owner drops its last reference and others have one, the charge moves to
 * one of them; when the last reference is gone, the memory is freed.
 */
#include "page.h"

#include <stddef.h>

/* Under the page's lock. ID 0: one that is free. NULL: there is none. */
static struct fake_object *find(struct fake_page *page, uint64_t id)
{
    for (uint32_t i = 0; i < page->objects && i < FAKE_SHARED; i++)
        if (page->object[i].id == id)
            return &page->object[i];
    return id == 0 && page->objects < FAKE_SHARED ? &page->object[page->objects++] : NULL;
}

uint64_t object_new(struct fake_page *page, uint32_t slot, struct fake_object like)
{
    page_lock(page);
    struct fake_object *made = find(page, 0);
    const uint64_t id = made != NULL ? ++page->last_object : 0;
    if (made != NULL) {
        *made = like;
        made->owner = slot;
        made->references[slot] = 1;
        made->id = id;
    }
    page_unlock(page);
    return id;
}

bool object_reference(struct fake_page *page, uint32_t slot, uint64_t id, struct fake_object *is)
{
    page_lock(page);
    struct fake_object *found = id != 0 ? find(page, id) : NULL;
    const bool good = found != NULL && found->references[slot] < UINT16_MAX;
    if (good) {
        found->references[slot]++;
        *is = *found;
    }
    page_unlock(page);
    return good;
}

/* If the owner has no reference any more, the object gets another owner, or is freed. */
static void settle(struct fake_page *page, struct fake_object *object)
{
    const uint32_t owner = object->owner % FAKE_SLOTS;
    uint32_t heir = 0;
    if (object->references[owner] > 0)
        return;
    while (heir < FAKE_SLOTS && object->references[heir] == 0)
        heir++;
    uint64_t *used = page->unit[object->unit % FAKE_UNITS].used_bytes;
    const uint64_t moved = object->bytes < used[owner] ? object->bytes : used[owner];
    used[owner] -= moved;
    if (heir < FAKE_SLOTS)
        used[heir] += moved;
    object->owner = heir;
    if (heir == FAKE_SLOTS)
        object->id = 0;
}

void object_release(struct fake_page *page, uint32_t slot, uint64_t id)
{
    page_lock(page);
    struct fake_object *found = id != 0 ? find(page, id) : NULL;
    if (found != NULL && found->references[slot] > 0) {
        found->references[slot]--;
        settle(page, found);
    }
    page_unlock(page);
}

bool objects_drop_slot(struct fake_page *page, uint32_t slot)
{
    bool shared = false;
    page_lock(page);
    for (struct fake_object *object = page->object; object < page->object + page->objects && object < page->object + FAKE_SHARED; object++) {
        object->references[slot] = 0;
        if (object->id != 0)
            settle(page, object);
        shared |= object->id != 0 && object->offset / FAKE_REGION_BYTES == page->slot[slot].region;
    }
    page_unlock(page);
    return shared;
}
