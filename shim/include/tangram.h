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

/* For latency-critical work whose start is known in advance: the arbiter suspends best-effort work before it starts. Otherwise the
 * library detects the first launch itself, which delays the request by one suspend (0.7 ms).
 *
 * Only calls of a latency-critical container have an effect; from any other, and without an arbiter, they do nothing.
 * All return 0, or -1 when the arbiter was not reached. They do not block and may be called from any thread. With a CUDA context current
 * they also launch one empty kernel, which brings this process back onto the GPU before the request. */

/* Work starts in so many microseconds: with 1500 it runs as if alone on the GPU. For an earlier announcement, best-effort work is still
 * suspended 1500 before; but the empty kernel does not wait for that, and the request runs with colder caches. Best-effort work resumes
 * when no work is left after that time, or 5 ms after it if none started. */
int tangram_hint(uint64_t microseconds);

/* A section of latency-critical work begins, and ends. One that is not ended is over after a second. */
int tangram_begin(void);
int tangram_end(void);

/* Until the end, the arbiter schedules this container's work after that of all others, as if its class were best-effort. */
int tangram_yield_begin(void);
int tangram_yield_end(void);

#ifdef __cplusplus
}
#endif
#endif
