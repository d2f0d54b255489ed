/* forms.h - what an ioctl of the process did to its objects in the kernel driver. Read after the call; nothing is changed. */
#ifndef TANGRAM_FORMS_H
#define TANGRAM_FORMS_H

#include "gputime/objects.h"

enum form_kind {
    FORM_NOTHING, /* another ioctl, or one that the driver refused */
    FORM_ALLOC,   /* `object` exists now */
    FORM_FREE,    /* `object` has the client and the handle of what is gone */
};

struct form {
    enum form_kind kind;
    struct object object;
};

/* Could an ioctl with this request allocate or free an object? */
bool form_concerns(unsigned long request);

/* An RM_ALLOC of a size that no known driver has is FORM_NOTHING: its fields may be anywhere. */
struct form form_read(int fd, unsigned long request, const void *argument);

#endif
