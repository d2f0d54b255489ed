/* objects.c - memory that more than one process may hold: IPC handles and shareable VMM handles.
 *
 * Its bytes are charged to one holder, the owner. When the owner lets go and others hold on, the charge moves to one of
 * them; when nobody holds on, it is given back.
 */
#include "daemon.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct object {
    struct object *next;
    struct fake_object is;
    int fd;
    uint32_t owner;
    uint16_t holds[FAKE_SLOTS]; /* times each slot holds it */
};

static struct object *objects; /* the daemon has one thread */

static struct object **find(uint64_t id)
{
    struct object **at = &objects;
    while (*at != NULL && (*at)->is.id != id)
        at = &(*at)->next;
    return at;
}

bool object_share(struct daemon *daemon, uint32_t slot, struct fake_object *object, int fd)
{
    struct object *made = object->unit < FAKE_UNITS ? calloc(1, sizeof *made) : NULL;
    if (made == NULL)
        return false;
    object->id = ++daemon->last_object;
    made->is = *object;
    made->fd = fd;
    made->owner = slot;
    made->holds[slot] = 1;
    made->next = objects;
    objects = made;
    return true;
}

int object_import(uint32_t slot, struct fake_object *object)
{
    struct object *found = *find(object->id);
    if (found == NULL || found->holds[slot] == UINT16_MAX)
        return -1;
    found->holds[slot]++;
    *object = found->is;
    return found->fd;
}

static void move_charge(struct fake_page *page, uint32_t from, uint32_t to, const struct fake_object *object)
{
    page_lock(page);
    uint64_t *held = &page->slot[from].used_bytes[object->unit];
    const uint64_t moved = object->bytes < *held ? object->bytes : *held;
    *held -= moved;
    page->slot[to].used_bytes[object->unit] += moved;
    page_unlock(page);
}

/* The owner holds it no more: finds it another, or frees it. Returns whether it lives on. */
static bool pass_on(struct daemon *daemon, struct object *object)
{
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (object->holds[slot] > 0) {
            move_charge(daemon->page, object->owner, slot, &object->is);
            object->owner = slot;
            return true;
        }
    page_give(daemon->page, object->owner, object->is.unit, object->is.bytes);
    return false;
}

static void let_go(struct daemon *daemon, struct object **at, uint32_t slot)
{
    struct object *object = *at;
    if (object->holds[slot] > 0 || object->owner != slot || pass_on(daemon, object))
        return;
    *at = object->next;
    close(object->fd);
    free(object);
}

bool object_release(struct daemon *daemon, uint32_t slot, uint64_t id)
{
    struct object **at = find(id);
    if (*at == NULL || (*at)->holds[slot] == 0)
        return false;
    (*at)->holds[slot]--;
    let_go(daemon, at, slot);
    return true;
}

void object_drop_slot(struct daemon *daemon, uint32_t slot)
{
    struct object **at = &objects;
    while (*at != NULL) {
        struct object *object = *at;
        object->holds[slot] = 0;
        let_go(daemon, at, slot);
        if (*at == object)
            at = &object->next;
    }
}
