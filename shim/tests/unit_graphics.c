/* unit_graphics.c - a process that draws is distinguished from one that computes by what it allocates on its channels. A part of unit_time. */
#include <assert.h>

#include "double.h"

#undef NDEBUG

enum { DREW = 1 << WIRE_GRAPHICS };
enum { HOPPER_3D = 0xcb97, TURING_3D = 0xc597, HOPPER_COMPUTE = 0xcbc0, HOPPER_COPY = 0xc8b5, TO_MEMORY = 0xa140 };

static bool drew(void)
{
    return (atomic_exchange(&tangram.states, 0) & DREW) != 0;
}

void a_process_that_draws_is_reported_from_one_that_computes(void)
{
    static const uint32_t computes[] = {HOPPER_COMPUTE, HOPPER_COPY, TO_MEMORY};
    drew();
    for (enum form form = LONG; form < FORMS; form++) {
        fresh();
        make_device(CLIENT, DEVICE);
        make_group(CLIENT, DEVICE, CONTEXT, COMPUTE, 1);
        for (unsigned i = 0; i < sizeof computes / sizeof *computes; i++)
            make_as(form, CLIENT, CONTEXT + 1, 0x5c002000 + i, computes[i], 0);
        assert(!drew());
        make_as(form, CLIENT, CONTEXT + 1, 0x5c003000, HOPPER_3D, 0);
        assert(drew());
        make_as(form, CLIENT, CONTEXT + 1, 0x5c003001, TURING_3D, 0);
        assert(drew());
        kernel.status = 0x1f; /* the driver refuses it */
        make_as(form, CLIENT, CONTEXT + 1, 0x5c003002, HOPPER_3D, 0);
        kernel.status = RM_OK;
        assert(!drew());
    }
}
