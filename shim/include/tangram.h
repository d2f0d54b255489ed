/* tangram.h - calls that a program may make of the library that enforces its share of a GPU.
 *
 * A program never needs this header: the library is in every process of a container that requested a share, and acts by
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

/* One GPU as the process's container is held to it. Bytes. */
struct tangram_memory {
    uint64_t limit_bytes;    /* of the container */
    uint64_t used_bytes;     /* allocated by this process */
    uint64_t leased_bytes;   /* used, and what this process may still take without a request to the arbiter */
    uint64_t unleased_bytes; /* of the container's limit, held by none of its processes */
};

/* Fills *out for the GPU that is `gpu`-th in the grant, from 0.
 * Returns 0, or -1 when there is no such GPU, no grant, or the grant cannot be read. Never blocks. */
int tangram_memory(unsigned gpu, struct tangram_memory *out);

/* For latency-critical work that knows when it comes: the GPU is cleared of best-effort work before it is there. Without this the
 * library notices the first launch itself, which costs the request the time of one suspend (0.7 ms).
 *
 * A latency-critical container's calls alone have an effect; from any other, and without an arbiter, they do nothing.
 * All return 0, or -1 when the arbiter was not reached. They do not block and may be called from any thread. With a CUDA context current
 * they also launch one empty kernel, which brings this process back onto the GPU before the request. */

/* Work comes in so many microseconds: 1500 are enough to meet it as if alone. Announced earlier, the GPU is cleared 1500 before all the
 * same, but the empty kernel does not wait for that, and the request finds its process colder. The GPU is given back when there is
 * no work left after that time, or 5 ms after it when none came. */
int tangram_hint(uint64_t microseconds);

/* A section of latency-critical work begins, and ends. One that is not ended is over after a second. */
int tangram_begin(void);
int tangram_end(void);

/* What this container does until the end gives way to everybody, as if it were of class best-effort. */
int tangram_yield_begin(void);
int tangram_yield_end(void);

#ifdef __cplusplus
}
#endif
#endif
