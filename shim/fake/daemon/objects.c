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
static uint64_t last_id;

/* The owner may hold it no more: then it finds another, or frees it. */
static void settle(struct object **at)
{
    struct object *object = *at;
    uint32_t heir = 0;
    if (object->holds[object->owner] > 0)
        return;
    while (heir < FAKE_SLOTS && object->holds[heir] == 0)
        heir++;
    page_lock(driver.page);
    uint64_t *used = driver.page->unit[object->is.unit].used_bytes;
    const uint64_t moved = object->is.bytes < used[object->owner] ? object->is.bytes : used[object->owner];
    used[object->owner] -= moved;
    if (heir < FAKE_SLOTS)
        used[heir] += moved;
    page_unlock(driver.page);
    object->owner = heir;
    if (heir == FAKE_SLOTS) {
        *at = object->next;
        close(object->fd);
        free(object);
    }
}

static bool share(uint32_t slot, struct fake_object *object, struct passed *fd)
{
    struct object *made = object->unit < FAKE_UNITS && fd->in >= 0 ? calloc(1, sizeof *made) : NULL;
    if (made == NULL)
        return false;
    object->id = ++last_id;
    *made = (struct object){.next = objects, .is = *object, .fd = fd->in, .owner = slot};
    made->holds[slot] = 1;
    objects = made;
    fd->in = -1;
    return true;
}

bool object_request(uint32_t slot, struct fake_message *message, struct passed *fd)
{
    if (message->type == FAKE_SHARE)
        return share(slot, &message->object, fd);
    struct object **at = &objects;
    while (*at != NULL && (*at)->is.id != message->object.id)
        at = &(*at)->next;
    if (*at == NULL || (*at)->holds[slot] == (message->type == FAKE_IMPORT ? UINT16_MAX : 0))
        return false;
    if (message->type == FAKE_IMPORT) {
        (*at)->holds[slot]++;
        message->object = (*at)->is;
        fd->out = (*at)->fd;
    } else {
        (*at)->holds[slot]--;
        settle(at);
    }
    return true;
}

void object_drop_slot(uint32_t slot)
{
    for (struct object **at = &objects, *object = objects; object != NULL; object = *at) {
        object->holds[slot] = 0;
        settle(at);
        if (*at == object)
            at = &object->next;
    }
}
