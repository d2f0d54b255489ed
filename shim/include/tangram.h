/* tangram.h - what a program may ask the library that holds it to its share of a GPU.
 *
 * A program never needs this header: the library is in every process of a container that asked for a share, and acts by
 * itself. Link to nothing; look the functions up with dlsym(RTLD_DEFAULT, ...) so that the program also runs without us.
 */
#ifndef TANGRAM_H
#define TANGRAM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library's version, e.g. "0.1.0". Never NULL; not to be freed. */
const char *tangram_version(void);

/* One card as the process's container is held to it. Bytes. */
struct tangram_memory {
    uint64_t limit_bytes;    /* of the container */
    uint64_t used_bytes;     /* allocated by this process */
    uint64_t leased_bytes;   /* used, and what this process may still take without asking */
    uint64_t unleased_bytes; /* of the container's limit, held by none of its processes */
};

/* Fills *out for the card that is `card`-th in the grant, from 0.
 * Returns 0, or -1 when there is no such card, no grant, or the grant cannot be read. Never blocks. */
int tangram_memory(unsigned card, struct tangram_memory *out);

#ifdef __cplusplus
}
#endif
#endif
