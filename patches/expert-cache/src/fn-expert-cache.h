#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

// Hot experts of a mixture-of-experts model in device memory during decode. The experts themselves stay in host
// memory; a batch of at most FN_EXPERT_CACHE_MAX_TOKENS tokens computes experts that have a slot on the layer's device
// and the others on the CPU, at the same time.
//
// A cache belongs to one llama_context. All calls come from the thread that decodes with it, except the readers
// (stats, metrics), which any thread may call while the context lives.

#ifdef __cplusplus
extern "C" {
#endif

#define FN_EXPERT_CACHE_MAX_TOKENS 32

struct fn_expert_cache;

enum fn_expert_cache_phase {
    FN_EXPERT_CACHE_READY,     // lookups and admission on
    FN_EXPERT_CACHE_QUIESCING, // uploads are being drained
    FN_EXPERT_CACHE_QUIESCENT, // nothing in flight, lookups off, memory held
    FN_EXPERT_CACHE_RELEASED,  // device memory given back
    FN_EXPERT_CACHE_RESTORING, // memory taken again, slots being loaded
    FN_EXPERT_CACHE_FAILED,    // memory could not be taken again
};

enum fn_expert_cache_result {
    FN_EXPERT_CACHE_OK            = 0,
    FN_EXPERT_CACHE_BAD_PARAMS    = 1, // slots or inserts out of range
    FN_EXPERT_CACHE_BAD_CONTEXT   = 2, // a draft context, or a context that has a cache
    FN_EXPERT_CACHE_BAD_MODEL     = 3, // no experts, or a form of experts the cache does not know
    FN_EXPERT_CACHE_BAD_PLACEMENT = 4, // experts not in plain host memory, or a layer without a device
    FN_EXPERT_CACHE_NO_MEMORY     = 5, // does not fit on a device
    FN_EXPERT_CACHE_BAD_PHASE     = 6, // not possible in this phase
    FN_EXPERT_CACHE_BAD_SWITCH    = 7, // a FN_EXPERT_CACHE_* test switch is malformed
    FN_EXPERT_CACHE_LENT          = 8, // somebody else has a use for the slots' memory
};

struct fn_expert_cache_params {
    int32_t n_slots;   // per layer; 0 = no cache
    int32_t n_inserts; // uploads per layer and step, 1..64
};

struct fn_expert_cache_stats {
    int32_t  phase;      // enum fn_expert_cache_phase
    int32_t  n_slots;    // per layer, as configured
    int32_t  n_inserts;
    int32_t  n_layers;
    int32_t  n_devices;
    int32_t  n_inserts_max;
    uint64_t generation; // completed releases and restores
    uint64_t n_steps;    // graph executions with the cache
    uint64_t capacity;   // slots of all layers that hold memory now
    uint64_t size_bytes; // device memory held now
    uint64_t hits;       // lanes
    uint64_t misses;     // lanes
    uint64_t uploads;    // experts
    uint64_t cpu_rows;   // expert rows computed on the CPU: equals misses
};

struct fn_expert_cache_device_stats {
    char     name[64];
    int32_t  n_layers;
    uint64_t capacity;
    uint64_t size_bytes;
    uint64_t hits;
    uint64_t misses;
    uint64_t uploads;
};

// Creates the cache of a context. On refusal prints the marker fn:cache:refused and returns the reason; the context is
// then as before. n_slots == 0 is no cache and OK.
LLAMA_API int32_t fn_expert_cache_attach(struct llama_context * ctx, struct fn_expert_cache_params params);

// NULL when the context has none
LLAMA_API struct fn_expert_cache * fn_expert_cache_get(struct llama_context * ctx);

LLAMA_API void fn_expert_cache_get_stats(const struct fn_expert_cache * cache, struct fn_expert_cache_stats * stats);

// false when i is not in 0..n_devices-1
LLAMA_API bool fn_expert_cache_get_device_stats(const struct fn_expert_cache * cache, int32_t i, struct fn_expert_cache_device_stats * stats);

LLAMA_API const char * fn_expert_cache_phase_name(int32_t phase);

// ready -> quiescent: uploads drained, lookups off; batches take the stock path
LLAMA_API int32_t fn_expert_cache_quiesce(struct fn_expert_cache * cache);

// quiescent -> ready, without a release in between
LLAMA_API int32_t fn_expert_cache_resume(struct fn_expert_cache * cache);

// ready or quiescent -> released: device memory freed, contents remembered, generation + 1.
// FN_EXPERT_CACHE_LENT changes nothing.
LLAMA_API int32_t fn_expert_cache_release(struct fn_expert_cache * cache);

// released -> ready: the same capacity, every slot that was filled loaded from host memory, generation + 1.
// FN_EXPERT_CACHE_NO_MEMORY leaves the cache failed.
LLAMA_API int32_t fn_expert_cache_restore(struct fn_expert_cache * cache);

// Prometheus text of the context's cache; writes at most size bytes with the terminator, returns the length needed
// without it (0 when there is no cache)
LLAMA_API size_t fn_expert_cache_metrics(struct llama_context * ctx, char * buf, size_t size);

// the marker fn:cache:stats with the counters of now
LLAMA_API void fn_expert_cache_print_stats(const struct fn_expert_cache * cache);

#ifdef __cplusplus
}
#endif
