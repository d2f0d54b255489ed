/* load_driver.h - the kernel of load.c, and the functions of the driver and of libtangram that it looks up at its start. */
#include <stddef.h>
#include <stdint.h>

static const char ptx[] =
    "//fake spin us=param0\n"
    ".version 6.4\n.target sm_50\n.address_size 64\n"
    ".visible .entry spin(.param .u32 p_us, .param .u32 p_per_us, .param .u64 p_out)\n{\n"
    " .reg .pred %p<2>;\n .reg .b32 %r<14>;\n .reg .b64 %d<6>;\n .shared .align 4 .b32 sums[256];\n"
    " ld.param.u32 %r1, [p_us];\n ld.param.u32 %r2, [p_per_us];\n mul.lo.u32 %r1, %r1, %r2;\n ld.param.u64 %d1, [p_out];\n"
    " mov.u32 %r3, %tid.x;\n mov.u32 %r4, %ctaid.x;\n mov.u32 %r5, %ntid.x;\n mad.lo.u32 %r6, %r4, %r5, %r3;\n"
    " mov.u32 %r7, %r6;\n mov.u32 %r8, sums;\n shl.b32 %r9, %r3, 2;\n add.u32 %r8, %r8, %r9;\n"
    " mov.u32 %r10, 0;\n st.volatile.shared.u32 [%r8], %r10;\n"
    "again:\n setp.eq.u32 %p1, %r1, 0;\n @%p1 bra done;\n"
    " mad.lo.u32 %r7, %r7, 1664525, 1013904223;\n"
    " ld.volatile.shared.u32 %r10, [%r8];\n add.u32 %r10, %r10, %r7;\n st.volatile.shared.u32 [%r8], %r10;\n"
    " sub.u32 %r1, %r1, 1;\n bra again;\n"
    "done:\n cvta.to.global.u64 %d2, %d1;\n mul.wide.u32 %d3, %r6, 8;\n add.u64 %d4, %d2, %d3;\n"
    " ld.volatile.shared.u32 %r10, [%r8];\n st.global.u32 [%d4], %r7;\n st.global.u32 [%d4+4], %r10;\n ret;\n}\n";

static int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*load)(void **, const void *), (*flags)(int, unsigned);
static int (*get_function)(void **, void *, const char *), (*attribute)(int *, int, int);
static int (*allocate)(uint64_t *, size_t), (*fetch)(void *, uint64_t, size_t);
static int (*host_allocate)(void **, size_t, unsigned), (*stream_create)(void **, unsigned);
static int (*copy_in)(uint64_t, const void *, size_t, void *), (*copy_out)(void *, uint64_t, size_t, void *);
static int (*event_create)(void **, unsigned), (*event_record)(void *, void *), (*event_wait)(void *), (*stream_wait)(void *);
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*launch_together)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **);
static int (*hint)(uint64_t), (*begin)(void), (*end)(void);
