/* image.h - how much of the GPU a module takes, read from its image. */
#ifndef TANGRAM_IMAGE_H
#define TANGRAM_IMAGE_H

#include <stdbool.h>
#include <stdint.h>

struct image_needs {
    uint64_t variables; /* bytes of its __device__ variables. UINT64_MAX: more than any GPU has */
    uint64_t code;      /* bytes that its code takes at most */
    uint64_t function;  /* of them, the largest function */
    bool known;         /* false: a part that the GPU may take is of no known form or compression, and its variables are not seen */
    bool heap;          /* a kernel calls printf or malloc */
};

#define IMAGE_UNSTATED UINT64_MAX

/* The image is a cubin, a fatbin or PTX, of so many bytes; IMAGE_UNSTATED: as the driver takes it, without a length. Of a fatbin the parts
 * count that a GPU of that compute capability (90 for 9.0) would take; 0: all. */
struct image_needs image_read(const void *image, uint64_t length, unsigned capability);

#endif
