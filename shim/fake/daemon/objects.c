/* objects.c - memory that more than one process may hold: IPC handles and shareable VMM handles.
 *
 * Its bytes are charged to one holder, the owner. When the owner lets go and others hold on, the charge moves to one of
 * them; when nobody holds on, it is given back.
 */
#include "daemon.h"

#include <stdlib.h>
#include <unistd.h>

struct object {
    struct object *next;
    struct fake_object is;
    int fd;
    uint32_t owner;
    uint16_t holds[FAKE_SLOTS]; /* times each slot holds it */
};

static struct object *objects; /* the daemon has one thread */

static void move_charge(struct fake_page *page, uint32_t from, uint32_t to, const struct fake_object *object)
{
    page_lock(page);
    uint64_t *held = &page->slot[from].used_bytes[object->unit];
    const uint64_t moved = object->bytes < *held ? object->bytes : *held;
    *held -= moved;
    page->slot[to].used_bytes[object->unit] += moved;
    page_unlock(page);
}

/* The owner may hold it no more: then it finds another, or frees it. */
static void settle(struct daemon *daemon, struct object **at)
{
    struct object *object = *at;
    struct fake_page *page = daemon->page;
    uint32_t heir = 0;
    if (object->holds[object->owner] > 0)
        return;
    while (heir < FAKE_SLOTS && object->holds[heir] == 0)
        heir++;
    if (heir < FAKE_SLOTS) {
        move_charge(page, object->owner, heir, &object->is);
        object->owner = heir;
        return;
    }
    page_give(page, object->owner, object->is.unit, object->is.bytes);
    *at = object->next;
    close(object->fd);
    free(object);
}

static bool share(struct daemon *daemon, uint32_t slot, struct fake_object *object, struct passed *fd)
{
    struct object *made = object->unit < FAKE_UNITS && fd->in >= 0 ? calloc(1, sizeof *made) : NULL;
    if (made == NULL)
        return false;
    object->id = ++daemon->last_object;
    *made = (struct object){.next = objects, .is = *object, .fd = fd->in, .owner = slot};
    made->holds[slot] = 1;
    objects = made;
    fd->in = -1;
    return true;
}

bool object_request(struct daemon *daemon, uint32_t slot, struct fake_message *message, struct passed *fd)
{
    if (message->type == FAKE_SHARE)
        return share(daemon, slot, &message->object, fd);
    struct object **at = &objects;
    while (*at != NULL && (*at)->is.id != message->object.id)
        at = &(*at)->next;
    uint16_t *holds = *at == NULL ? NULL : &(*at)->holds[slot];
    if (holds == NULL || *holds == (message->type == FAKE_IMPORT ? UINT16_MAX : 0))
        return false;
    if (message->type == FAKE_IMPORT) {
        (*holds)++;
        message->object = (*at)->is;
        fd->out = (*at)->fd;
    } else {
        (*holds)--;
        settle(daemon, at);
    }
    return true;
}

void object_drop_slot(struct daemon *daemon, uint32_t slot)
{
    for (struct object **at = &objects, *object = objects; object != NULL; object = *at) {
        object->holds[slot] = 0;
        settle(daemon, at);
        if (*at == object)
            at = &object->next;
    }
}
