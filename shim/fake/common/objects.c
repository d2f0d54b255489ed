/* objects.c - memory that several processes may reference: IPC handles and shareable VMM handles.
 *
 * Its bytes are charged to one process, the owner. If the owner drops its last reference and others have one, the charge moves to
 * one of them; when the last reference is gone, the memory is freed and its content dropped, whose region it may be in.
 */
#include "page.h"

#include <stddef.h>
#include <stdlib.h>

/* Under the page's lock. NULL: there is none. */
static struct fake_object *find(struct fake_page *page, uint64_t id)
{
    struct fake_object *object = &page->object[id % FAKE_SHARED];
    return id != 0 && object->id == id ? object : NULL;
}

static struct fake_object *find_free(struct fake_page *page)
{
    while (page->objects_full < FAKE_SHARED && page->object[page->objects_full].id != 0)
        page->objects_full++;
    return page->objects_full < FAKE_SHARED ? &page->object[page->objects_full] : NULL;
}

static uint32_t place_of(const struct fake_page *page, const struct fake_object *object)
{
    return (uint32_t)(object - page->object);
}

uint64_t object_new(struct fake_page *page, uint32_t slot, struct fake_object like)
{
    struct fake_object *made;
    uint64_t id = 0;
    do {
        page_lock(page);
        made = find_free(page);
    } while (!page_is_mine(page));
    if (made != NULL) {
        const uint32_t place = place_of(page, made);
        id = ++page->last_object * FAKE_SHARED + place;
        page->objects = place >= page->objects ? place + 1 : page->objects;
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
    struct fake_object *found;
    do {
        page_lock(page);
        found = find(page, id);
    } while (!page_is_mine(page));
    const bool good = found != NULL && found->references[slot] < UINT16_MAX;
    if (good) {
        found->references[slot]++;
        *is = *found;
    }
    page_unlock(page);
    return good;
}

/* If the owner has no reference any more, the object gets another owner, or is freed (true). */
static bool settle(struct fake_page *page, struct fake_object *object)
{
    const uint32_t owner = object->owner % FAKE_SLOTS;
    uint32_t heir = 0;
    if (object->references[owner] > 0)
        return false;
    while (heir < FAKE_SLOTS && object->references[heir] == 0)
        heir++;
    _Atomic uint64_t *used = page->unit[object->unit % FAKE_UNITS].used_bytes;
    const uint64_t moved = take_away(&used[owner], object->bytes);
    object->owner = heir;
    if (heir < FAKE_SLOTS) {
        atomic_fetch_add(&used[heir], moved);
        return false;
    }
    const uint32_t place = place_of(page, object);
    page->objects_full = place < page->objects_full ? place : page->objects_full;
    object->id = 0;
    return true;
}

bool object_release(struct fake_page *page, uint32_t slot, uint64_t id)
{
    bool last = false;
    struct fake_object *found;
    do {
        page_lock(page);
        found = find(page, id);
    } while (!page_is_mine(page));
    if (found != NULL && found->references[slot] > 0) {
        found->references[slot]--;
        last = settle(page, found);
    }
    page_unlock(page);
    return last;
}

void objects_drop_slot(struct fake_page *page, uint32_t slot, int page_fd)
{
    page_lock(page);
    for (struct fake_object *object = page->object; object < page->object + page->objects && object < page->object + FAKE_SHARED; object++) {
        object->references[slot] = 0;
        if (object->id != 0 && settle(page, object))
            file_wipe(page_fd, object->offset, object->capacity);
    }
    page_unlock(page);
}

struct extent {
    uint64_t start, end;
};

static int by_start(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;
    return x->start < y->start ? -1 : x->start > y->start;
}

void objects_wipe_region(struct fake_page *page, uint32_t region, int page_fd)
{
    static struct extent kept[FAKE_SHARED];
    const uint64_t start = region * FAKE_REGION_BYTES, end = start + FAKE_REGION_BYTES;
    size_t count = 0;
    page_lock(page);
    for (const struct fake_object *object = page->object; object < page->object + page->objects && object < page->object + FAKE_SHARED; object++)
        if (object->id != 0 && object->offset >= start && object->offset < end)
            kept[count++] = (struct extent){object->offset, object->offset + object->capacity};
    page_unlock(page);
    qsort(kept, count, sizeof kept[0], by_start);
    uint64_t next = start;
    for (size_t i = 0; i < count; i++) {
        if (kept[i].start > next)
            file_wipe(page_fd, next, kept[i].start - next);
        next = kept[i].end > next ? kept[i].end : next;
    }
    if (next < end)
        file_wipe(page_fd, next, end - next);
}
