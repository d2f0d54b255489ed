/* spare_sockets.c - sockets that are made in advance, for a restart of the arbiter when the program has no descriptor left.
 *
 * A program that has used up its descriptors, or lowered its own limit below those that it has open, can make no socket any more: it would
 * run without the arbiter, unlimited. So a socket for each connection is kept here, unconnected. One that could not be connected is kept again.
 */
#include "process.h"

#include <errno.h>
#include <unistd.h>

static struct spare_sockets *const spare = &tangram.spare_sockets;

void spare_sockets_fill(void)
{
    const unsigned count = atomic_load(&tangram.burst_link.wanted) ? RESERVE_SOCKETS : RESERVE_SOCKETS - 1;
    pthread_mutex_lock(&spare->lock);
    for (unsigned i = 0; i < count; i++)
        if (!wire_is_ours(&spare->spare[i]) && !wire_socket(&spare->spare[i]))
            break;
    pthread_mutex_unlock(&spare->lock);
}

bool spare_sockets_take(struct wire_end *end)
{
    bool found = false;
    pthread_mutex_lock(&spare->lock);
    for (unsigned i = 0; i < RESERVE_SOCKETS && !found; i++)
        if (wire_is_ours(&spare->spare[i])) {
            *end = spare->spare[i];
            spare->spare[i] = WIRE_NO_END;
            found = true;
        }
    pthread_mutex_unlock(&spare->lock);
    return found;
}

void spare_sockets_return(struct wire_end *end)
{
    pthread_mutex_lock(&spare->lock);
    for (unsigned i = 0; i < RESERVE_SOCKETS && end->fd >= 0; i++)
        if (!wire_is_ours(&spare->spare[i])) {
            spare->spare[i] = *end;
            *end = WIRE_NO_END;
        }
    pthread_mutex_unlock(&spare->lock);
    wire_close(end);
}

void spare_sockets_forget(void)
{
    struct spare_sockets was = *spare;
    *spare = (struct spare_sockets)SPARE_SOCKETS_EMPTY;
    for (unsigned i = 0; i < RESERVE_SOCKETS; i++)
        wire_close(&was.spare[i]);
}
