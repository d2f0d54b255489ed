/* wire.h - the arbiter's protocol, version 1, as docs/reference/protocol.md describes it. vgpu/wire.py is the other side.
 *
 * SOCK_SEQPACKET: one packet is one message. Little-endian, no padding that is not named.
 */
#ifndef TANGRAM_WIRE_H
#define TANGRAM_WIRE_H

#include <stdint.h>

enum { WIRE_MAGIC = 0x52474e54, WIRE_VERSION = 1, WIRE_CARDS = 64, WIRE_PAGE_BYTES = 4096 };

enum wire_type {
    WIRE_HELLO = 1,
    WIRE_WELCOME = 2,
    WIRE_LEASE = 3,
    WIRE_LEASED = 4,
    WIRE_RETURN = 5,
    WIRE_RECALL = 6,
    WIRE_USAGE = 7,
    WIRE_ERROR = 8
};

struct wire_header {
    uint32_t magic;
    uint16_t version, type;
    uint32_t seq, body_bytes;
};

struct wire_hello {
    uint32_t pid, flags;
    char library_version[32];
};

struct wire_card {
    uint8_t uuid[16];
    uint64_t limit_bytes;
    uint32_t core_percent, klass;
};

struct wire_welcome {
    uint32_t cards, pad;
    struct wire_card card[WIRE_CARDS];
};

struct wire_lease {
    uint32_t card, pad;
    uint64_t need_bytes, want_bytes;
};

struct wire_leased {
    uint32_t card, refused;
    uint64_t granted_bytes, unleased_bytes;
};

struct wire_amount { /* RETURN and RECALL */
    uint32_t card, pad;
    uint64_t bytes;
};

struct wire_usage {
    uint32_t card, pad;
    uint64_t used_bytes, leased_bytes;
};

struct wire_error {
    uint32_t code;
    char text[124];
};

struct wire_packet {
    struct wire_header header;
    union {
        struct wire_hello hello;
        struct wire_welcome welcome;
        struct wire_lease lease;
        struct wire_leased leased;
        struct wire_amount amount;
        struct wire_usage usage;
        struct wire_error error;
    } body;
};

_Static_assert(sizeof(struct wire_header) == 16, "header");
_Static_assert(sizeof(struct wire_hello) == 40, "HELLO");
_Static_assert(sizeof(struct wire_card) == 32, "card of WELCOME");
_Static_assert(sizeof(struct wire_lease) == 24, "LEASE");
_Static_assert(sizeof(struct wire_leased) == 24, "LEASED");
_Static_assert(sizeof(struct wire_amount) == 16, "RETURN, RECALL");
_Static_assert(sizeof(struct wire_usage) == 24, "USAGE");
_Static_assert(sizeof(struct wire_error) == 128, "ERROR");

#endif
