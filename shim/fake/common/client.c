/* client.c - connecting to the daemon, and what a container may see. */
#define _GNU_SOURCE
#include "client.h"
#include "packet.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

int client_ask(const struct client *client, struct fake_packet *packet, int send_fd, int *got_fd)
{
    int came = -1;
    if (got_fd != NULL)
        *got_fd = -1;
    int rc = packet_send(client->socket, packet->header.type, packet->body, packet->header.length, send_fd, 0);
    if (rc == 0)
        rc = packet_receive(client->socket, packet, &came, 0);
    if (rc > 0 && got_fd != NULL)
        *got_fd = came;
    else if (came >= 0)
        close(came);
    return rc > 0 ? (int)packet->header.type : rc == 0 ? -ECONNRESET : rc;
}

static int connect_to(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof at.sun_path)
        return -ENAMETOOLONG;
    memcpy(at.sun_path, path, strlen(path));
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (const struct sockaddr *)&at, sizeof at) == 0)
        return fd;
    const int why = -errno;
    close(fd);
    return why;
}

static int say_hello(struct client *client, enum fake_kind kind)
{
    struct fake_packet packet = {.header = {.type = FAKE_HELLO, .length = sizeof(struct fake_hello)}};
    const struct fake_hello hello = {.kind = kind, .page_version = FAKE_PAGE_VERSION};
    memcpy(packet.body, &hello, sizeof hello);
    int page_fd = -1;
    const int type = client_ask(client, &packet, -1, &page_fd);
    if (type < 0)
        return type;
    if (type != FAKE_OK || page_fd < 0)
        return -EPROTO;
    struct fake_welcome welcome;
    memcpy(&welcome, packet.body, sizeof welcome);
    void *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    if (page == MAP_FAILED) {
        close(page_fd);
        return -ENOMEM;
    }
    client->page_fd = page_fd;
    client->page = page;
    client->slot = welcome.slot;
    if (client->page->magic == FAKE_PAGE_MAGIC && client->page->version == FAKE_PAGE_VERSION && welcome.slot < FAKE_SLOTS)
        return 0;
    return -EPROTO;
}

int client_open_at(struct client *client, enum fake_kind kind, const char *path)
{
    *client = (struct client){.socket = connect_to(path), .page_fd = -1};
    if (client->socket < 0)
        return client->socket;
    const int rc = say_hello(client, kind);
    if (rc < 0)
        client_close(client);
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
    if (client->socket >= 0)
        close(client->socket);
    if (client->page != NULL) {
        munmap(client->page, FAKE_PAGE_BYTES);
        close(client->page_fd);
    }
    client->socket = client->page_fd = -1;
    client->page = NULL;
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
    const uint32_t gi_cap = 3 + 135 * client->page->card[instance->card].minor + 9 * instance->gi;
    return client->every_card ||
           (node_exists("/dev/nvidia-caps/nvidia-cap%u", gi_cap) && node_exists("/dev/nvidia-caps/nvidia-cap%u", gi_cap + 1));
}
