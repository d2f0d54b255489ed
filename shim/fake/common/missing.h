/* missing.h - which branch of NVIDIA's driver the fake is, and what of it is not there or goes wrong. */
#ifndef TANGRAM_FAKE_MISSING_H
#define TANGRAM_FAKE_MISSING_H

#include "wire.h"

#include <stdbool.h>
#include <stddef.h>

/* branch.c */

/* A branch's name, or any driver version, which keeps the CUDA version that was set. */
void branch_set(struct fake_page *page, const char *word);

bool branch_has_cuda(const struct fake_page *page, const char *symbol);
bool branch_has_nvml(const struct fake_page *page, const char *function);

/* Whether a fault "missing FUNCTION" takes libcuda's exported symbol away: FUNCTION is the symbol, or the name by which
 * cuGetProcAddress finds it. */
bool fault_hides(const struct fake_fault *fault, const char *symbol);
/* Whether the name is a symbol of libcuda, or one by which cuGetProcAddress finds some. */
bool is_cuda_name(const char *name);

/* hide.c */

/* dlsym no longer finds the exported symbols that `hidden` names; callers inside the library still reach them.
 * To be called while the library is loaded, before any other look-up. False: the loader's table cannot be changed. */
bool hide_symbols(bool (*hidden)(const char *symbol));

/* fault.c - what is to go wrong, as one line of words; the description, ctl and TANGRAM_FAKE_FAULTS share it. */

/* False: refused, with a sentence in why that names what was found and what is allowed. */
bool fault_parse(const char *line, struct fake_fault *fault, char *why, size_t capacity);

/* Waits for the fault's time, if the fault lets that function hang. False: it does not. */
bool fault_hang(const struct fake_fault *fault, const char *function);

/* Whether the page has a fault of that kind. */
bool fault_of_page(const struct fake_page *page, enum fake_fault_kind kind);

#endif
