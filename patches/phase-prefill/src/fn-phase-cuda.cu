#include "common.cuh"

#include "fn-phase-cuda.h"

#include "fn-phase-marker.h"

#include "ggml-backend-impl.h"

#include <cstring>
#include <string>

// Thrown where a pool would abort the process, caught around the graph.
struct fn_pool_full {
    size_t size;
};

// upstream's; the same for every CUDA backend
static ggml_status (*fn_compute)(ggml_backend_t, ggml_cgraph *) = nullptr;

// the backend whose guarded graph is being computed by this thread
static thread_local ggml_backend_cuda_context * fn_guarded = nullptr;

// A graph that is being captured has to be finished first: there it aborts, as without us. It has run directly before
// it is captured, so its pools have their size.
static bool fn_may_throw() {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return fn_guarded && cudaStreamIsCapturing(fn_guarded->stream(), &status) == cudaSuccess && status == cudaStreamCaptureStatusNone;
}

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

#if defined(GGML_USE_VMM)
void fn_phase_pool_probe(const CUmemAllocationProp & prop, size_t size) {
    if (!fn_may_throw()) {
        return;
    }
    CUmemGenericAllocationHandle handle;
    const CUresult result = cuMemCreate(&handle, size, &prop, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        throw fn_pool_full { size };
    }
    CU_CHECK(result);
    CU_CHECK(cuMemRelease(handle));
}
#endif

void fn_phase_pool_check(cudaError_t error, size_t size) {
    if (error == cudaErrorMemoryAllocation && fn_may_throw()) {
        (void) cudaGetLastError();
        throw fn_pool_full { size };
    }
}

static ggml_status fn_guarded_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    ggml_backend_cuda_context * ctx = (ggml_backend_cuda_context *) backend->context;

    ggml_status status;
    fn_guarded = ctx;
    try {
        status = fn_compute(backend, cgraph);
    } catch (const fn_pool_full & full) {
        ctx->curr_stream_no = 0;

        const size_t free = fn_free_bytes(ctx->device);
        GGML_LOG_ERROR("phase-prefill: %s: no memory for the scratch space of the prompt: %zu MiB more are needed, %zu MiB are free\n",
                ggml_backend_name(backend), full.size >> 20, free >> 20);
        fn_phase_marker("pool", "{\"device\":" + std::to_string(ctx->device) + ",\"bytes\":" + std::to_string(full.size) +
                ",\"free_bytes\":" + std::to_string(free) + "}");
        status = GGML_STATUS_ALLOC_FAILED;
    }
    fn_guarded = nullptr;
    return status;
}

// While it is on, a pool of this backend that cannot grow fails the graph; otherwise it aborts the process, as upstream.
static void fn_phase_guard_pools(ggml_backend_t backend, bool on) {
    if (on && backend->iface.graph_compute != fn_guarded_compute) {
        fn_compute = backend->iface.graph_compute;
        backend->iface.graph_compute = fn_guarded_compute;
    } else if (!on && backend->iface.graph_compute == fn_guarded_compute) {
        backend->iface.graph_compute = fn_compute;
    }
}

void * fn_phase_cuda_proc(const char * name) {
    if (strcmp(name, "fn_phase_release_pools") == 0) {
        return (void *) fn_phase_release_pools;
    }
    if (strcmp(name, "fn_phase_grow_pool") == 0) {
        return (void *) fn_phase_grow_pool;
    }
    if (strcmp(name, "fn_phase_guard_pools") == 0) {
        return (void *) fn_phase_guard_pools;
    }
    return nullptr;
}
