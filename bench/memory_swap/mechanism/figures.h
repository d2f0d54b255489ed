/* figures.h - what the programs of this folder print and how they stop: one line `name value` a figure. C11 and CUDA C++. */
#ifndef FIGURES_H
#define FIGURES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define GIB (1ull << 30)

/* Ends the process: with a channel suspended, an orderly end may wait for ever. */
#define CHECK(call)                                                     \
    do {                                                                \
        int rc_ = (int)(call);                                          \
        if (rc_) {                                                      \
            fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, rc_); \
            printf("failed %d\n", rc_);                                 \
            fflush(stdout);                                             \
            _exit(1);                                                   \
        }                                                               \
    } while (0)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
