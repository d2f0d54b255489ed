/* client.c - messages between the daemon and its clients, connecting to it, and what a container may see. */
#define _GNU_SOURCE
#include "client.h"
#include "page.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* A message that can carry one descriptor. */
struct envelope {
    struct fake_message message;
    struct msghdr header;
    struct iovec body;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } rights;
};

static struct msghdr *seal(struct envelope *envelope)
{
    envelope->body = (struct iovec){.iov_base = &envelope->message, .iov_len = sizeof envelope->message};
    envelope->header = (struct msghdr){.msg_iov = &envelope->body, .msg_iovlen = 1, .msg_control = &envelope->rights,
                                       .msg_controllen = sizeof envelope->rights};
    return &envelope->header;
}

bool client_greet(int socket_fd, uint32_t slot, int page_fd)
{
    struct envelope envelope = {.message = {FAKE_PAGE_VERSION, slot},
                                .rights.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof page_fd)}};
    memcpy(CMSG_DATA(&envelope.rights.head), &page_fd, sizeof page_fd);
    return sendmsg(socket_fd, seal(&envelope), MSG_NOSIGNAL) == sizeof envelope.message;
}

static int receive_greeting(struct client *client)
{
    struct envelope envelope;
    ssize_t got;
    while ((got = recvmsg(client->socket, seal(&envelope), MSG_CMSG_CLOEXEC)) < 0)
        if (errno != EINTR)
            return -errno;
    const struct cmsghdr *rights = CMSG_FIRSTHDR(&envelope.header);
    if (rights != NULL && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS)
        memcpy(&client->page_fd, CMSG_DATA(rights), sizeof client->page_fd);
    client->slot = envelope.message.slot;
    const bool good = got == sizeof envelope.message && envelope.message.version == FAKE_PAGE_VERSION && client->slot < FAKE_SLOTS;
    client->page = good ? page_map(client->page_fd) : NULL;
    return client->page != NULL ? 0 : got == 0 ? -ECONNRESET : -EPROTO;
}

void client_catch_up(const struct client *client)
{
    char word = 0;
    if (send(client->socket, &word, sizeof word, MSG_NOSIGNAL) == sizeof word)
        while (recv(client->socket, &word, sizeof word, 0) < 0 && errno == EINTR)
            continue;
}

int client_open_at(struct client *client, enum fake_kind kind, const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    *client = (struct client){.socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), .page_fd = -1};
    int rc = snprintf(at.sun_path, sizeof at.sun_path, "%s", path) < (int)sizeof at.sun_path ? 0 : -ENAMETOOLONG;
    if (rc == 0 && connect(client->socket, (const struct sockaddr *)&at, sizeof at) != 0)
        rc = -errno;
    if (rc == 0)
        rc = receive_greeting(client);
    if (rc == 0)
        client->page->slot[client->slot].kind = kind;
    else
        client_close(client);
    return rc;
}

int client_open(struct client *client, enum fake_kind kind)
{
    const char *path = getenv(FAKE_SOCKET_ENV);
    const bool named = path != NULL && path[0] != '\0';
    const int rc = client_open_at(client, kind, named ? path : FAKE_DEFAULT_SOCKET);
    client->every_gpu = named;
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

bool client_sees_gpu(const struct client *client, uint32_t gpu)
{
    return !atomic_load(&client->page->gpu[gpu].absent) && (client->every_gpu || node_exists("/dev/nvidia%u", client->page->gpu[gpu].minor));
}

bool client_sees_instance(const struct client *client, uint32_t unit)
{
    const struct fake_unit *instance = &client->page->unit[unit];
    if (!instance->live || !instance->compute || !client_sees_gpu(client, instance->gpu))
        return false;
    /* The kernel driver numbers capabilities so: 3 + 135 a GPU + 9 a GPU instance, then its compute instances. */
    const uint32_t gi_cap = 3 + 135 * client->page->gpu[instance->gpu].minor + 9 * fake_gi_of(unit);
    return client->every_gpu ||
           (node_exists("/dev/nvidia-caps/nvidia-cap%u", gi_cap) && node_exists("/dev/nvidia-caps/nvidia-cap%u", gi_cap + 1));
}
