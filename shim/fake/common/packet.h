/* packet.h - packets between the daemon and its clients (wire.h), with a descriptor if there is one to pass. */
#ifndef TANGRAM_FAKE_PACKET_H
#define TANGRAM_FAKE_PACKET_H

#include "wire.h"

#include <stddef.h>
#include <sys/types.h>

/* fd may be -1. Returns 0 or -errno. */
int packet_send(int socket_fd, uint32_t type, const void *body, size_t length, int fd, int flags);

/* *fd is -1 when none came. Returns 1; 0 when the other side hung up; -errno, -EPROTO for what is no packet. */
int packet_receive(int socket_fd, struct fake_packet *packet, int *fd, int flags);

#endif
