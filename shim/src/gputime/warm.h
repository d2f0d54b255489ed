/* warm.h - one empty kernel, launched when work is announced. process.h includes this. */
#ifndef TANGRAM_WARM_H
#define TANGRAM_WARM_H

#include <pthread.h>

#include "abi.h"

enum { WARM_CONTEXTS = 16 };

struct warm_kernel {
    CUcontext context;
    CUfunction function;
    CUstream stream;
};

struct warm {
    pthread_mutex_t lock;
    struct warm_kernel of[WARM_CONTEXTS];
    unsigned count;
};

/* Launches it in the calling thread's context; does nothing without one, and while anything there is captured. */
void warm_up(void);
void warm_context_ended(CUcontext context); /* its handle may be reused */
void warm_forget(void); /* in a forked child */

#endif
