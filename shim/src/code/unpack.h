/* unpack.h - the two compressions that parts of a fatbin come in. */
#ifndef TANGRAM_UNPACK_H
#define TANGRAM_UNPACK_H

#include <stddef.h>

/* One block of LZ4 or one or more frames of zstd, into at most `capacity` bytes. Returns how many bytes came out, 0 for data that is damaged or
 * does not fit: whatever the data is, nothing is read past `length` or written past `capacity`. */
size_t unpack_lz4(const unsigned char *packed, size_t length, unsigned char *out, size_t capacity);
size_t unpack_zstd(const unsigned char *packed, size_t length, unsigned char *out, size_t capacity);

#endif
