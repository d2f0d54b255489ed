/* nvml_processes.h - the driver's lists by process, cut down to the container's own. nvml_processes.c has the contract. */
#ifndef TANGRAM_NVML_PROCESSES_H
#define TANGRAM_NVML_PROCESSES_H

#include "process.h"

/* The container's processes on a GPU. */
struct ours {
    struct wire_process *process; /* to be freed */
    uint32_t count;
};

/* False: there is no memory for them. An arbiter that does not answer: none. */
bool our_processes(struct gpu *gpu, struct ours *ours);

/* A list of the driver's, with one entry or more for a process. */
struct listing {
    nvmlDevice_t device;
    const void *of; /* what `read` needs beside the device */
    size_t width;   /* of an entry */
    size_t pid_at;
    nvmlReturn_t (*read)(const struct listing *list, void *entries, unsigned int *count);
};

/* Those of the container. `entries` is to be freed, whatever the answer. */
nvmlReturn_t own_entries(const struct listing *list, struct gpu *gpu, char **entries, unsigned int *count);

/* The same into the program's own buffer, as NVML answers: NVML_ERROR_INSUFFICIENT_SIZE with their number where it is too small. */
nvmlReturn_t pass_own_entries(const struct listing *list, struct gpu *gpu, void *capacity, unsigned int *count);

#endif
