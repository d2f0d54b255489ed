/* branch.h - which branch of NVIDIA's driver the fake is: its versions, and the functions that came later. */
#ifndef TANGRAM_FAKE_BRANCH_H
#define TANGRAM_FAKE_BRANCH_H

#include "wire.h"

#include <stdbool.h>

/* A branch's name, or any driver version, which keeps the CUDA version that was set. */
void branch_set(struct fake_page *page, const char *word);

bool branch_has_cuda(const struct fake_page *page, const char *symbol);
bool branch_has_nvml(const struct fake_page *page, const char *function);

#endif
