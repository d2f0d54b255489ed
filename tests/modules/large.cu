__device__ char large[3ul << 30];
extern "C" __global__ void touch(unsigned long long at) { large[at] = 1; }
