/* page.c - what the arbiter shows on the page that all processes of the container may read. Nothing here waits or calls the kernel. */
#include "process.h"

static const _Atomic uint64_t *page_now(void)
{
    return atomic_load_explicit(&tangram.link.page, memory_order_acquire);
}

uint32_t link_page_word(size_t at)
{
    const char *page = (const char *)(uintptr_t)page_now();
    return page == NULL ? 0 : atomic_load_explicit((const _Atomic uint32_t *)(const void *)(page + at), memory_order_relaxed);
}

/* One number of a GPU; `at`: bytes from the start of the page to that of GPU 0. */
static bool number_of(struct gpu *gpu, size_t at, uint64_t *number)
{
    const _Atomic uint64_t *page = page_now();
    int wire = atomic_load_explicit(&gpu->wire, memory_order_acquire);
    if (page == NULL || wire < 0)
        return false;
    *number = atomic_load_explicit(&page[at / sizeof *page + (size_t)wire], memory_order_relaxed);
    return true;
}

bool link_unleased(struct gpu *gpu, uint64_t *bytes)
{
    return number_of(gpu, 0, bytes);
}

uint64_t link_limit_bytes(struct gpu *gpu)
{
    const uint64_t known = atomic_load_explicit(&gpu->limit_bytes, memory_order_relaxed);
    const bool shows = (link_page_word(WIRE_GPU_TIME_AT + offsetof(struct wire_gpu_time, features)) & WIRE_SHOWS_LIMITS) != 0;
    uint64_t shown = 0;
    return shows && number_of(gpu, WIRE_LIMITS_AT, &shown) && shown > 0 ? shown : known;
}
