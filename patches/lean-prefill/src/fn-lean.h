#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct fn_lean;

enum fn_lean_result {
    FN_LEAN_OK            = 0,
    FN_LEAN_BAD_PARAMS    = 1, // chunk out of range, or a FN_LEAN_* switch is malformed
    FN_LEAN_BAD_CONTEXT   = 2, // a draft context, one that has it already, or the transaction is on
    FN_LEAN_BAD_MODEL     = 3, // a form of experts that it does not know
    FN_LEAN_BAD_PLACEMENT = 4, // experts not in plain host memory, or a layer without a device
    FN_LEAN_NO_MEMORY     = 5, // staging or workspace does not fit on a device
};

#define FN_LEAN_OFF   0
#define FN_LEAN_AUTO -1

struct fn_lean_stats {
    int32_t  n_chunk;       // tokens of the physical micro-batch
    int32_t  n_ring;        // layers that a device's staging memory holds
    int32_t  n_devices;
    uint64_t n_passes;      // micro-batches that took their experts from staging memory
    uint64_t n_tokens;      // tokens of these
    uint64_t n_plain;       // micro-batches on the plain path
    uint64_t n_reserves;    // times that a workspace had a new size after a pass: 0, or the reserve was too small
    uint64_t n_verified;    // experts compared with host memory, with FN_LEAN_VERIFY
    uint64_t compute_us;    // between two layers' stops: the device computes
    uint64_t wait_us;       // at the stops, waiting for an upload
    uint64_t n_refills;     // times that slots which were lent were filled again
    uint64_t refill_us;
};

struct fn_lean_device_stats {
    char     name[64];
    int32_t  n_layers;
    uint64_t size_bytes;     // staging memory
    uint64_t bytes_uploaded; // from host memory
    uint64_t bytes_copied;   // from the expert cache's slots
    uint64_t upload_us;      // the copies' own time
    uint64_t wait_us;        // of the device's stops
    uint64_t n_layers_run;   // stops
    uint64_t n_ready;        // stops that found their experts in place
};

// Creates the staging memory of a context and makes its physical micro-batch n_chunk tokens (FN_LEAN_AUTO: the largest
// that fits; FN_LEAN_OFF: nothing, and OK). llama_n_ubatch() goes on to say at most 512. Prints fn:lean:attached, or
// fn:lean:refused with the reason; after a refusal the context must not be used.
LLAMA_API int32_t fn_lean_attach(struct llama_context * ctx, int32_t n_chunk);

// NULL when the context has none
LLAMA_API struct fn_lean * fn_lean_get(struct llama_context * ctx);

LLAMA_API void fn_lean_get_stats(const struct fn_lean * lean, struct fn_lean_stats * stats);

// false when i is not in 0..n_devices-1
LLAMA_API bool fn_lean_get_device_stats(const struct fn_lean * lean, int32_t i, struct fn_lean_device_stats * stats);

// Prometheus text; writes at most size bytes with the terminator, returns the length needed without it (0 when off)
LLAMA_API size_t fn_lean_metrics(struct llama_context * ctx, char * buf, size_t size);

#ifdef __cplusplus
}
#endif
