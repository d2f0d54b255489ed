/* die_locked.c - takes the page's lock, changes one of the two numbers that belong together, and dies there. */
#include "client.h"
#include "page.h"

#include <signal.h>

int main(void)
{
    struct client client;
    if (client_open(&client, FAKE_CUDA) != 0)
        return 1;
    page_lock(client.page);
    client.page->unit[0].used_bytes += 500 * FAKE_MIB; /* and not the slot's: as if killed between the two */
    raise(SIGKILL);
    return 2;
}
