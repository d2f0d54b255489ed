/* fault.h - what is to go wrong, as one line of words; the description, ctl and TANGRAM_FAKE_FAULTS share it. */
#ifndef TANGRAM_FAKE_FAULT_H
#define TANGRAM_FAKE_FAULT_H

#include "branch.h"

#include <stddef.h>

/* The functions that can fail or hang. */
enum faultable {
#define F(function) FAULTABLE_##function,
#include "faultable.def"
#undef F
    FAULTABLE_COUNT
};

/* False: refused, with a sentence in why that names what was found and what is allowed. */
bool fault_parse(const char *line, struct fake_fault *fault, char *why, size_t room);

/* Waits as long as the fault says, if it lets that function hang. False: it does not. */
bool fault_hang(const struct fake_fault *fault, const char *function);

/* Whether the page has a fault of that kind. */
bool fault_of_page(const struct fake_page *page, enum fake_fault_kind kind);

#endif
