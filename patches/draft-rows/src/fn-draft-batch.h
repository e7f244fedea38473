#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_batch_ext;

// The context's physical micro-batch: llama_n_ubatch() says another number while a feature of ours has enlarged it.
LLAMA_API int32_t fn_draft_ubatch(const llama_context * ctx);

// Gives a batch of tokens without embeddings the rows [n_tokens][n_embd_inp] that belong to them. They are read until the batch
// has been decoded, and not copied; clearing the batch ends it.
LLAMA_API void fn_draft_batch_lend(llama_batch_ext * batch, const float * rows);

// Whether these tokens follow one another, so that a micro-batch of them has its rows in one piece.
inline bool fn_draft_batch_adjacent(const std::vector<int32_t> & idxs) {
    for (size_t i = 1; i < idxs.size(); ++i) {
        if (idxs[i] != idxs[0] + (int32_t) i) {
            return false;
        }
    }
    return !idxs.empty();
}
