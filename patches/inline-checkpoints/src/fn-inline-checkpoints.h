#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// How many states of a sequence one llama_decode() can keep besides its last one: as many as the context rolls back tokens
// (n_rs_seq). 0: another model, more than one sequence, or FN_INLINE_CHECKPOINTS=0.
LLAMA_API int32_t fn_inline_checkpoints_max(struct llama_context * ctx);

// The following decodes keep the states before these positions, ascending and at most max of them, and none for a rollback.
// n = 0: they are stock again. What was kept before is gone. False: too many.
LLAMA_API bool fn_inline_checkpoints_want(struct llama_context * ctx, llama_seq_id seq_id, const llama_pos * pos, size_t n);

// Whether a decode has kept the i-th of them.
LLAMA_API bool fn_inline_checkpoints_kept(struct llama_context * ctx, size_t i);

// Makes the i-th kept state the sequence's, for llama_state_seq_get_data_ext(), until a call with false. No decode in between.
LLAMA_API void fn_inline_checkpoints_show(struct llama_context * ctx, size_t i, bool on);

#ifdef __cplusplus
}
#endif
