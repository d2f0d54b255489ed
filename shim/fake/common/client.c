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

struct envelope {
    struct msghdr header;
    struct iovec body;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } rights; /* room for one descriptor */
};

static struct msghdr *seal(struct envelope *envelope, struct fake_message *message)
{
    envelope->body = (struct iovec){.iov_base = message, .iov_len = sizeof *message};
    envelope->header = (struct msghdr){.msg_iov = &envelope->body, .msg_iovlen = 1, .msg_control = &envelope->rights,
                                       .msg_controllen = sizeof envelope->rights};
    return &envelope->header;
}

int message_send(int socket_fd, struct fake_message *message, int fd)
{
    struct envelope envelope = {.rights.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)}};
    struct msghdr *header = seal(&envelope, message);
    memcpy(CMSG_DATA(&envelope.rights.head), &fd, sizeof fd);
    if (fd < 0)
        header->msg_controllen = 0;
    message->version = FAKE_PAGE_VERSION;
    while (sendmsg(socket_fd, header, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            return -errno;
    return 0;
}

int message_receive(int socket_fd, struct fake_message *message, int *fd)
{
    struct envelope envelope;
    struct msghdr *header = seal(&envelope, message);
    ssize_t got;
    *fd = -1;
    while ((got = recvmsg(socket_fd, header, MSG_CMSG_CLOEXEC)) < 0)
        if (errno != EINTR)
            return -errno;
    if (got == 0)
        return -ECONNRESET;
    const struct cmsghdr *rights = CMSG_FIRSTHDR(header);
    if (rights != NULL && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(rights), sizeof *fd);
    const bool whole = got == sizeof *message && (header->msg_flags & MSG_TRUNC) == 0;
    return whole && message->version == FAKE_PAGE_VERSION ? 0 : -EPROTO;
}

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
