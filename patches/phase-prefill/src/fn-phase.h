#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

// The memory transaction around a prompt. Between begin and end the expert cache and the decode workspaces are away
// from the devices and the contexts compute with a larger physical micro-batch; llama_n_ubatch() does not change.
//
// One object serves one target context with an expert cache and, optionally, its draft context. All calls come from the
// thread that decodes, except the readers (state, generation, stats, metrics), which any thread may call.
// Nothing here ends the process: a failed transition is a return value, and afterwards llama_decode() with either
// context returns an error.

#ifdef __cplusplus
extern "C" {
#endif

struct fn_phase;

enum fn_phase_state {
    FN_PHASE_READY,     // cache ready, micro-batch of the contexts
    FN_PHASE_BEGINNING,
    FN_PHASE_PROMPT,    // a prompt may run
    FN_PHASE_ENDING,
    FN_PHASE_FAILED,    // a transition failed: nothing may be computed any more
};

enum fn_phase_result {
    FN_PHASE_OK         = 0,
    FN_PHASE_BAD_PARAMS = 1, // refused before anything was touched
    FN_PHASE_BAD_STATE  = 2, // not possible in this state; nothing was touched
    FN_PHASE_BROKEN     = 3, // the transition failed, fn_phase_last_check() says where
};

enum fn_phase_mode {
    FN_PHASE_TRANSACTION, // release, larger micro-batch, restore
    FN_PHASE_BYPASS,      // the same boundaries, nothing released, micro-batch unchanged: the control of a comparison
};

struct fn_phase_params {
    int32_t n_ubatch; // physical micro-batch of a prompt; ignored by bypass
    int32_t mode;     // enum fn_phase_mode
    int32_t verify;   // hash outputs, KV and recurrent state around each transition, compare the slots with the host
    int32_t reserved; // 0
};

struct fn_phase_stats {
    int32_t  state;
    int32_t  mode;
    uint64_t begins;
    uint64_t ends;
    uint64_t failures;
    uint64_t generation;        // of the cache: completed releases and restores
    uint64_t capacity;          // of the cache: slots of all layers that hold memory now
    uint64_t released_bytes;    // device memory that the last begin gave back
    double   begin_ms;          // last begin: all of it, then its parts
    double   begin_quiesce_ms;
    double   begin_release_ms;
    double   begin_reserve_ms;
    double   end_ms;            // last end
    double   end_quiesce_ms;
    double   end_restore_ms;
    double   end_reserve_ms;
};

// NULL when refused; reason (may be NULL) gets one line. The contexts have to outlive the object.
LLAMA_API struct fn_phase * fn_phase_init(
        struct llama_context * ctx_tgt, struct llama_context * ctx_dft, struct fn_phase_params params, char * reason, size_t reason_size);

LLAMA_API void fn_phase_free(struct fn_phase * phase);

// ready -> prompt. n_tokens is what is still to be computed; it is only reported.
LLAMA_API int32_t fn_phase_begin(struct fn_phase * phase, int32_t n_tokens);

// prompt -> ready
LLAMA_API int32_t fn_phase_end(struct fn_phase * phase);

LLAMA_API int32_t  fn_phase_get_state (const struct fn_phase * phase);
LLAMA_API uint64_t fn_phase_generation(const struct fn_phase * phase);
LLAMA_API void     fn_phase_get_stats (const struct fn_phase * phase, struct fn_phase_stats * stats);

LLAMA_API const char * fn_phase_state_name(int32_t state);

// Name of the check that the last failure did not pass ("" when there is none):
// state, cache-phase, capacity, generation, quiesce, release, reserve, pipeline, restore, upload, memory, verify
LLAMA_API const char * fn_phase_last_check (const struct fn_phase * phase);
LLAMA_API const char * fn_phase_last_detail(const struct fn_phase * phase);

// the marker fn:phase:failed with the last failure
LLAMA_API void fn_phase_print_failed(const struct fn_phase * phase);

// Asked between two micro-batches of the target; true ends the batch there. llama_decode() then returns 0 and
// fn_phase_tokens_done() how many tokens of the batch were computed: state and outputs are those of a shorter batch.
LLAMA_API void    fn_phase_set_stop   (struct fn_phase * phase, bool (*stop)(void * data), void * data);
LLAMA_API int32_t fn_phase_tokens_done(const struct fn_phase * phase);

// For tests, in builds with FLASHNEXT_TESTS: "point:n" makes this point fail at the n-th begin, NULL or "" clears it.
// Points: begin reserve restore upload generation corrupt pool. BAD_PARAMS in any other build, or when it is malformed.
LLAMA_API int32_t fn_phase_set_fault(struct fn_phase * phase, const char * fault);

// Prometheus text; writes at most size bytes with the terminator, returns the length needed without it
LLAMA_API size_t fn_phase_metrics(const struct fn_phase * phase, char * buf, size_t size);

#ifdef __cplusplus
}
#endif
