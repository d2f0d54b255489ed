/* device.h - for unit_created.c: a driver's physical memory, handles and mappings, and one under the library. */
#ifndef TANGRAM_TEST_DEVICE_H
#define TANGRAM_TEST_DEVICE_H

#include "../src/hooks/hook.h"
#include "../src/memory/memory.h"

enum { PAGES = 40, PHYSICAL = 4096, PAGES_IN_BLOCK = 4, DEVICES = 3 };
#define BASE UINT64_C(0x7f0000000000)

struct physical {
    unsigned pages, handles, mappings;
    uint64_t content[PAGES_IN_BLOCK];
    CUmemAllocationProp prop;
    bool resident; /* it was exported */
};
struct place {
    unsigned physical; /* 0: nothing is mapped */
    unsigned first, pages; /* the mapping's first page, and its pages */
    unsigned access[DEVICES];
};
struct device {
    struct physical physical[PHYSICAL];
    unsigned made;
    struct place place[PAGES];
};
extern struct device library, alone; /* under the library, and without it */
extern unsigned countdown, in_a_row; /* calls of the library until so many fail; 0: none does */

struct physical *physical_of(struct device *device, CUmemGenericAllocationHandle handle); /* NULL: there is no such handle */
bool is_there(const struct physical *physical);
bool is_covered(const struct device *device, unsigned first, unsigned pages); /* by whole mappings, side by side */
CUresult dev_create(struct device *device, CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop);
CUresult dev_release(struct device *device, CUmemGenericAllocationHandle handle);
CUresult dev_map(struct device *device, CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle);
CUresult dev_change(struct device *device, CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count); /* NULL: unmap */
CUresult dev_retain(struct device *device, CUmemGenericAllocationHandle *handle, void *at);
void device_begin(void); /* the library's driver is `library` */

#endif
