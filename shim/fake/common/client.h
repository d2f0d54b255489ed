/* client.h - a library's or tool's connection to the daemon. */
#ifndef TANGRAM_FAKE_CLIENT_H
#define TANGRAM_FAKE_CLIENT_H

#include "wire.h"

#include <stdbool.h>
#include <stddef.h>

struct client {
    int socket; /* -1 = not connected */
    uint32_t slot;
    struct fake_page *page;
    int page_fd; /* kept open: it stands for /dev/nvidiactl */
    bool every_card; /* true: all cards are visible; false: those whose device node exists */
};

/* Connects to $TANGRAM_FAKE_DRIVER, or to the place where real installs keep a socket, too. Returns 0 or -errno. */
int client_open(struct client *client, enum fake_kind kind);
int client_open_at(struct client *client, enum fake_kind kind, const char *path);
void client_close(struct client *client);

/* A request, which becomes its answer. send_fd may be -1; *got_fd (may be NULL) is -1 when none came.
 * Returns 0, or -errno: -EPERM when it is refused. */
int client_ask(const struct client *client, struct fake_message *message, int send_fd, int *got_fd);

/* One message, with a descriptor if there is one to pass. Returns 0 or -errno: -ECONNRESET when the other side hung
 * up, -EPROTO for what is no message of ours. fd may be -1; *fd is -1 when none came. */
int message_send(int socket_fd, struct fake_message *message, int fd);
int message_receive(int socket_fd, struct fake_message *message, int *fd);

/* The first word of a process's command line, as this PID namespace has it. False: there is no such process here. */
bool process_name(int32_t pid, char name[FAKE_NAME]);

/* Whether this process may use the card, or the card's instance, as the real driver decides it: by the device nodes. */
bool client_sees_card(const struct client *client, uint32_t card);
bool client_sees_instance(const struct client *client, uint32_t unit);

#endif
