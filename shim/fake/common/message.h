/* message.h - messages between the daemon and its clients (wire.h), with a descriptor if there is one to pass. */
#ifndef TANGRAM_FAKE_MESSAGE_H
#define TANGRAM_FAKE_MESSAGE_H

#include "wire.h"

/* fd may be -1. Returns 0 or -errno. */
int message_send(int socket_fd, struct fake_message *message, int fd, int flags);

/* *fd is -1 when none came. Returns 0; -errno: -ECONNRESET when the other side hung up, -EPROTO for what is no message of ours. */
int message_receive(int socket_fd, struct fake_message *message, int *fd, int flags);

#endif
