/* ptx.h - what the variables of a PTX text take. */
#ifndef TANGRAM_PTX_H
#define TANGRAM_PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ptx_needs {
    uint64_t variables; /* bytes; UINT64_MAX: more than any GPU has */
    bool known;         /* false: something was not understood, and it is at least those bytes */
    bool heap;          /* a kernel calls printf or malloc */
};

/* Reads up to a zero, or so many bytes. */
struct ptx_needs ptx_read(const char *text, size_t length);

#endif
