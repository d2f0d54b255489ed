/* channels.c - which objects are channels, and what a disabled one stops. */
#include "page.h"
#include "nvos.h"

bool channel_is(const struct fake_kernel_object *object)
{
    return object->handle != 0 && (object->object_class & 0xff) == (HOPPER_CHANNEL_GPFIFO_A & 0xff);
}

bool channel_is_compute(const struct fake_kernel_object *object)
{
    return channel_is(object) && object->engine < NV2080_ENGINE_TYPE_COPY0;
}

void channels_apply(struct fake_page *page, uint32_t slot)
{
    const struct fake_slot *of = &page->slot[slot];
    bool held[FAKE_UNITS] = {false}, copies_held[FAKE_UNITS] = {false};
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
        if (channel_is(&of->object[i]) && of->object[i].disables > 0)
            (channel_is_compute(&of->object[i]) ? held : copies_held)[of->object[i].unit % FAKE_UNITS] = true;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        if (held[unit] != (atomic_load(&of->held[unit]) != 0) || copies_held[unit] != (atomic_load(&of->copies_held[unit]) != 0))
            gpu_time_suspend(page, slot, unit, held[unit], copies_held[unit]);
}
