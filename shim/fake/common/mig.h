/* mig.h - MIG mode and GPU instances in the page, for the daemon's commands and for NVML. The page's `commands` serialises the changes. */
#ifndef TANGRAM_FAKE_MIG_H
#define TANGRAM_FAKE_MIG_H

#include "page.h"

void print_uuid(const char *prefix, const uint8_t bytes[16], char text[48]);
void make_uuid(const char *prefix, const char *seed, char text[48], uint8_t bytes[16]);

bool mig_may_start(const struct fake_profile *profile, uint32_t start);
/* Beside the instances that exist. */
bool mig_fits(struct fake_page *page, uint32_t gpu, uint32_t profile, uint32_t start);
/* The memory slice at which another instance of a profile begins: the highest that is free, as the driver does. -1: there is none. */
int mig_place(struct fake_page *page, uint32_t gpu, uint32_t profile);
/* A GPU instance without a compute instance, where it fits. Returns its unit. */
uint32_t mig_create(struct fake_page *page, uint32_t gpu, uint32_t profile, uint32_t start);
/* Of a GPU that no process uses. Off: its instances are gone. */
void mig_set_mode(struct fake_page *page, uint32_t gpu, bool on);

#endif
