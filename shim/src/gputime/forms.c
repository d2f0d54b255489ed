/* forms.c - see forms.h. The library and the trial program read with it. */
#include "gputime/forms.h"

static const struct form nothing = {.kind = FORM_NOTHING};

static struct form alloc_form(struct object object, uint64_t parameters)
{
    if (object.object_class == RM_GROUP && parameters != 0)
        object.engine = ((const struct rm_group_parameters *)(uintptr_t)parameters)->engine;
    return (struct form){FORM_ALLOC, object};
}

static struct form read_alloc(int fd, const void *argument, unsigned bytes)
{
    if (bytes == sizeof(struct rm_alloc)) {
        const struct rm_alloc *a = argument;
        if (a->status == RM_OK)
            return alloc_form((struct object){a->client, a->handle, a->parent, a->object_class, 0, fd}, a->parameters);
    } else if (bytes == sizeof(struct rm_alloc_short)) {
        const struct rm_alloc_short *a = argument;
        if (a->status == RM_OK)
            return alloc_form((struct object){a->client, a->handle, a->parent, a->object_class, 0, fd}, a->parameters);
    }
    return nothing;
}

static struct form read_free(const void *argument, unsigned bytes)
{
    const struct rm_free *f = argument;
    if (bytes != sizeof *f || f->status != RM_OK)
        return nothing;
    return (struct form){FORM_FREE, {.client = f->client, .handle = f->handle}};
}

static struct form read_bare(int fd, unsigned escape, const void *argument, unsigned bytes)
{
    if (escape == RM_ESCAPE_ALLOC)
        return read_alloc(fd, argument, bytes);
    return escape == RM_ESCAPE_FREE ? read_free(argument, bytes) : nothing;
}

bool form_concerns(unsigned long request)
{
    unsigned escape = rm_escape(request);
    return rm_type(request) == RM_TYPE && (escape == RM_ESCAPE_ALLOC || escape == RM_ESCAPE_FREE || escape == RM_ESCAPE_XFER);
}

struct form form_read(int fd, unsigned long request, const void *argument)
{
    if (argument == NULL || !form_concerns(request))
        return nothing;
    if (rm_escape(request) != RM_ESCAPE_XFER)
        return read_bare(fd, rm_escape(request), argument, rm_size(request));
    const struct rm_xfer *wrapped = argument;
    if (rm_size(request) != sizeof *wrapped || wrapped->argument == 0)
        return nothing;
    return read_bare(fd, wrapped->escape, (const void *)(uintptr_t)wrapped->argument, wrapped->bytes);
}
