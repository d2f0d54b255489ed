/* hook.h - the list of hooks.def as prototypes of our own functions. */
#ifndef TANGRAM_HOOK_H
#define TANGRAM_HOOK_H

#include "abi.h"
#include "views/management.h"

#define HOOK(name, base, since, ptds, params) CUresult name params;
#define NVML(name, params) nvmlReturn_t name params;
#include "hooks/hooks.def"

#endif
