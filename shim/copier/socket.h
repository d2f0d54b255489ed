/* socket.h - the copier's socket: who may connect, and packets in and out. Nothing here waits. */
#ifndef TANGRAM_COPIER_SOCKET_H
#define TANGRAM_COPIER_SOCKET_H

#include <stdbool.h>
#include <stddef.h>

#include "protocol.h"

struct packet {
    struct copier_header header;
    union {
        struct copier_job job;
        struct copier_forget forget;
        struct copier_done done;
        struct copier_state state;
        struct copier_error error;
        char bytes[COPIER_PACKET_LIMIT - sizeof(struct copier_header)];
    } body;
};

/* A listening socket of mode 0600 in place of the one that an earlier copier left. Ends the program with a sentence if it cannot be made. */
int socket_listen(const char *path);

/* A connection that root or the copier's own user made; -1: there is none. Others are rejected with a sentence. *lacks: there may be one, and no
 * descriptor or memory for it, so the listener stays readable. */
int socket_accept(int listener, bool *lacks);

enum received { RECEIVED, RECEIVED_BAD, NOTHING_YET, PEER_GONE };
/* descriptor: the one that came along; -1 if none or several did. RECEIVED_BAD: it is no request of this version, and `why` says what is wrong. */
enum received socket_receive(int peer, struct packet *packet, int *descriptor, const char **why);

/* A packet with the header of its type; the body is still to be set. */
struct packet packet_of(enum copier_type type, size_t body_bytes);
struct packet error_packet(enum copier_reason reason, const char *text);

/* false: the peer does not read now. A peer that is gone is noticed by the next receive. */
bool socket_send(int peer, const struct packet *packet);

#endif
