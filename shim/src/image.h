/* image.h - how much of the GPU the variables of a module take, read from its image. */
#ifndef TANGRAM_IMAGE_H
#define TANGRAM_IMAGE_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes of its __device__ variables. The image is a cubin, a fatbin or PTX, as the driver takes it: without a length. `known` is
 * false where a part of it is compressed or of no known form: then it may be more. UINT64_MAX: more than any GPU has. */
uint64_t image_variables(const void *image, bool *known);

#endif
