/* client.c - connecting to the daemon, and what a container may see. */
#define _GNU_SOURCE
#include "client.h"
#include "page.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

int client_ask(const struct client *client, struct fake_message *message, int send_fd, int *got_fd)
{
    int came = -1, rc = message_send(client->socket, message, send_fd);
    if (rc == 0)
        rc = message_receive(client->socket, message, &came);
    if (rc == 0 && message->type != FAKE_DONE)
        rc = -EPERM;
    const bool wanted = rc == 0 && got_fd != NULL;
    if (came >= 0 && !wanted)
        close(came);
    if (got_fd != NULL)
        *got_fd = wanted ? came : -1;
    return rc;
}

int client_open_at(struct client *client, enum fake_kind kind, const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    struct fake_message greeting = {0};
    *client = (struct client){.socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), .page_fd = -1};
    int rc = snprintf(at.sun_path, sizeof at.sun_path, "%s", path) < (int)sizeof at.sun_path ? 0 : -ENAMETOOLONG;
    if (rc == 0 && connect(client->socket, (const struct sockaddr *)&at, sizeof at) != 0)
        rc = -errno;
    if (rc == 0)
        rc = message_receive(client->socket, &greeting, &client->page_fd);
    if (rc == 0)
        client->page = page_map(client->page_fd);
    if (rc == 0 && (client->page == NULL || greeting.slot >= FAKE_SLOTS))
        rc = -EPROTO;
    if (rc == 0) {
        client->slot = greeting.slot;
        client->page->slot[client->slot].kind = kind;
    } else {
        client_close(client);
    }
    return rc;
}

int client_open(struct client *client, enum fake_kind kind)
{
    const char *path = getenv(FAKE_SOCKET_ENV);
    const bool named = path != NULL && path[0] != '\0';
    const int rc = client_open_at(client, kind, named ? path : FAKE_DEFAULT_SOCKET);
    client->every_card = named;
    return rc;
}

void client_close(struct client *client)
{
    if (client->page != NULL)
        munmap(client->page, FAKE_PAGE_BYTES);
    if (client->page_fd >= 0)
        close(client->page_fd);
    if (client->socket >= 0)
        close(client->socket);
    *client = (struct client){.socket = -1, .page_fd = -1};
}

bool process_name(int32_t pid, char name[FAKE_NAME])
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/cmdline", (int)pid);
    FILE *file = fopen(path, "re");
    const size_t got = file == NULL ? 0 : fread(name, 1, FAKE_NAME - 1, file);
    if (file != NULL)
        fclose(file);
    name[got] = '\0';
    return name[0] != '\0';
}

static bool node_exists(const char *format, uint32_t number)
{
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, format, number);
    return stat(path, &status) == 0;
}

bool client_sees_card(const struct client *client, uint32_t card)
{
    return client->every_card || node_exists("/dev/nvidia%u", client->page->card[card].minor);
}

bool client_sees_instance(const struct client *client, uint32_t unit)
{
    const struct fake_unit *instance = &client->page->unit[unit];
    if (!instance->live || !client_sees_card(client, instance->card))
        return false;
    /* The kernel driver numbers capabilities so: 3 + 135 a card + 9 a GPU instance, then its compute instances. */
    const uint32_t gi_cap = 3 + 135 * client->page->card[instance->card].minor + 9 * fake_gi_of(unit);
    return client->every_card ||
           (node_exists("/dev/nvidia-caps/nvidia-cap%u", gi_cap) && node_exists("/dev/nvidia-caps/nvidia-cap%u", gi_cap + 1));
}
