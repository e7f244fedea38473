#include "fn-phase-cuda.h"

#include "common.cuh"

#include "ggml-backend-impl.h"

#include <cstring>

static size_t fn_free_bytes(int device) {
    size_t free  = 0;
    size_t total = 0;
    ggml_cuda_set_device(device);
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
}

// Drops the stored graphs and the memory pools of a backend with nothing in flight. Returns the bytes of the pools.
static size_t fn_phase_release_pools(ggml_backend_t backend) {
    ggml_backend_cuda_context * ctx = (ggml_backend_cuda_context *) backend->context;

    ggml_cuda_set_device(ctx->device);
#ifdef USE_CUDA_GRAPH
    ctx->cuda_graphs.clear();
#endif
    const size_t before = fn_free_bytes(ctx->device);
    for (auto & of_device : ctx->pools) {
        for (auto & pool : of_device) {
            pool.reset();
        }
    }
    const size_t after = fn_free_bytes(ctx->device);
    return after > before ? after - before : 0;
}

// Grows the pool now, where a failure can be answered: growth in a graph that finds no memory aborts the process.
static bool fn_phase_grow_pool(ggml_backend_t backend, size_t size) {
    ggml_backend_cuda_context * ctx = (ggml_backend_cuda_context *) backend->context;

    // both kinds of pool round up
    constexpr size_t margin = 4*1024*1024;

    if (size == 0) {
        return true;
    }
    if (fn_free_bytes(ctx->device) < size + margin) {
        return false;
    }
    size_t actual = 0;
    void * data = ctx->pool().alloc(size, &actual);
    ctx->pool().free(data, actual);
    return true;
}

void * fn_phase_cuda_proc(const char * name) {
    if (strcmp(name, "fn_phase_release_pools") == 0) {
        return (void *) fn_phase_release_pools;
    }
    if (strcmp(name, "fn_phase_grow_pool") == 0) {
        return (void *) fn_phase_grow_pool;
    }
    return nullptr;
}
