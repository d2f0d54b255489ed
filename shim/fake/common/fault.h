/* fault.h - what is to go wrong, as one line of words; the description, ctl and TANGRAM_FAKE_FAULTS share it. */
#ifndef TANGRAM_FAKE_FAULT_H
#define TANGRAM_FAKE_FAULT_H

#include "wire.h"

#include <stdbool.h>

#define FAULT_FORMS                                                                                                            \
    "fail FUNCTION [nth=N] [size=BYTES] [error=CURESULT] | hang FUNCTION seconds=N | missing FUNCTION | suspend-without-effect"

/* False: not understood. */
bool fault_parse(const char *line, struct fake_fault *fault);

#endif
