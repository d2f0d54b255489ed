/* branch.h - which branch of NVIDIA's driver the fake is: its versions, and the functions that came later. */
#ifndef TANGRAM_FAKE_BRANCH_H
#define TANGRAM_FAKE_BRANCH_H

#include "wire.h"

#include <stdbool.h>

/* A branch's name, or any driver version, which keeps the CUDA version that was set. */
void branch_set(struct fake_page *page, const char *word);

bool branch_has_cuda(const struct fake_page *page, const char *symbol);
bool branch_has_nvml(const struct fake_page *page, const char *function);

/* Whether a fault "missing FUNCTION" takes libcuda's exported symbol away: FUNCTION is the symbol, or the name by which
 * cuGetProcAddress finds it. */
bool fault_hides(const struct fake_fault *fault, const char *symbol);
/* Whether the name is a symbol of libcuda, or one by which cuGetProcAddress finds some. */
bool is_cuda_name(const char *name);

#endif
