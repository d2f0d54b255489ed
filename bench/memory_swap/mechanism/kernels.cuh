/* kernels.cuh - the owner's work. */
#ifndef KERNELS_CUH
#define KERNELS_CUH

#include <stdint.h>

__global__ void add_one(uint32_t *cell, size_t cells, uint32_t rounds)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (uint32_t r = 0; r < rounds; r++)
        for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < cells; i += stride)
            cell[i] += 1;
}

__global__ void set_all(uint32_t *cell, size_t cells)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < cells; i += stride)
        cell[i] = (uint32_t)(i * 2654435761u);
}

__global__ void count_wrong(const uint32_t *cell, size_t cells, uint32_t added, unsigned long long *wrong)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < cells; i += stride)
        if (cell[i] != (uint32_t)(i * 2654435761u) + added)
            atomicAdd(wrong, 1ull);
}

__global__ void wait_for(volatile int *flag)
{
    while (*flag == 0)
        ;
}

__global__ void meet(volatile int *mine, volatile int *other)
{
    *mine = 1;
    __threadfence_system();
    while (*other == 0)
        ;
}

__global__ void nothing(void) {}

#endif
