/* memory.h - the last step of an allocation and of a free, for every file that hooks one. */
#ifndef TANGRAM_MEMORY_H
#define TANGRAM_MEMORY_H

#include "process.h"

/* Leave the hook when this driver lacks the function behind it (the program linked to a newer one). */
#define NEEDS(name)                                                                                                            \
    do {                                                                                                                       \
        if (UNLIKELY(!driver_ready()))                                                                                         \
            return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;                                                                       \
        if (UNLIKELY(!HAS(name)))                                                                                              \
            return CUDA_ERROR_NOT_SUPPORTED;                                                                                   \
    } while (0)

/* Reserves bytes of the GPU from the lease; if they do not fit, what is kept of elastic memory is released, and idle pools are trimmed first. */
bool reserve(struct gpu *gpu, uint64_t bytes); /* resident memory */
bool reserve_as(struct gpu *gpu, enum wire_lease_kind kind, uint64_t bytes);

/* Is linear memory of this GPU to be served from blocks that can be swapped? */
static inline bool elastic_wanted(struct gpu *gpu)
{
    return UNLIKELY(atomic_load_explicit(&gpu->bursts, memory_order_relaxed)) && elastic_able(gpu);
}

/* One call that takes linear memory: begin it, call the driver, end it. */
struct taking {
    struct gpu *gpu;
    const void *group; /* small requests of one group share pages */
    uint64_t bytes;    /* as the driver rounds them: less than a page, or whole pages */
    uint64_t reserved; /* 0: it fits into a page that is charged already */
    uint64_t mark;     /* OWNED_MANAGED: it is counted as such, too; else 0 */
};
enum linear { PLAIN, MANAGED }; /* their requests never share a page (measured) */
bool taking_begin(struct taking *taking, struct gpu *gpu, enum linear what, uint64_t bytes); /* false: refuse the call */
void taking_cancel(const struct taking *taking);
CUresult taking_end(const struct taking *taking, CUresult rc, CUdeviceptr at);
/* The driver took rows of that pitch; `planned` is what was expected, and reserved. */
CUresult taking_end_pitch(struct taking *taking, CUresult rc, CUdeviceptr at, uint64_t pitch, uint64_t planned, uint64_t rows);
uint64_t pitch_planned(uint64_t width);

/* placing.c: one call that makes something whose address is not known. */
struct placing {
    struct gpu *gpu; /* NULL: there is nothing to count */
    struct pages *pages;
    CUcontext context;
    uint64_t bytes; /* of its own pages, or its place | PLACED among those that are shared */
};
bool placing_begin(struct placing *placing, struct pages *pages, struct gpu *gpu, CUcontext context, uint64_t bytes); /* false: refuse */
bool placing_end(const struct placing *placing, CUresult rc, uint64_t key); /* false: undo what the driver made */

/* array.c: what an array takes of the GPU before it is rounded to pages. UINT64_MAX when it overflows. */
uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *how, unsigned levels);

/* stack.c, code.c: before a kernel is launched. False: the stacks that it makes the driver grow, or its code, do not fit. */
bool stack_fits(CUfunction function);
bool stack_fits_any(void); /* whichever kernel of this process is launched */
bool code_fits(const void *function);
static inline bool kernel_refused(CUfunction function)
{
    return UNLIKELY(atomic_load_explicit(&tangram.hot.noted, memory_order_relaxed)) && !(code_fits(function) && stack_fits(function));
}
/* Of a function or kernel of that image: bytes of local memory. LOCAL_UNKNOWN: the driver did not report it; it is queried again before a launch. */
enum { LOCAL_UNKNOWN = -1 };
enum kernel_handle { OF_FUNCTION, OF_KERNEL };
void stack_note(const void *function, enum kernel_handle what, const void *image, int local);
/* code.c. False: the driver does not report it. */
bool code_local(const void *function, enum kernel_handle what, int *local);
uint64_t stack_of_calls(void);

/* code.c: an image was loaded whose code comes when it is first used, so many bytes at most, and for one function; or it is gone. */
void code_loads_late(const void *image, uint64_t bytes, uint64_t function_bytes);
/* What is known of an image's functions, removed before the driver unloads them, as it may reuse their handles at once. */
struct owned_list code_forget(const void *image);
void code_forgotten(struct owned_list list, CUresult rc); /* the driver's answer: what was not unloaded is put back */


/* library.c: an image was loaded as a library, whose variables come to each context in which a kernel of it is used, or is gone. */
void library_loaded(const void *library, uint64_t variables);
void library_unloaded(const void *library);
CUcontext library_context(void); /* the calling thread's */
bool library_begin(const void *library, CUcontext context, struct placing *placing); /* before such a use; false: refuse it */
void library_end(const void *library, const struct placing *placing, CUresult rc);
/* Whose code comes with its first use is known as OWNED_LATE; `of` is its library or module, `bytes` one of these. */
enum comes_late { LATE_KERNEL, LATE_KERNEL_USED /* in the first context */, LATE_FUNCTION };
void kernel_gone(const struct owned *kernel); /* its uses are forgotten */
bool kernel_is_used(const struct owned *kernel, CUcontext context);
void kernel_used(struct owned kernel, CUcontext context);

/* What is owned is gone, with all GPU memory that becomes free by it. */
void memory_gone(const struct owned *was);

/* After the driver answered `rc` to a free of a pointer that was disowned for it. */
void settle_free(CUresult rc, const struct owned *was);

/* The same of anything that is known by OWNED_AS. */
void settle_handle(CUresult rc, const struct owned *was);

/* clear.c: zeroes memory before it is returned to the program, where the grant requests it. */
CUresult clear_now(CUdeviceptr at, uint64_t bytes);
CUresult clear_on(CUdevice device, CUdeviceptr at, uint64_t bytes);
void clear_in_order(CUdeviceptr at, uint64_t bytes, CUstream stream, bool per_thread);
CUresult clear_captured(CUresult rc, CUdeviceptr *at, uint64_t bytes, CUstream stream, bool per_thread);

#endif
