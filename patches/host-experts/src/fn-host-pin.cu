#include "fn-host-pin-cuda.h"
#include "fn-host-pin.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

static bool fn_cuda_host_pin(void * ptr, size_t size, char * error, size_t error_size) {
    if (getenv("GGML_CUDA_NO_PINNED") != nullptr) {
        snprintf(error, error_size, "GGML_CUDA_NO_PINNED is set");
        return false;
    }
    // portable: locked for the contexts of all devices
    const cudaError_t result = cudaHostRegister(ptr, size, cudaHostRegisterPortable);
    if (result != cudaSuccess) {
        snprintf(error, error_size, "cudaHostRegister: %s", cudaGetErrorString(result));
        (void) cudaGetLastError();
        return false;
    }
    return true;
}

static void fn_cuda_host_unpin(void * ptr) {
    const cudaError_t result = cudaHostUnregister(ptr);
    // at the end of the process the driver may be gone before the model
    if (result != cudaSuccess && result != cudaErrorCudartUnloading) {
        fprintf(stderr, "fn_host_unpin: %s\n", cudaGetErrorString(result));
        (void) cudaGetLastError();
    }
}

void * fn_host_pin_proc(const char * name) {
    if (strcmp(name, "fn_host_pin") == 0) {
        return (void *) (fn_host_pin_t) fn_cuda_host_pin;
    }
    if (strcmp(name, "fn_host_unpin") == 0) {
        return (void *) (fn_host_unpin_t) fn_cuda_host_unpin;
    }
    return nullptr;
}
