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
    int page_fd;    /* kept open: it stands for /dev/nvidiactl, and has the memory of GPUs behind the page */
    bool every_gpu; /* true: all GPUs are visible; false: those whose device node exists */
};

/* Connects to $TANGRAM_FAKE_DRIVER, or to the place where real installs keep a socket, too. Returns 0 or -errno. */
int client_open(struct client *client, enum fake_kind kind);
int client_open_at(struct client *client, enum fake_kind kind, const char *path);
void client_close(struct client *client);

/* The daemon's greeting: the client's slot, and the page's descriptor. */
bool client_greet(int socket_fd, uint32_t slot, int page_fd);
/* Returns when the daemon has seen the end of all processes that ended before: their memory is free. */
void client_catch_up(const struct client *client);

/* The first word of a process's command line, as this PID namespace has it. False: there is no such process here. */
bool process_name(int32_t pid, char name[FAKE_NAME]);

/* Whether this process may use the GPU, or the GPU's instance, as the real driver decides it: by the device nodes. */
bool client_sees_gpu(const struct client *client, uint32_t gpu);
bool client_sees_instance(const struct client *client, uint32_t unit);

#endif
