/* reserve.c - sockets that were made while there were descriptors, for the day when the arbiter is restarted and there are none.
 *
 * A program that has used up its descriptors, or lowered its own limit below those that it has open, can make no socket any more: it would go
 * on without the arbiter, unlimited. So a socket for each connection waits here, connected to nothing. One that could not be connected comes back.
 */
#include "process.h"

#include <errno.h>
#include <unistd.h>

static struct reserve *const reserve_ = &tangram.reserve;

void reserve_fill(void)
{
    pthread_mutex_lock(&reserve_->lock);
    for (unsigned i = 0; i < RESERVE_SOCKETS; i++)
        if (!wire_is_ours(&reserve_->spare[i]) && !wire_socket(&reserve_->spare[i]))
            break;
    pthread_mutex_unlock(&reserve_->lock);
}

bool reserve_take(struct wire_end *end)
{
    bool found = false;
    pthread_mutex_lock(&reserve_->lock);
    for (unsigned i = 0; i < RESERVE_SOCKETS && !found; i++)
        if (wire_is_ours(&reserve_->spare[i])) {
            *end = reserve_->spare[i];
            reserve_->spare[i] = WIRE_NO_END;
            found = true;
        }
    pthread_mutex_unlock(&reserve_->lock);
    return found;
}

void reserve_give_back(struct wire_end *end)
{
    pthread_mutex_lock(&reserve_->lock);
    for (unsigned i = 0; i < RESERVE_SOCKETS && end->fd >= 0; i++)
        if (!wire_is_ours(&reserve_->spare[i])) {
            reserve_->spare[i] = *end;
            *end = WIRE_NO_END;
        }
    pthread_mutex_unlock(&reserve_->lock);
    wire_close(end);
}

void reserve_forget(void)
{
    struct reserve was = *reserve_;
    *reserve_ = (struct reserve)RESERVE_EMPTY;
    for (unsigned i = 0; i < RESERVE_SOCKETS; i++)
        wire_close(&was.spare[i]);
}
