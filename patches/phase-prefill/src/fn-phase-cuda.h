#pragma once

// Included after common.cuh, which brings the CUDA types.

#include <cstddef>

void * fn_phase_cuda_proc(const char * name);

// A pool is about to grow by this much, or could not: throws when a prompt runs under the guard and there is no memory.
#if defined(GGML_USE_VMM)
void fn_phase_pool_probe(const CUmemAllocationProp & prop, size_t size);
#endif
void fn_phase_pool_check(cudaError_t error, size_t size);
