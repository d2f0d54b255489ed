/* die_locked.c - takes the page's lock, counts memory, and dies before it gives either back. */
#include "client.h"
#include "page.h"

#include <signal.h>

int main(void)
{
    struct client client;
    if (client_open(&client, FAKE_CUDA) != 0)
        return 1;
    page_lock(client.page);
    client.page->unit[0].used_bytes[client.slot] += 500 * FAKE_MIB;
    raise(SIGKILL);
    return 2;
}
